"""The gradient log in the keeper: receive records, keep them in memory, write them to segments.

Runs in the keeper process, or as a thread of the training process if there is no keeper process.
Read in this order:

``logs``           the logs of all timelines that this keeper has served
``log_store``      one log: its records in memory, and its thread that digests and writes them
``segment_queue``  collect records into segments, whose number of steps depends on the disk's speed;
                   make a segment durable; the log's share of ``Budget(disk_bytes=)``
"""

from everstep.keeper.log.log_store import LoggedStep, LogStore, records_from_wire
from everstep.keeper.log.logs import Logs
from everstep.keeper.log.segment_queue import folder_bytes, full_disk_error, open_segments

__all__ = [
    "LogStore",
    "LoggedStep",
    "Logs",
    "folder_bytes",
    "full_disk_error",
    "open_segments",
    "records_from_wire",
]
