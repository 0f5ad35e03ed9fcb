"""retain."""

__all__: list[str] = []
