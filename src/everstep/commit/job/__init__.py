"""Agreement between the ranks of a job: state machines and their messages, without I/O.

``agreement`` chooses what to restore at a start from the ranks' ``offers``; ``coordinator`` (rank
0) and ``member`` (every rank) commit bases of a timeline together; ``messages`` has what they
exchange.
"""
