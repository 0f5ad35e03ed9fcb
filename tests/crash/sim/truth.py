"""Ground truth of a simulated cluster: events so far, and the states that may be recovered.

Nothing here uses the code under test but the decoding of records: it is an oracle of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from everstep.format.names import MANIFEST, base_dir, marker_name, parse_timeline, shard_name
from everstep.format.records import TimelineRecord
from tests.crash.sim.host import Disk

__all__ = ["RUN", "Contents", "Timeline", "Truth", "ViolatedError"]

RUN = PurePath("/disk/run")


class ViolatedError(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of the files of one rank."""

    timeline: str
    step: int
    rank: int
    state: str

    def encode(self) -> bytes:
        return f"{self.timeline} {self.step} {self.rank} {self.state}".encode().ljust(96)

    @classmethod
    def decode(cls, data: bytes) -> Contents:
        timeline, step, rank, state = data.decode().split()
        return cls(timeline, int(step), int(rank), state)


@dataclass(slots=True)
class Timeline:
    """A timeline as it truly was.

    Attributes:
        key: unique, unlike its number.
        states: by step: what the state was.
        durable: steps whose base some rank has reported durable.
        disks: by rank, those of the job that trained on it.
    """

    key: str
    number: int
    parent: str | None
    fork_step: int
    disks: tuple[str, ...]
    states: dict[int, str] = field(default_factory=dict)
    durable: set[int] = field(default_factory=set)


