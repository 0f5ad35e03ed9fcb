"""processes."""

__all__: list[str] = []
