"""Reads a base into live objects, verified before anything is changed. Read ``load`` first."""
