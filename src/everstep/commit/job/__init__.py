"""job."""

__all__: list[str] = []
