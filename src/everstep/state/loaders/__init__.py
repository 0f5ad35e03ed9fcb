"""loaders."""

__all__: list[str] = []
