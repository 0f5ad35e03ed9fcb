"""Mistakes in the commits of several ranks, to be planted one at a time: simulation must find each.

Every one is made in the real code, by replacing one small part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from everstep.commit import lineage
from everstep.commit.base_commit import Action, BaseCommit, BaseDeletion, WriteMarker
from everstep.commit.job import agreement, messages, offers
from everstep.commit.job.agreement import Agreement
from everstep.commit.job.coordinator import Coordinator
from everstep.commit.job.member import Member, Perform
from everstep.commit.job.messages import COORDINATOR, Envelope, MarkerNotice, Send
from everstep.commit.job.offers import Choice
from everstep.commit.lineage import BaseId, Branch
from everstep.commit.retention import RetentionPlan, Watermark
from everstep.format.message_codec import Stored
from everstep.keeper.persist import rank_disk as ranks
from everstep.keeper.persist.rank_disk import RankDisk
from everstep.restore.fetch import rank_copies as recover_ranks
from tests.crash.sim import rank
from tests.crash.sim.host import ProcessDisk
from tests.crash.sim.truth import RUN
from tests.support.inside import planted

__all__ = ["BUGS", "Bug"]

Bug = Callable[[pytest.MonkeyPatch], None]


def number_instead_of_timeline(patch: pytest.MonkeyPatch) -> None:
    """The newest is the one of the greatest step, whichever timeline it is of (I7)."""

    def by_number(
        bases: Iterable[BaseId], branches: Mapping[int, Branch]
    ) -> tuple[list[BaseId], list[BaseId]]:
        return sorted(bases, key=lambda base: base.step, reverse=True), []

    patch.setattr(offers, "split_by_history", by_number)


def greatest_pair(patch: pytest.MonkeyPatch) -> None:
    """The newest is the greatest (timeline, step), in the history or not (I7)."""
    patch.setattr(offers, "split_by_history", lambda bases, _: (sorted(bases, reverse=True), []))


def minimum_of_maxima(patch: pytest.MonkeyPatch) -> None:
    """Each rank says its newest, and the oldest of these is taken (I7)."""

    def plant(real: Any) -> Any:
        def minimum(self: Any, step: int | None) -> Any:
            pick = real(self, step)
            maxima = [max(offer.bases, default=None) for offer in self._offers]
            if pick is None or step is not None or None in maxima:
                return pick
            base = min(one for one in maxima if one is not None)
            known = self._bases[base]
            markers = {rank: next(iter(found.values())) for rank, found in known.markers.items()}
            manifest = offers.manifest_of(markers)
            if manifest is None:
                raise offers.RecoveryError(f"{base} cannot be read")
            if any(marker.rank not in known.pieces for marker in manifest.markers):
                raise offers.RecoveryError(f"{base} cannot be read")
            return type(pick)(base, manifest, pick.reach)

        return minimum

    planted.replace(patch, offers, "_Candidates.pick", plant)


def manifest_before_a_marker(patch: pytest.MonkeyPatch) -> None:
    """A rank tells of its marker when it begins to write it (I5)."""

    def plant(real: Any) -> Any:
        def hasty(self: Member, flight: Any, action: Action | None, **how: bool) -> Any:
            out = real(self, flight, action, **how)
            if isinstance(action, WriteMarker) and self.rank != COORDINATOR:
                out.append(Send(COORDINATOR, MarkerNotice(Stored(action.marker))))
            return out

        return hasty

    planted.replace(patch, Member, "_go_on", plant)


def stale_process_deletes(patch: pytest.MonkeyPatch) -> None:
    """A deleter does not look at the fence (I11)."""
    patch.setattr(BaseDeletion, "_is_fenced", lambda self: False)


def stale_process_is_heard(patch: pytest.MonkeyPatch) -> None:
    """Messages of an earlier start of the job are obeyed (I11)."""

    def anyone(data: bytes, session: str) -> Envelope:
        return messages.decode_message(data)

    patch.setattr(rank, "accept", anyone)


def stale_process_commits(patch: pytest.MonkeyPatch) -> None:
    """A rank looks at the fence neither before the manifest nor behind it (I11)."""

    def plant(write: Any) -> Any:
        def blindly(self: RankDisk, *about: Any) -> Any:
            with pytest.MonkeyPatch.context() as within:
                within.setattr(ranks, "newest_timeline", lambda *_: 0)
                return write(self, *about)

        return blindly

    planted.replace(patch, BaseCommit, "_on_fence", lambda real: lambda self, newest: real(self, 0))
    planted.replace(patch, RankDisk, "_write_manifest", plant)


def one_look_at_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A deleter does not look at the fence again when the base is condemned."""

    def plant(real: Any) -> Any:
        def once(self: BaseDeletion, newest: int) -> Any:
            action = real(self, newest if self._phase.value == "new" else 0)
            assert action is not None
            return action

        return once

    planted.replace(patch, BaseDeletion, "_on_fence", plant)


