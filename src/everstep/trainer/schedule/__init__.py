"""Captures every step by a plan (Checkflow). Read ``scheduled`` first."""
