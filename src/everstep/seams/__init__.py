"""Access to the world outside the process: files, clocks, shared memory, processes, the network.

No other package opens, renames, syncs or deletes a file (``tests/project/test_tidy.py`` checks it).
Tests replace these objects, so every operation can be made to fail, to be torn by a crash, or to be
lost. The package is used in the training process and in the keeper process. Read in this order:

``filesystem``   the file-system contract; detection of storage that hangs
``posix``        Linux's implementation of it
``locks``        files and bytes locked during the lifetime of a process
``clock``        wall time, monotonic time, time during which this process runs
``memory``       memory shared between processes; fast reads of scattered elements
``processes``    starting and watching processes; threads, conditions, signals
``mailbox``      messages between ranks
``sockets``      Unix sockets
``group``        ``torch.distributed``
``machine``      properties of this machine
``fingerprint``  versions and hardware that bit-exact results depend on
``failpoints``   named places at which tests and the demo kill the process
``progress``     lines on standard error; progress of long work
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import OptionError
from everstep.seams.clock import Clock, ManualClock, SystemClock
from everstep.seams.failpoints import failpoint
from everstep.seams.filesystem import DirEntry, FileSystem, ReadFile, WriteFile
from everstep.seams.posix import PosixFileSystem

__all__ = [
    "Clock",
    "DirEntry",
    "FileSystem",
    "ManualClock",
    "PosixFileSystem",
    "ReadFile",
    "Seams",
    "SystemClock",
    "WriteFile",
    "failpoint",
]


@dataclass(frozen=True)
class Seams:
    """File system, clock and other external services of a Checkpointer; tests replace them.

    Attributes:
        filesystem: reads and writes files.
        clock: measures time.
        lane: makes the copy lane (a ``capture.lane.Lane``, which this package cannot import);
            None: the engine chooses.
        group: makes the group of ranks (a ``seams.group.Group``) from a timeout in seconds, or
            returns None for a process that trains by itself. If this attribute is None, the group
            comes from torch.distributed.
        events: file system of the event log, which no recovery reads; None: it is not written.
            Tests that fail or count operations of ``filesystem`` leave it out.
    """

    filesystem: FileSystem = field(default_factory=PosixFileSystem)
    clock: Clock = field(default_factory=SystemClock)
    lane: Callable[[], Any] | None = None
    group: Callable[[float], Any] | None = None
    events: FileSystem | None = None

    @classmethod
    def parse(cls, value: Seams | None) -> Seams:
        """Return the seams passed by a caller, or the real ones for None.

        Raises:
            OptionError: ``value`` is something else.
        """
        if not isinstance(value, (cls, type(None))):
            raise OptionError(f"seams must be everstep.seams.Seams, not {value!r}")
        return value or cls(events=PosixFileSystem())
