"""multistep."""

__all__: list[str] = []
