"""attach."""

__all__: list[str] = []
