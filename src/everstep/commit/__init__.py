"""Commit, history and retention: decisions without I/O.

``lineage``    which bases are in the history of a timeline
``machine``    the life of one base, from first byte to commit record
``retention``  which bases may go
"""
