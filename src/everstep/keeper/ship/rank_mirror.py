"""Copies of bases that several ranks have saved: each rank's keeper copies its own part.

Rank 0 says which base (:mod:`everstep.commit.copy_round`), so that all copy the same one, and
creates the manifest when it finds every marker in the tier (I5); that is the one which the disks
have, a pure function of the markers. If it dies before, whoever starts the job next does so
(:mod:`everstep.restore.fetch.rank_copies`), or its own successor. Only rank 0 deletes
(:class:`RankRetention`).
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from everstep.commit.copy_round import CopyRound
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import (
    CopyMessage,
    CopyProgress,
    CopyReply,
    CopyRequest,
    CopySettled,
)
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, EverstepError, InfeasibleError, StorageError
from everstep.format.names import MANIFEST, base_dir
from everstep.format.records import Manifest
from everstep.keeper.ship.mirror import Mirror
from everstep.keeper.ship.place import ROOT
from everstep.keeper.ship.retain_copies import CopyRetention
from everstep.run.scan import BaseFound, Inventory
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import ReadFile

__all__ = ["Followed", "FollowingMirror", "LeadingMirror", "Others", "RankRetention"]

_log = logging.getLogger("everstep.keeper")
_LOOK_S = 0.1


class Others(Protocol):
    """The keepers of the other ranks (:class:`.commits.RankCommits`)."""

    last_receive_s: float

    def send(self, rank: int, message: CopyMessage) -> None:
        """Says something; perhaps it is lost."""
        ...

    def is_disconnected(self, rank: int) -> bool:
        """Whether a rank will say nothing any more."""
        ...


class _RankMirror(Mirror):
    """What both have in common.

    Args:
        others: the other ranks.
        number: of the place among those of the job.
        rank: whose part is copied.
        world: number of ranks.
    """

    def __init__(
        self, *about: Any, others: Others, number: int, rank: int, world: int, **more: Any
    ) -> None:
        super().__init__(*about, **more)
        self._others = others
        self._number = number
        self._rank = rank
        self._world = world
        self._silent_s = float(more.get("timeout_s", 120.0))
        self._beat_s = max(_LOOK_S, self._silent_s / 10)
        self._beat_not_before_s = 0.0

    def _before_markers(self) -> None:
        failpoint("copy.before_marker")
        self._place.check_fence()

    def _put(self, name: str, source: ReadFile) -> None:
        super()._put(name, _Beating(source, self))

    def _await_rate(self, count: int) -> None:
        try:
            super()._await_rate(count)
        except InfeasibleError as error:
            needed = count * self._world
            raise InfeasibleError(
                f"{error.message}: each of {self._world} ranks has an equal part of the cap",
                rank=self._rank,
                quantity="objects per hour",
                needed=needed,
                hint=f"objects_per_hour={needed} at least",
            ) from error

    def goes_on(self) -> None:
        """An operation in the tier has come back: others hear now and then that this rank is at
        work. In any thread."""
        self._beat()

    def _beat(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._beat_not_before_s:
            self._beat_not_before_s = now_s + self._beat_s
            self._say_alive()

    def _say_alive(self) -> None:
        raise NotImplementedError

    def _folder(self, base: BaseId) -> str:
        return self._name(base_dir(self._run, base.timeline, base.step))


class LeadingMirror(_RankMirror):
    """Rank 0's: says what is copied, commits, deletes."""

    def __init__(self, *about: Any, keep: int, **more: Any) -> None:
        super().__init__(*about, keep=keep, **more)
        timeout_s = self._silent_s
        self._retention: RankRetention = RankRetention(
            self._place, keep, self._post, timeout_s=timeout_s
        )
        self._round: CopyRound | None = None
        self._ours: BaseId | None = None

    def base_durable(self, base: BaseId | None = None) -> None:
        super().base_durable(base)
        if base is not None and self._refused:
            self._settle(base)

    def heard(self, sender: int, message: CopyMessage) -> None:
        """A message about this place has come."""
        with self._changed:
            if self._round is not None and isinstance(message, CopyReply):
                self._round.on_reply(sender, message.base, message.problem)
            elif self._round is not None:
                self._round.on_message(sender)
            self._changed.notify_all()

    def _turn(self) -> None:
        try:
            super()._turn()
        finally:
            if self._ours is not None:
                self._settle(self._ours)

    def _may_copy(self, base: BaseFound) -> bool:
        """A base that other ranks have saved is in nobody's hands."""
        self._ours = base.id
        return base.manifest is not None and len(base.manifest.markers) == self._world

    def _copy(self, inventory: Inventory, base: BaseFound) -> bool:
        assert base.manifest is not None
        with self._changed:
            self._round = CopyRound(base.id, range(1, self._world), self._silent_s)
        try:
            self._ask(base.manifest)
            mine = base.manifest.markers[self._rank]
            if not self._place.has_part(self._folder(base.id), mine):
                self._copy_parts(base, [mine])
            self._await_others(base.manifest)
            self._commit(base)
        except StorageError as error:
            if base.id.timeline == self._timeline:
                raise
            # Another start's: hosts that had parts of it may have been replaced.
            _log.info("%s is not copied: %s", base.id, error.message)
            return False
        else:
            self._retention.all_are_past(base.id)
            return True
        finally:
            with self._changed:
                self._round = None

    def _commit(self, base: BaseFound) -> None:
        """Not by what others say: by what is there."""
        assert base.manifest is not None
        if missing := self._missing(base.manifest):
            raise StorageError(
                f"the copy of {base.id} is not committed: the part of rank {missing[0]} is not "
                f"in {self._tier.url}",
                step=base.id.step,
                rank=missing[0],
                tier=self._tier.traits.kind,
                path=self._tier.url,
                hint="the next base is copied anew",
            )
        failpoint("copy.before_manifest")
        super()._commit(base)

    def _missing(self, manifest: Manifest) -> list[int]:
        first = manifest.markers[0]
        folder = self._folder(BaseId(first.timeline, first.step))
        return [m.rank for m in manifest.markers if not self._place.has_part(folder, m)]

    def _ask(self, manifest: Manifest) -> None:
        with self._changed:
            assert self._round is not None
            ranks = self._round.tick(self._others.last_receive_s)
        for rank in ranks:
            self._others.send(rank, CopyRequest(self._number, manifest))

    def _await_others(self, manifest: Manifest) -> None:
        """Returns when every rank has said that its part is there, or it was found there."""
        while True:
            self._ask(manifest)
            self._beat()
            with self._changed:
                current = self._round
                assert current is not None
                if self._closed:
                    raise StorageError("the copy was broken off while others copied")
                if current.problems:
                    raise self._why_not(current, ())
                if not current.waits_for:
                    return
                gone = tuple(r for r in current.waits_for if self._others.is_disconnected(r))
                lost = current.silent or gone
                if not lost:
                    self._changed.wait(_LOOK_S)
                    continue
            missing = set(self._missing(manifest))
            if missing & set(lost):
                raise self._why_not(current, lost)
            current.there |= set(lost)  # its last word was lost

    def _why_not(self, current: CopyRound, lost: tuple[int, ...]) -> EverstepError:
        where: dict[str, Any] = {"step": current.base.step, "path": self._tier.url}
        where["tier"] = self._tier.traits.kind
        if current.problems:
            rank, problem = min(current.problems.items())
            return StorageError(
                f"{current.base} is not copied: rank {rank} could not copy its part: {problem}",
                **where,
                rank=rank,
                hint="older copies are kept; the next base is copied anew",
            )
        return DeadlineError(
            f"{current.base} is not copied: rank(s) {', '.join(map(str, lost))} say nothing of "
            "their parts",
            **where,
            hint="their keepers have ended or hang; the next base is copied anew",
        )

    def _settle(self, base: BaseId) -> None:
        for rank in range(1, self._world):
            self._others.send(rank, CopySettled(self._number, base))

    def _say_alive(self) -> None:
        for rank in range(1, self._world):
            self._others.send(rank, CopyProgress(self._number))


