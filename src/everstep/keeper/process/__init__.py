"""The keeper process: accepts trainers and dispatches their messages to duties.

Read ``server`` first, then ``duties``.
"""
