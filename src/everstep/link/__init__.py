"""Link between the training process and the keeper process.

Both processes import this package; it imports neither ``trainer`` nor ``keeper``. Read in this
order:

``messages``  kinds of messages, and their encoding as plain dicts; one rank's place in one start of
              a job; counters of a keeper; layouts and memory of records of the gradient log
``wire``      connections: framing, deadlines, file descriptors, errors
``registry``  find a keeper: registration files and locks
``spawn``     start a keeper process and connect to it
``capture``   a base in shared memory: the trainer fills it, the keeper writes it to disk
``save``      handle of a base in progress
``channel``   errors and deadlines of background work
``assembly``  data that brings a base captured over several steps to one step; compare a base in
              memory with elements of the live state

Only the training process imports these, as they need torch:

``pool``        blocks of the arena
``recordable``  which updates can be recorded, and in which form
"""

from everstep.link.channel import BackgroundChannel
from everstep.link.registry import KeeperInfo
from everstep.link.save import Save, as_everstep_error, complete, fail, failing_save
from everstep.link.spawn import connect
from everstep.link.wire import Connection, error_to_wire

__all__ = [
    "BackgroundChannel",
    "Connection",
    "KeeperInfo",
    "Save",
    "as_everstep_error",
    "complete",
    "connect",
    "error_to_wire",
    "fail",
    "failing_save",
]
