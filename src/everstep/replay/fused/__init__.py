"""fused."""

__all__: list[str] = []
