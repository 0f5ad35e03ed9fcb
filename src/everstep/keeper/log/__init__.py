"""The gradient log in the keeper: receives records and writes them to segments.

Read ``logs`` first (the logs of a timeline), then ``log`` (one log) and ``log_writer`` (its
segments).
"""
