"""look."""

__all__: list[str] = []
