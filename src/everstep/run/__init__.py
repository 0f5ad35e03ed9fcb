"""The run folder: which bases, logs and timelines it has.

Read ``scan`` first (records only, no data), then ``decide`` (the order in which bases are tried),
``chain`` and ``segments`` (the log), ``verify`` (reads everything back), ``fence`` (one writer at
a time).
"""