class FollowingMirror(_RankMirror):
    """Any other rank's: copies its part of what rank 0 asks for."""

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._wanted: Manifest | None = None
        self._owed: BaseId | None = None  # the newest that rank 0 may still ask for
        self._over: BaseId | None = None  # nothing up to here will be asked for
        self._under_way: BaseId | None = None
        self._heard_s = self._clock.monotonic_s()
        self._why_refused = ""

    @property
    def busy(self) -> bool:
        """Whether a part is being copied, or rank 0 may still want one."""
        with self._changed:
            if self._closed or self._refused:
                return False
            if self._at_work or self._due:
                return True
            waited_s = self._clock.monotonic_s() - self._heard_s
            gone = self._others.is_disconnected(COORDINATOR) or waited_s > self._silent_s
            return self._owed is not None and not gone

    def base_durable(self, base: BaseId | None = None) -> None:
        """There is a new base on disk: rank 0 is going to say whether it is copied."""
        with self._changed:
            if self._closed or self._refused or base is None:
                return
            if self._over is None or base > self._over:
                self._owed = base
                self._begin()

    def hurry(self) -> None:
        """The keeper is about to end: from now on rank 0 is not waited for longer than a while."""
        with self._changed:
            if not self._hurried:
                self._heard_s = self._clock.monotonic_s()
        super().hurry()

    def heard(self, sender: int, message: CopyMessage) -> None:
        """A message about this place has come."""
        with self._changed:
            if sender != COORDINATOR or self._closed:
                return
            self._heard_s = self._clock.monotonic_s()
            if isinstance(message, CopySettled):
                self._is_over(message.base)
            elif isinstance(message, CopyRequest):
                self._on_wanted(message.manifest)
            self._changed.notify_all()

    def copy_part(self, manifest: Manifest) -> None:
        """Copies this rank's part of a base, unless it is there.

        Raises:
            FencedError: a newer timeline has been opened in the tier.
            StorageError: it is not on this disk any more, or cannot be written.
            DamageError, DeadlineError, InfeasibleError
        """
        self._place.check_fence()
        base = _base_of(manifest)
        mine = manifest.markers[self._rank]
        if not self._place.has_part(self._folder(base), mine):
            path = base_dir(self._run, base.timeline, base.step)
            self._copy_parts(BaseFound(base, path, "committed", manifest, None, ()), [mine])
        self.stats.step = base.step

    def _on_wanted(self, manifest: Manifest) -> None:
        base = _base_of(manifest)
        if self._refused:
            self._tell(base, self._why_refused)
        elif base == self._under_way:
            self._say_alive()
        elif len(manifest.markers) != self._world:
            self._tell(base, "it was saved by other ranks")
        else:
            self._wanted = manifest
            self._due = True
            self._begin()

    def _next(self) -> bool:
        """Waits until something is wanted; says meanwhile that this rank is there."""
        with self._changed:
            while not self._closed and not self._refused:
                if self._due and self._wanted is not None:
                    self._due = False
                    self._at_work = True
                    self._under_way = _base_of(self._wanted)
                    return True
                self._changed.wait(self._beat_s if self._owed is not None else None)
                if self._owed is not None:
                    self._beat()
            return False

    def _turn(self) -> None:
        manifest = self._wanted
        assert manifest is not None
        base = _base_of(manifest)
        problem = ""
        try:
            self.copy_part(manifest)
            self.stats.copied += 1
        except StorageError as error:
            problem = error.message
            if base.timeline == self._timeline:
                raise
            # Another start's: on a host that was replaced since its part never was.
            _log.info("%s is not copied: %s", base, problem)
        except EverstepError as error:
            problem = error.message
            raise
        except Exception as error:
            problem = repr(error)
            raise
        finally:
            with self._changed:
                self._under_way = None
                self._why_refused = problem or self._why_refused
                self._is_over(base)
            self._tell(base, problem)

    def _is_over(self, base: BaseId) -> None:
        if self._over is None or base > self._over:
            self._over = base
        if self._owed is not None and self._owed <= self._over:
            self._owed = None

    def _tell(self, base: BaseId, problem: str) -> None:
        self._others.send(COORDINATOR, CopyReply(self._number, base, problem))

    def _say_alive(self) -> None:
        self._others.send(COORDINATOR, CopyProgress(self._number))


