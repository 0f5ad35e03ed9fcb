"""ship."""

__all__: list[str] = []
