"""redo."""

__all__: list[str] = []