Followed = LeadingMirror | FollowingMirror


class RankRetention(CopyRetention):
    """Retention of copies that several ranks have made, by rank 0 alone.

    Besides, it finishes what lacks only its manifest, and removes what will never be whole: parts
    of bases older than one that was read back, and that no rank is at any more.
    """

    _past: BaseId | None = None

    def all_are_past(self, base: BaseId) -> None:
        """Every rank has copied its part of ``base``, one after the other: none is at an older
        one."""
        self._past = base

    def run(self) -> None:
        """Deletes what may go.

        Raises:
            FencedError: a newer timeline has been opened.
            StorageError, DeadlineError
        """
        self._roll_forward()
        super().run()
        self._sweep()

    def _roll_forward(self) -> None:
        for base in self._place.inventory().bases:
            if base.status == "complete" and base.id.timeline <= self._place.timeline:
                assert base.manifest is not None
                folder = self._folder(base)
                if all(self._place.has_part(folder, one) for one in base.manifest.markers):
                    self._place.check_fence()
                    self._place.create(f"{folder}/{MANIFEST}", base.manifest.encode())

    def _sweep(self) -> None:
        newest = max(self._good.verified, default=None)
        if newest is None or self._past is None:
            return
        for base in self._place.inventory().bases:
            unfinished = base.status == "incomplete" and base.id < min(newest, self._past)
            listed_late = self._place.size_of(f"{self._folder(base)}/{MANIFEST}") is not None
            if unfinished and not listed_late:
                self._place.check_fence()
                self._delete_files(base)

    def _folder(self, base: BaseFound) -> str:
        return base.path.relative_to(ROOT).as_posix()


class _Beating:
    """A file that is copied; each piece that is read is a sign of life."""

    def __init__(self, file: ReadFile, mirror: _RankMirror) -> None:
        self._file = file
        self._mirror = mirror

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._mirror._beat()
        return self._file.read_into(buffer, offset)

    def close(self) -> None:
        self._file.close()


def _base_of(manifest: Manifest) -> BaseId:
    return BaseId(manifest.timeline, manifest.step)
