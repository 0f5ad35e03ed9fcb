"""held."""

__all__: list[str] = []
