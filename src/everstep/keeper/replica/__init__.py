"""The replica: a copy of the state that the keeper updates from the log (LowDiff+).

The only room of the keeper that imports torch. Read ``replicas`` first, then ``replica_state``.
"""
