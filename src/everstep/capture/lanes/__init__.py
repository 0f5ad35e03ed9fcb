"""Lanes: ordered copies from a device into host memory.

Read ``lane`` first (the contract), then ``batches`` (grouping of tensors into copies), ``cuda`` and
``pinned`` (side streams and pinned memory), ``emulated`` (a slow link, for experiments).
"""
