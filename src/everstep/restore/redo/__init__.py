"""Replays log records onto restored state. Read ``redo`` first."""
