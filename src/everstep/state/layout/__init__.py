"""layout."""

__all__: list[str] = []
