"""Retention: deletes bases and log segments that nothing needs any more."""
