"""budget."""

__all__: list[str] = []
