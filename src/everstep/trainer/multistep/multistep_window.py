"""A base over several steps that is under way, seen from the training process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from everstep.capture.lanes.lane import Transfer
from everstep.errors import EverstepError
from everstep.format.header import ShardIdentity
from everstep.format.log import RecordHead
from everstep.link.assembly import PartialUpdate
from everstep.link.pool import Block, CapturePool
from everstep.link.save import Save
from everstep.state.layout.shards import ShardLayout
from everstep.state.survey.survey import Shape, Survey
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.log.consumed import Consumed
from everstep.trainer.multistep.multistep_choice import Timed
from everstep.trainer.multistep.multistep_fuzzy import CapturedParts
from everstep.trainer.multistep.multistep_gradients import GradientCheck
from everstep.trainer.multistep.multistep_mark import AtMark
from everstep.trainer.multistep.multistep_plan import PartsPlan
from everstep.trainer.multistep.multistep_stats import Watch

__all__ = ["CopiedUpdate", "Copying", "Window", "written"]

_NOTHING = ShardLayout(())


@dataclass(eq=False, slots=True)
class Copying:
    """A part under way.

    Attributes:
        ends: how much of it must be there before an optimizer (by key) may update.
        end: of all of it.
    """

    window: Window
    transfer: Transfer
    ends: Mapping[str, int]
    end: int
    done: bool = False


@dataclass(eq=False, slots=True)
class CopiedUpdate:
    """An update whose gradients are being copied.

    Attributes:
        consumed: None as soon as the copies are made: gradients are not kept longer.
        held: parameters, and their gradients, if its copies may run on behind it.
        check: of these gradients.
        calls: of the optimizer's closure.
        objects: encoded, by the lane's thread.
    """

    head: RecordHead
    layout: ShardLayout
    transfer: Transfer
    room: Block
    timed: Timed
    consumed: Consumed | None
    held: list[tuple[torch.Tensor, torch.Tensor]] | None
    check: GradientCheck | None
    calls: int = 1
    objects: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Window:
    """A base under way.

    Attributes:
        identity: of the last step mark.
        shape: of the state; ``digest`` is that of its records.
        tensors: live ones, as they were at the last mark.
        room: where the base goes.
        next: number of the part that is copied next.
        captured: names of captured parameters, by the key of their optimizer.
        others: updates of nothing that was captured before them.
        seen: of each captured part, the last update that it has seen, and its entries.
        lsn: every update up to this one is accounted for.
        at_mark: what the state was at the last mark besides what optimizers own.
        failed: what went wrong in the lane's thread.
        told: the keeper has been told of all of it.
        whole: the keeper has made it whole.
        parts: what was captured, if nobody makes it whole before it is restored.
    """

    save: Save
    identity: ShardIdentity
    plan: PartsPlan
    shape: Shape
    digest: str
    tensors: Mapping[str, torch.Tensor]
    keeper: RemoteKeeper
    pool: CapturePool
    room: Block
    lsn: int
    watch: Watch
    next: int = 0
    captured: dict[str, frozenset[str]] = field(default_factory=dict)
    updates: list[CopiedUpdate] = field(default_factory=list)
    others: list[RecordHead] = field(default_factory=list)
    seen: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    rooms: list[Block] = field(default_factory=list)
    at_mark: AtMark | None = None
    failed: EverstepError | None = None
    told: bool = False
    whole: bool = False
    parts: CapturedParts = field(default_factory=CapturedParts)

    @property
    def block(self) -> torch.Tensor:
        """The memory of the base."""
        return self.pool.block(self.room)

    @property
    def memory(self) -> torch.Tensor:
        """All memory that is shared with the keeper."""
        return self.pool.whole

    @property
    def is_void(self) -> bool:
        """Whether it was lost before it was whole, and not with its keeper."""
        return self.save.is_lost and not self.whole and self.keeper.lost is None

    def account(self, lsn: int, *, copied: bool = False) -> bool:
        """An update is accounted for; False: one before it was not.

        Args:
            copied: it is one of :attr:`updates`.
        """
        follows = lsn == self.lsn + 1
        if follows:
            self.lsn = lsn
            if not copied:
                self.others.append(self.head(self.identity.step + 1, lsn))
        return follows

    def why_void(self, identity: ShardIdentity, survey: Survey) -> str | None:
        """Why what was captured cannot be brought to a step mark; None: nothing is known.

        Args:
            identity: of the mark.
            survey: of the state at it.
        """
        shape = survey.shape
        before = self.shape
        same = (shape.entries, shape.aliases, shape.owners)
        if self.failed is not None:
            return self.failed.message
        if self.lsn != identity.lsn:
            return "an update was not seen"
        if same != (before.entries, before.aliases, before.owners):
            return "what the state consists of has changed"
        now = survey.tensors
        then = self.tensors
        if now is not then:
            for name in self.plan.captured(self.next + 1):
                if now[name] is not then[name]:
                    return f"{name!r} was replaced"
        found = self.parts.written()
        return None if found is None else written(found)

    def head(self, step: int, lsn: int) -> RecordHead:
        """Of the record of an update."""
        timeline = self.identity.timeline
        exact = self.identity.exact
        return RecordHead("update", timeline, step, lsn, self.digest, exact)

    def release_updates(self) -> None:
        """The gradients are not needed any more; in any thread, any number of times."""
        with contextlib.suppress(IndexError):
            while True:  # two threads may come at once: each room is taken by one of them
                self.pool.release(self.rooms.pop())

    def tie_updates(self) -> None:
        """The gradients are needed as long as the base: they are given back with it."""
        self.room.others = tuple(self.rooms)
        self.rooms = []

    def partial_updates(self, *, all_of_them: bool) -> list[PartialUpdate]:
        """As the keeper is told of them.

        Args:
            all_of_them: those of nothing that was captured, too.
        """
        found = [
            PartialUpdate(update.head, update.layout, update.objects, update.room.offset)
            for update in self.updates
        ]
        if all_of_them:
            found += [PartialUpdate(head, _NOTHING, {}, 0) for head in self.others]
        return sorted(found, key=lambda update: update.head.lsn)


def written(name: str) -> str:
    """That something else than its optimizer has written to an entry, in words."""
    return f"{name!r} was changed, and not by its optimizer"
