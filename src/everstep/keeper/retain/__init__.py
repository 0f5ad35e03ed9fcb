"""Retention: delete bases and log segments that are no longer needed.

Runs in the keeper process, after each commit. Read in this order:

``retention``  delete a base or a segment so that a crash at any point is harmless; retention and
               cleanup after crashes, in order; read a base back before older ones are deleted
``history``    steps that ``history=`` keeps reachable, and the bases that they need
"""

from everstep.keeper.retain.history import HistoryFlush, HistoryWindows
from everstep.keeper.retain.retention import (
    KeptBases,
    ReadBack,
    Retention,
    delete_files,
    kept_by,
    perform_deletion,
    retain_log,
)

__all__ = [
    "HistoryFlush",
    "HistoryWindows",
    "KeptBases",
    "ReadBack",
    "Retention",
    "delete_files",
    "kept_by",
    "perform_deletion",
    "retain_log",
]
