"""base."""

__all__: list[str] = []