def no_second_inventory(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether the choice is still there when older processes are fenced off."""

    def plant(real: Any) -> Any:
        def blindly(self: Agreement, answers: Collection[bytes]) -> Any:
            with pytest.MonkeyPatch.context() as within:
                within.setattr(Agreement, "_decide", lambda self, answers: self._choice)
                within.setattr(agreement, "_newer", lambda answers, timeline: set())
                return real(self, answers)

        return blindly

    planted.replace(patch, Agreement, "_on_confirmed", plant)


def watermark_goes_back(patch: pytest.MonkeyPatch) -> None:
    """The last news of the watermark is believed (I6)."""

    def believe(self: Watermark, base: BaseId) -> bool:
        moved = base != self.base
        self.before, self.base = self.base, base
        return moved

    patch.setattr(Watermark, "advance", believe)


def watermark_before_every_disk_has_the_manifest(patch: pytest.MonkeyPatch) -> None:
    """The watermark moves as soon as rank 0 has the manifest."""

    def plant(real: Any) -> Any:
        def early(self: Coordinator, base: BaseId) -> Any:
            self._acknowledged[base].update(self.cluster.leaders)
            return real(self, base)

        return early

    planted.replace(patch, Coordinator, "_moved", plant)


def reclaimed_by_local_age(patch: pytest.MonkeyPatch) -> None:
    """Each rank deletes what is older than its own newest marker (TierCheck, Fig. 5a)."""
    real = RankDisk.perform

    def eager(self: RankDisk, do: Perform) -> Any:
        event = real(self, do)
        if isinstance(do.action, WriteMarker):
            directory = recover_ranks.base_dir(self._run, do.base.timeline, do.base.step).parent
            for entry in self._filesystem.scan(directory):
                step = int(entry.name)
                if step < do.base.step:
                    self.withdraw(BaseId(do.base.timeline, step))
        return event

    patch.setattr(RankDisk, "perform", eager)


def swept_before_it_is_rolled_forward(patch: pytest.MonkeyPatch) -> None:
    """A base whose ranks write to disks of their own looks unfinished on each: it is swept."""
    real = rank.open_on_disk

    def without(fs: Any, run: Any, record: Any, choice: Choice, unique: str) -> bool:
        return real(fs, run, record, replace(choice, complete=()), unique)

    patch.setattr(rank, "open_on_disk", without)


def nothing_is_verified(patch: pytest.MonkeyPatch) -> None:
    """Bases are deleted although nothing that stays was read back (``adr/005``)."""
    from everstep.commit.job import coordinator

    real = coordinator.plan_retention

    def trusting(committed: Collection[BaseId], branches: Any, **how: Any) -> RetentionPlan:
        return real(committed, branches, **{**how, "verified": set(committed)})

    patch.setattr(coordinator, "plan_retention", trusting)


def any_timeline_of_that_number(patch: pytest.MonkeyPatch) -> None:
    """Two starts of the job may believe that the same timeline is theirs."""

    def plant(real: Any) -> Any:
        return lambda *args: real(*args) or True

    planted.replace(patch, recover_ranks, "_keep_timeline", plant)


def memory_counts_as_durable(patch: pytest.MonkeyPatch) -> None:
    """A base that is only in memory gets its manifest, and counts as the watermark."""
    patch.setattr(offers, "_is_durable", lambda known: True)


# What simulation has found in this very code, and is mended; the rarer ones have tests of their
# own in tests/unit/keeper/test_ranks.py, test_offers.py and test_agreement.py.


def name_of_the_run_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The run folder was made by a process that died before it could sync its name."""
    real = ProcessDisk.sync_dir

    def all_but(self: ProcessDisk, path: Any) -> None:
        made = self.disk.fs.log and self.disk.fs.log[-1].op == "make_dir"
        if path != RUN.parent or made:
            real(self, path)

    patch.setattr(ProcessDisk, "sync_dir", all_but)


def timeline_in_vain_hides_all(patch: pytest.MonkeyPatch) -> None:
    """A timeline on which nobody has trained counts, though what it forked from is gone."""
    patch.setattr(lineage, "_is_void", lambda *_: False)


BUGS: dict[str, tuple[Bug, tuple[str, ...]]] = {
    "number instead of timeline": (number_instead_of_timeline, ("rewind",)),
    "greatest pair instead of history": (greatest_pair, ("rewind", "kill the trainers")),
    "minimum of maxima": (minimum_of_maxima, ("damage a file", "kill a process")),
    "manifest before a marker": (manifest_before_a_marker, ("kill a process",)),
    "stale process deletes": (stale_process_deletes, ("rewind past a sleeper",)),
    "stale process is heard": (stale_process_is_heard, ("rewind past a sleeper",)),
    "stale process commits": (stale_process_commits, ("freeze a process",)),
    "one look at the fence": (one_look_at_the_fence, ("rewind past a sleeper",)),
    "no second inventory": (no_second_inventory, ("rewind", "start a second job")),
    "watermark goes back": (watermark_goes_back, ()),
    "watermark too early": (watermark_before_every_disk_has_the_manifest, ()),
    "reclaimed by local age": (reclaimed_by_local_age, ("kill a process",)),
    "swept before rolled forward": (swept_before_it_is_rolled_forward, ("power off the rack",)),
    "nothing verified": (nothing_is_verified, ("damage a file",)),
    "any timeline of that number": (any_timeline_of_that_number, ("start a second job",)),
    "name of the run not synced": (name_of_the_run_not_synced, ("power off the rack",)),
    "memory counts as durable": (memory_counts_as_durable, ("kill the trainers",)),
    "timeline in vain": (timeline_in_vain_hides_all, ("rewind past a sleeper",)),
}
"""By name: what plants it, and the faults that make it show sooner."""
