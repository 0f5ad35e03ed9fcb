"""Bases over several steps whose parts several ranks put together when they restore
(``docs/design/multistep.md``).

The files of each rank that saved one are made whole by themselves, on the CPU, as its keeper would
have done: they hold the parameters that it writes, their state, and the gradients of these. So it
does not matter how many ranks there are now, or in which layout. One rank's files at a time are in
host memory, besides what is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.errors import FormatError, ReplayError, UnsupportedStateError
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.load.pieces import Fill
from everstep.run.open_base import OpenBase
from everstep.seams.processes.processes import available_cores
from everstep.seams.progress import ProgressSink

if TYPE_CHECKING:
    from everstep.restore.offline.offline import OfflineState

__all__ = ["MadeWhole", "made_whole"]

_ALIVE_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class MadeWhole:
    """What one rank's files have of a base, all of it of the base's step.

    Attributes:
        updates: that some of it had not seen.
    """

    state: OfflineState
    updates: int

    @property
    def doubt(self) -> str:
        """Why it is not bit for bit what training had; "" if it is."""
        return self.state.doubt

    def digests(self) -> dict[str, str]:
        """Return the digests of all entries, by name."""
        return self.state.digests()

    def fill(self, fills: Iterable[Fill]) -> set[str]:
        """Puts pieces of these files where they belong; returns their names."""
        names = set()
        for one in fills:
            one.copy(self.state.bytes_of(one.piece.entry.name))
            names.add(one.piece.entry.name)
        return names


def made_whole(
    opened: OpenBase,
    ring: ChunkRing,
    trained: TimelineRecord | None,
    *,
    timeout_s: float,
    progress: ProgressSink,
    alive: Callable[[], None] = lambda: None,
) -> MadeWhole:
    """Reads one rank's files, every byte verified, and replays what parts of them have not seen.

    Args:
        opened: with a redo file.
        trained: the record of its timeline: where its updates were computed.
        alive: called every now and then.

    Raises:
        DamageError, FormatError: they cannot be read, or not be made whole.
        UnavailableError: there is not enough memory.
        OSError: they cannot be read.
    """
    # Only now: most bases are whole.
    from everstep.restore.offline.offline_base import read_fuzzy

    marker = opened.marker
    threads = min(2, len(available_cores()))
    with ThreadPoolExecutor(1, "everstep-whole") as thread:
        about = opened, ring, trained, threads
        found = thread.submit(read_fuzzy, *about, timeout_s=timeout_s, progress=progress)
        while wait([found], _ALIVE_S).not_done:
            alive()
    try:
        return MadeWhole(*found.result())
    except (ReplayError, UnsupportedStateError) as error:
        raise FormatError(
            f"the files of rank {marker.rank}: {error.message}",
            step=marker.step,
            rank=marker.rank,
            path=opened.shards[0][3],
        ) from error
