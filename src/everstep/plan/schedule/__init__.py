"""schedule."""

__all__: list[str] = []
