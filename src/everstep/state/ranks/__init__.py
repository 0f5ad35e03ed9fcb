"""ranks."""

__all__: list[str] = []
