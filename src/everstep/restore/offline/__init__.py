"""offline."""

__all__: list[str] = []
