"""process."""

__all__: list[str] = []
