"""Captures a base in one step. Read ``saver`` first, then ``flight`` (one base in flight)."""
