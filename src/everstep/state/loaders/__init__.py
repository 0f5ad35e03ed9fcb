"""Data loaders with a position: those that save their own, and the generators of their workers."""