class Truth:
    """Watches a simulated cluster.

    Attributes:
        lost: ``(timeline, step, rank)`` of files that were unusable on purpose.
    """

    def __init__(self) -> None:
        self.timelines: dict[str, Timeline] = {}
        self.lost: set[tuple[str, int, int]] = set()

    # While training.

    def assert_durable(self, key: str, step: int, disks: Mapping[str, Disk]) -> None:
        """A rank reports a base as durable: whatever loses power now, it must be there (I5)."""
        timeline = self.timelines[key]
        if step in timeline.durable:
            return
        timeline.durable.add(step)
        images = {name: next(disk.fs.crash_images(0, 0)) for name, disk in disks.items()}
        for rank, name in enumerate(timeline.disks):
            if name not in images or (key, step, rank) in self.lost:
                continue
            directory = base_dir(RUN, timeline.number, step)
            for path in (directory / shard_name(rank), directory / marker_name(rank)):
                kept = images[name].paths().get(str(path)) == "file"
                if not kept or not images[name].read_bytes(path):
                    raise ViolatedError(
                        f"step {step} of timeline {timeline.number} was reported durable, but "
                        f"{path.name} on {name} is not (I5)"
                    )

    def assert_watermark(
        self, key: str, number: int, step: int, known: tuple[int, int] | None
    ) -> None:
        """A rank's watermark moves: forward, and to what is durable on all ranks (I6)."""
        if known is not None and (number, step) <= known:
            raise ViolatedError(f"the watermark went back from {known} to {(number, step)} (I6)")
        timeline = self.timelines[key]
        if timeline.number != number or step not in timeline.durable:
            raise ViolatedError(f"the watermark is {(number, step)}, which is not durable (I6)")

    def assert_manifests(self, key: str, step: int, disks: Mapping[str, Disk]) -> None:
        """The first rank's watermark moves: every disk has the manifest."""
        timeline = self.timelines[key]
        path = base_dir(RUN, timeline.number, step) / MANIFEST
        for name in sorted(set(timeline.disks) & set(disks)):
            image = next(disks[name].fs.crash_images(0, 0))
            if image.paths().get(str(path)) != "file":
                raise ViolatedError(f"the watermark moved to {step}, and {name} has no manifest")

    # At the start of a job.

    def assert_recovered(
        self,
        own: str,
        contents: Sequence[Sequence[Contents]],
        base: tuple[int, int] | None,
        disks: Sequence[Disk],
        *,
        fetch: bool,
        step: int | None,
    ) -> None:
        """All ranks have restored ``base``: what each of them read in ``contents``."""
        chains = self._chains(own, disks)
        if chains is None:
            return  # written apart: whatever is chosen, it must at least be true
        problems: list[ViolatedError] = []
        for chain in chains:
            try:
                self._assert_recovered(chain, contents, base, disks, fetch=fetch, step=step)
                return
            except ViolatedError as problem:
                problems.append(problem)
        raise problems[0]

    def _assert_recovered(
        self,
        chain: Sequence[tuple[Timeline, int | None]],
        contents: Sequence[Sequence[Contents]],
        base: tuple[int, int] | None,
        disks: Sequence[Disk],
        *,
        fetch: bool,
        step: int | None,
    ) -> None:
        floor = self._floor(chain, disks, fetch=fetch) if step is None else None
        if base is None:
            if floor is not None:
                raise ViolatedError(f"training began afresh, and {_name(floor)} is durable")
            return
        found = {(one.timeline, one.step, one.state) for each in contents for one in each}
        if len(found) != 1:
            raise ViolatedError(f"the ranks have restored different states: {sorted(found)}")
        key, at, state = found.pop()
        timeline = self.timelines[key]
        if (timeline.number, at) != base or timeline.states.get(at) != state:
            raise ViolatedError(
                f"step {base[1]} of timeline {base[0]} is no state that was reached"
            )
        if step is not None:
            if at != step:
                raise ViolatedError(f"step {step} was asked for, step {at} restored")
            return
        limits = {one.key: limit for one, limit in self._relaxed(chain, disks)}
        if key not in limits or (limits[key] is not None and at > (limits[key] or 0)):
            raise ViolatedError(
                f"step {at} of timeline {base[0]} is not in the newest's history (I7)"
            )
        if floor is not None and (floor[0].number, floor[1]) > base:
            raise ViolatedError(f"{base} was restored, and {_name(floor)} is durable")

    def assert_refused(
        self, own: str, disks: Sequence[Disk], *, fetch: bool, step: int | None
    ) -> None:
        """The ranks say that there is nothing that all can restore."""
        chains = self._chains(own, disks)
        floor = self._floor(chains[-1], disks, fetch=fetch) if chains else None
        if floor is not None and (step is None or step == floor[1]):
            raise ViolatedError(f"nothing could be restored, and {_name(floor)} is durable")

    def _chains(
        self, own: str, disks: Sequence[Disk]
    ) -> list[list[tuple[Timeline, int | None]]] | None:
        """The history of the newest timeline on ``disks``; None where there are several. Where
        nobody has trained on it and what it forked from is gone, also that of the one before."""
        found: dict[int, set[str]] = {}
        limit = self.timelines[own].number if own in self.timelines else None
        for disk in disks:
            for number, session in self._opened_on(disk).items():
                if session != own.split("/")[0] and (limit is None or number < limit):
                    found.setdefault(number, set()).add(f"{session}/{number}")
        if any(len(keys) > 1 for keys in found.values()):
            return None
        chains: list[list[tuple[Timeline, int | None]]] = []
        for number in sorted(found, reverse=True):
            chains.append(self._chain(next(iter(found[number]))))
            if not self._is_void(chains[-1][0][0], disks):
                break
        return chains or [[]]

    def _chain(self, newest: str) -> list[tuple[Timeline, int | None]]:
        chain: list[tuple[Timeline, int | None]] = []
        key: str | None = newest
        fork: int | None = None
        while key is not None:
            timeline = self.timelines[key]
            chain.append((timeline, fork))
            key = timeline.parent
            fork = timeline.fork_step
        return chain

    def _is_void(self, timeline: Timeline, disks: Sequence[Disk]) -> bool:
        if timeline.states or timeline.parent is None:
            return False
        parent = self.timelines[timeline.parent]
        directory = base_dir(RUN, parent.number, timeline.fork_step)
        paths = {path for disk in disks for path in disk.fs.paths()}
        needed = range(len(parent.disks))
        return any(str(directory / shard_name(rank)) not in paths for rank in needed)

    def _opened_on(self, disk: Disk) -> dict[int, str]:
        opened = {}
        for path in disk.fs.paths():
            if path.endswith("/timeline.json"):
                number = parse_timeline(PurePath(path).parent.name)
                assert number is not None
                data = disk.fs.read_bytes(PurePath(path))
                record = TimelineRecord.decode(data, PurePath(path))
                opened[number] = record.fingerprint["session"]
        return opened

    def _relaxed(
        self, chain: Sequence[tuple[Timeline, int | None]], disks: Sequence[Disk]
    ) -> list[tuple[Timeline, int | None]]:
        """The chain, but after a timeline without bases all of its parent counts."""
        paths = {path for disk in disks for path in disk.fs.paths()}
        relaxed = []
        empty = False
        for timeline, limit in chain:
            relaxed.append((timeline, None if empty else limit))
            prefix = str(base_dir(RUN, timeline.number, 0).parent) + "/"
            empty = not any(path.startswith(prefix) for path in paths)
        return relaxed

    def _floor(
        self,
        chain: Sequence[tuple[Timeline, int | None]],
        disks: Sequence[Disk],
        *,
        fetch: bool,
    ) -> tuple[Timeline, int] | None:
        """The newest base that was reported durable, and of which nothing was lost on purpose."""
        names = [disk.name for disk in disks]
        for timeline, limit in chain:
            for step in sorted(timeline.durable, reverse=True):
                if limit is not None and step > limit:
                    continue
                if self._readable(timeline, step, names, fetch=fetch):
                    return timeline, step
                if any((timeline.key, step, rank) in self.lost for rank in range(64)):
                    return None  # retention may rightly have deleted what is older
        return None

    def _readable(
        self, timeline: Timeline, step: int, names: Sequence[str], *, fetch: bool
    ) -> bool:
        world = len(timeline.disks)
        if any((timeline.key, step, rank) in self.lost for rank in range(world)):
            return False
        if fetch:
            return set(timeline.disks) <= set(names)
        needed: list[Collection[int]] = [range(world)] * len(names)
        if world == len(names):
            needed = [(rank,) for rank in range(world)]
        return all(
            timeline.disks[rank] == names[reader]
            for reader, ranks in enumerate(needed)
            for rank in ranks
        )


def _name(found: tuple[Timeline, int]) -> str:
    return f"step {found[1]} of timeline {found[0].number}"
