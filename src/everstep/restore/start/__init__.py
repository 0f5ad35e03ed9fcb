"""Resumes a run: chooses the state to restore, restores it, reports it."""
