"""Retention: delete bases and log segments that are no longer needed.

Runs in the keeper process, after each commit. Read in this order:

``retention``  retention and cleanup after crashes, in order; read a base back before older ones are
               deleted
``history``    steps that ``history=`` keeps reachable, and the bases that they need
``deletion``   delete a base or a segment so that a crash at any point is harmless
"""

from everstep.keeper.retain.deletion import delete_files, delete_segments, perform_deletion
from everstep.keeper.retain.history import HistoryFlush, HistoryWindow, history_windows
from everstep.keeper.retain.retention import ReadBack, Retention

__all__ = [
    "HistoryFlush",
    "HistoryWindow",
    "ReadBack",
    "Retention",
    "delete_files",
    "delete_segments",
    "history_windows",
    "perform_deletion",
]
