"""network."""

__all__: list[str] = []
