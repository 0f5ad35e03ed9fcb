"""Finds how far the log of a run leads beyond its bases."""
