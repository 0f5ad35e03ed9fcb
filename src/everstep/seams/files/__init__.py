"""Files: the contract of a file system, Linux behind it, locks and claims.

Read ``filesystem`` first (the contract), then ``posix``.
"""
