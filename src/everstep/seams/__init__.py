"""The seams: everything that touches the world outside the process passes through here.

``filesystem``  the contract for files and directories
``posix``       that contract on a real Linux file system
``moving``      whether what is waited for comes back: what hangs, and what is only slow
``clock``       time, real and manual
``running``     time in which this process runs, for deadlines of progress
``memory``      memory that processes share
``claims``      what processes that share a file have claimed
``sockets``, ``locks``, ``processes``, ``runtime``   what a keeper is started and found with
``mailbox``     the contract for messages between ranks
``peers``, ``group``   that contract over TCP; what torch.distributed knows of a job
``machine``, ``fingerprint``   what this machine has; what bits can depend on
``signals``     those that announce the end of the process
``threads``     threads for I/O
``failpoints``  named places at which tests and the demo kill the process
``messages``, ``progress``   lines on standard error; progress bars on a terminal, lines elsewhere

Nothing outside this package opens, renames, syncs or deletes a file; a test reads the
sources for it, another watches a save at run time. That is what makes crashes
enumerable: replace the seam, and every operation can fail, tear or be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import OptionError
from everstep.seams.clock import Clock, ManualClock, SystemClock
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import DirEntry, FileSystem, ReadFile, WriteFile
from everstep.seams.files.posix import PosixFileSystem

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
    """The world as one object: what a test replaces when it wants another world.

    Attributes:
        lane: makes what copies captured state (a ``capture.lane.Lane``, which this package
            cannot name); None: the engine's own.
        group: makes the ranks that train together (a ``group.Group``; None: this process trains
            alone), given after how many seconds a silent one is reported; None: what
            torch.distributed knows.
    """

    filesystem: FileSystem = field(default_factory=PosixFileSystem)
    clock: Clock = field(default_factory=SystemClock)
    lane: Callable[[], Any] | None = None
    group: Callable[[float], Any] | None = None

    @classmethod
    def parse(cls, value: Seams | None) -> Seams:
        """Reads what a caller gave; None: the world as it is.

        Raises:
            OptionError: for anything else.
        """
        if not isinstance(value, (cls, type(None))):
            raise OptionError(f"seams must be everstep.seams.Seams, not {value!r}")
        return value or cls()
