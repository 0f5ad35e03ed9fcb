"""persist."""

__all__: list[str] = []
