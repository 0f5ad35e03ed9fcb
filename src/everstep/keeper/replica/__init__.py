"""replica."""

__all__: list[str] = []
