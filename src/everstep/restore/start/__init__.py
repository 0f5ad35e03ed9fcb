"""start."""

__all__: list[str] = []
