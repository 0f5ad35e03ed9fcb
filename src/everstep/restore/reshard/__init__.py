"""Restores a log that was written by another number of ranks."""
