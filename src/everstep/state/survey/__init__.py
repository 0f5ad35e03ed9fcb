"""survey."""

__all__: list[str] = []
