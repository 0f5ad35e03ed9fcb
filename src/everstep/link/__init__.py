"""link."""

__all__: list[str] = []
