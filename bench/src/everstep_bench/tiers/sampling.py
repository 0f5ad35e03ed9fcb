"""Bytes in each place, seen from outside: files by their sizes, memory by its pages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.arena import CONTROL_BYTES, PAGE_BYTES
from everstep.seams import Seams
from everstep.tiers.options import is_url, open_tier
from everstep_bench.harness.gauges import cpu_s

MEMORY = "memory"
PEER = "peer"
DISK = "disk"
COPIES = "copies"
_BLOCK_BYTES = 512
_ARENA = "everstep-arena"


@dataclass(slots=True)
class Sampler:
    """Looks at everything, and keeps the most that was there in each step.

    Args:
        runs: folder of each rank.
        keepers: its keeper's process.
        host_bytes: size of the arena that each rank has announced.
        place: where copies go; None: nowhere.

    Attributes:
        most: by tier and step, bytes; of memory, peer and disk those of the rank with the most.
        looked: how often, all in all.
        cpu_s: processor time of each keeper, as it was last seen.
    """

    runs: Sequence[Path]
    keepers: Sequence[int]
    host_bytes: Sequence[int]
    place: str | None
    most: dict[str, dict[int, int]] = field(default_factory=dict)
    looked: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)

    def look(self, step: int) -> None:
        """Looks once.

        Raises:
            EverstepError: the store cannot be listed.
        """
        self.looked += 1
        for keeper, host_bytes in zip(self.keepers, self.host_bytes, strict=True):
            self.cpu_s[keeper] = max(cpu_s(keeper), self.cpu_s.get(keeper, 0.0))
            own, others = memory_bytes(keeper, host_bytes)
            self._saw(MEMORY, step, own)
            if len(self.runs) > 1 and self.place is not None:
                self._saw(PEER, step, others)
        for run in self.runs:
            self._saw(DISK, step, files_bytes(run))
        if self.place is not None:
            self._saw(COPIES, step, place_bytes(self.place))

    def _saw(self, tier: str, step: int, size_bytes: int) -> None:
        found = self.most.setdefault(tier, {})
        found[step] = max(found.get(step, 0), size_bytes)


def memory_bytes(keeper: int, host_bytes: int) -> tuple[int, int]:
    """Pages that a keeper's shared memory has taken: its own arena, and copies of other ranks.

    They are told apart by the arena's size. A keeper that has ended has none.
    """
    arena_bytes = host_bytes // PAGE_BYTES * PAGE_BYTES + CONTROL_BYTES
    seen: dict[int, os.stat_result] = {}
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{keeper}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if _ARENA in os.readlink(descriptor):
                    found = descriptor.stat()
                    seen[found.st_ino] = found
    own = sum(s.st_blocks for s in seen.values() if s.st_size == arena_bytes)
    others = sum(s.st_blocks for s in seen.values() if s.st_size != arena_bytes)
    return own * _BLOCK_BYTES, others * _BLOCK_BYTES


def files_bytes(folder: Path) -> int:
    """Sizes of all files below a folder, temporary ones included."""
    found = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted, or renamed, meanwhile
                found += os.lstat(os.path.join(directory, name)).st_size
    return found


def place_bytes(place: str) -> int:
    """Of a folder with copies, or of all objects below a URL."""
    if not is_url(place):
        return files_bytes(Path(place))
    seams = Seams()
    with contextlib.closing(open_tier(place, seams.filesystem, clock=seams.clock)) as tier:
        return sum(item.size_bytes or 0 for item in tier.walk())


def above(most: Mapping[int, int], bound_bytes: int) -> list[int]:
    """The steps in which there was more than that."""
    return [step for step, size_bytes in sorted(most.items()) if size_bytes > bound_bytes]
