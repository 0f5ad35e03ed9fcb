"""relaid."""

__all__: list[str] = []
