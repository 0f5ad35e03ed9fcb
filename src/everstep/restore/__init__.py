"""restore."""

__all__: list[str] = []
