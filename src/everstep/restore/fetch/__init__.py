"""fetch."""

__all__: list[str] = []
