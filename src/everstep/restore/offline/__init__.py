"""Rebuilds the state of a step in host memory, without the user's objects."""
