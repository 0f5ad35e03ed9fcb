"""Record gradients and step marks (LowDiff, sections IV and V); runs in the training process.

The keeper receives the records and writes them as segments of the gradient log. Read in this order:

- ``recorder``: one record per optimizer update, one step mark per step; when a base is due.
- ``update_inputs``: the tensors and options an update consumes, as its record holds them;
  functions registered for entries, which replay runs again.
- ``kept_records``: host memory of records, and when each may be released; which records go to disk,
  and how far training may run ahead of them.
- ``untracked_writes``: detect writes to optimizer-owned tensors that no hook announced.
- ``nonfinite``: detect NaN and infinity in recorded gradients."""

from everstep.trainer.log.kept_records import HeldRecords, LogMemory
from everstep.trainer.log.nonfinite import NonFiniteCheck, nonfinite_error
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.log.untracked_writes import WatchedTensors
from everstep.trainer.log.update_inputs import InputReader, LoggableUpdates, UpdateInputs

__all__ = [
    "HeldRecords",
    "InputReader",
    "LogMemory",
    "LoggableUpdates",
    "NonFiniteCheck",
    "Recorder",
    "UpdateInputs",
    "WatchedTensors",
    "nonfinite_error",
]
