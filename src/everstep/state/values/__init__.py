"""values."""

__all__: list[str] = []
