"""The gradient log in the keeper: receive records, keep them in memory, write them to segments.

Runs in the keeper process, or as a thread of the training process if there is no keeper process.
Read in this order:

``logs``           the logs of all timelines that this keeper has served
``log_store``      one log: its records in memory, and its thread that digests and writes them
``segment_queue``  collect records into segments, whose number of steps depends on the disk's speed;
                   make a segment durable
``disk_space``     the log's share of ``Budget(disk_bytes=)``
``recall_wire``    send captures and logs to a restarted training process
"""

from everstep.keeper.log.disk_space import folder_bytes
from everstep.keeper.log.log_store import LoggedStep, LogStore
from everstep.keeper.log.logs import Logs
from everstep.keeper.log.recall_wire import (
    base_from_wire,
    base_to_wire,
    log_to_wire,
    recalled_from_wire,
)
from everstep.keeper.log.segment_queue import open_segments

__all__ = [
    "LogStore",
    "LoggedStep",
    "Logs",
    "base_from_wire",
    "base_to_wire",
    "folder_bytes",
    "log_to_wire",
    "open_segments",
    "recalled_from_wire",
]
