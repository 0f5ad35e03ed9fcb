"""Notices what something else than an optimizer has written to what optimizers own (I8).

The log has the gradients that each update consumed, and replay knows no other change: clamped
weights, a state that is loaded in mid-run, a moment that is reset would be missing from what it
gives. So between the end of an update and the beginning of the next, nothing may have been
written: version counters are compared each time, which are hints (``capture/versions.py``); and a
few elements now and then, in the first steps above all, where what a loop does in each step shows.
What neither has seen, replay finds by the samples that each step mark holds.

What two optimizers own, or views share, is in each mark as a whole, so what is written to it behind
the last update is in the log. What is written behind the mark is not, and the next update reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from everstep.capture.spots import Spots, marked, which_of
from everstep.capture.versions import Versions, storage_of
from everstep.errors import AuditError
from everstep.format.digests import digest
from everstep.link.channel import BackgroundChannel
from everstep.state.providers.zero import local_optimizer
from everstep.state.ranks.log_shares import updated_elsewhere
from everstep.state.survey.ownership import memory_of, updated_tensors
from everstep.state.survey.survey import Shape, Survey, same_objects
from everstep.state.training_state import State
from everstep.state.values.tensors import host_bytes, local_tensor, why_not_storable

__all__ = ["LOOKED_AT_FIRST", "LOOK_EVERY", "Owned", "Untold"]

LOOKED_AT_FIRST = 8
"""Steps of a timeline in which elements are compared while training runs."""

LOOK_EVERY = 16
"""Behind these in every so many steps; in each one, once something has been found."""


class Owned:
    """What one optimizer owns, or some of it, between its updates.

    Args:
        beside: all else that the state has; None: it is not known.
        suspects: names of those that are compared as a whole: samples of them once were others,
            and no counter had moved.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        beside: Iterable[torch.Tensor] | None = None,
        suspects: Collection[str] = (),
    ) -> None:
        self.tensors = tensors
        self._suspects = suspects
        self._digests: dict[str, str] = {}
        self._versions = Versions(tensors, beside)
        self._seen = self._versions.now()
        self._spots: Spots | None = None  # as soon as it is looked at
        self._held: tuple[int, Mapping[str, Any]] | None = None

    def is_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the very same tensors under the same names."""
        mine = self.tensors
        return mine.keys() == tensors.keys() and same_objects(
            tuple(mine.values()), tuple(tensors.values())
        )

    def settle(self, step: int | None) -> None:
        """It is as it should be: what comes next is compared with that.

        Args:
            step: whose elements are remembered; None: none are.
        """
        self._seen = self._versions.now()
        self._held = None
        self._digests = dict(self._digests_now())
        if step is not None:
            self._spots = self._spots or Spots(self.tensors)
            if self._spots.intact:
                self._held = step, self._spots.take(step)

    def counted(self) -> str | None:
        """The name of one whose counter has moved since."""
        return self._versions.moved(self._seen)

    def _digests_now(self) -> Iterator[tuple[str, str]]:
        for name in self._suspects:
            tensor = self.tensors.get(name)
            if tensor is not None and tensor.device.type == "cpu" and tensor.is_contiguous():
                yield name, digest(host_bytes(tensor.detach()))

    def written(self, but: Collection[str] = ()) -> str | None:
        """The name of a tensor that was written to since.

        Args:
            but: of no interest.
        """
        found = self._versions.moved(self._seen, but)
        if found is None and self._digests:
            pairs = ((name, now) for name, now in self._digests_now() if name not in but)
            found = next((name for name, now in pairs if self._digests.get(name, now) != now), None)
        if found is None and self._held is not None and self._spots is not None:
            step, values = self._held
            found = self._spots.other(step, values) if self._spots.intact else None
        return None if found in but else found


class Untold:
    """Watches what the optimizers of a state own, between their updates.

    Training goes on whatever it finds, and the log ends before it: bases are taken instead. That
    is said once.

    Attributes:
        follows_base: there is a base that the log goes on from, or will be; otherwise there is
            nothing that a change would be missing from.
        distrust: called at the first finding.
    """

    def __init__(self, channel: BackgroundChannel, state: State) -> None:
        self._channel = channel
        self._state = state
        self.follows_base = False
        self.distrust: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._said = False
        self._torn: str | None = None
        self._watched: dict[str, Owned] = {}
        self._read: Owned | None = None  # by updates, and logged in full
        self._told: Mapping[str, Collection[str]] = {}  # of these, by pattern of a function
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._shape: Shape | None = None
        self._names: Mapping[str, tuple[str, ...]] = {}
        self._spots = Spots({})
        self._which = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sampled: tuple[int, Mapping[str, torch.Tensor]] | None = None  # in the last mark
        self._step = 0  # under way
        self._looked_at_first = 0
        self._suspicious = False
        self._suspects: set[str] = set()

    def start(self, survey: Survey | None, step: int) -> None:
        """What there is now is what log and bases have, or will have.

        Args:
            survey: of the state; None: nothing is recorded.
            step: that has just ended.
        """
        self._watched = {}
        self._tensors = None
        self._torn = None
        self._sampled = None
        self._read = None
        self._step = step + 1
        self._looked_at_first = step + LOOKED_AT_FIRST
        if survey is not None:
            self._learn(survey)
            self.accept()

    def accept(self) -> None:
        """Whatever was written is known by now."""
        for watched in (*self._watched.values(), self._read):
            if watched is not None:
                watched.settle(self._looks)

    def before(self, key: str, step: int) -> str | None:
        """An optimizer is going to update: why the log cannot go on; None if it can."""
        self._step = step
        if torch.compiler.is_compiling():  # refused by whoever copies
            return None
        some = (self._watched.get(key), self._read)
        written = (self._written(watched) for watched in some if watched is not None)
        return self._found(next((name for name in written if name), None), step)

    def applied(self, key: str) -> None:
        """Its update is over."""
        if torch.compiler.is_compiling():
            return
        for watched in (self._watched.get(key), self._read):  # any may have written to the latter
            if watched is not None:
                watched.settle(self._looks)

    def declared(self, pattern: str) -> None:
        """The function registered for a pattern has run: what updates read of its entries is as it
        should be. What else was written to is looked for first, and ends the log at the mark."""
        read = self._read
        mine = self._told.get(pattern)
        if read is None or not mine:
            return
        self._torn = self._found(self._written(read, mine), self._step) or self._torn
        read.settle(self._looks)

    def at_mark(self, survey: Survey, step: int) -> str | None:
        """A step is over: why the log cannot go on; None if it can."""
        torn = self._torn
        self._torn = None
        self._sampled = None
        self._step = step + 1
        found = next((name for w in self._watched.values() if (name := self._written(w))), None)
        self._learn(survey)
        if found is not None or self._looks is not None:
            self.accept()
        elif self._read is not None:  # the mark holds it, whatever it is by now
            self._read.settle(None)
        return self._found(found, step) or (torn if self.follows_base else None)

    def samples(self, step: int) -> dict[str, torch.Tensor]:
        """For a mark, of the state that was surveyed for it."""
        samples = marked(self._spots, self._which, step)
        self._sampled = step, samples
        return samples

    @property
    def is_as_marked(self) -> bool:
        """Whether nothing was written since the last mark, as far as counters and samples tell."""
        watched = (*self._watched.values(), *([] if self._read is None else [self._read]))
        if any(one.written() for one in watched):
            return False
        if self._sampled is None:  # that step was not recorded
            return True
        step, then = self._sampled
        if not self._spots.intact:
            return False
        now = marked(self._spots, self._which, step)
        return all(torch.equal(now[name], then[name]) for name in then)

    @property
    def _looks(self) -> int | None:
        """The step under way, if its elements are compared."""
        step = self._step
        looks = self._suspicious or step <= self._looked_at_first or step % LOOK_EVERY == 0
        return step if looks else None

    def torn(self, error: AuditError) -> bool:
        """A base is worth nothing: something has written to the state while it was copied. That is
        no error: the next step takes another, and copies all of it at once. In any thread."""
        step = (error.step or 0) + 1
        self._torn = f"the state was changed while the base of step {step - 1} was copied"
        self._say(error.message, step)
        return True

    def _written(self, watched: Owned, but: Collection[str] = ()) -> str | None:
        """What was written to; suspect from now on, if no counter has told."""
        name = watched.written(but)
        if name is not None and self.follows_base and watched.counted() is None:
            self._suspects.add(name)
        return name

    def _found(self, name: str | None, step: int) -> str | None:
        if name is None or not self.follows_base:
            return None
        self._say(f"{name!r} was changed, and not by its optimizer's step()", step)
        return f"{name!r} was changed, and not by its optimizer"

    def _say(self, what: str, step: int) -> None:
        with self._lock:
            said = self._said
            self._said = True
        self._suspicious = True
        if not said:
            self.distrust()
            self._channel.post_notice(_notice(what, step, self._state.ranks.world))

    def _learn(self, survey: Survey) -> None:
        """Follows tensors that have come, gone, or been replaced."""
        shape = survey.shape
        tensors = survey.tensors
        if tensors is self._tensors and shape is self._shape:
            return  # mostly
        self._tensors = None  # last: what an interrupt leaves half done is done again
        if shape is not self._shape:
            names: dict[str, list[str]] = {}
            for name, owner in shape.owners.items():
                if owner.kind == "replayed" and owner.optimizer is not None:
                    names.setdefault(owner.optimizer, []).append(name)
            self._names = {key: tuple(found) for key, found in names.items()}
            self._shape = shape
        self._learn_read(shape, tensors)
        before = self._watched
        watched = dict[str, Owned]()
        for key, mine in self._names.items():
            now = {name: tensors[name] for name in mine}
            old = before.get(key)
            if old is None or not old.is_of(now):
                others = (tensor for name, tensor in tensors.items() if name not in now)
                old = Owned(now, map(local_tensor, others), self._suspects)
            watched[key] = old
        if watched != before:
            all_of = (one.tensors for one in watched.values())
            # This rank's log does not replay what another one updates for it.
            left_out = updated_elsewhere(self._state)
            sampled = {n: t for found in all_of for n, t in found.items() if n not in left_out}
            self._spots = Spots(sampled)
        self._watched = watched
        self._which = which_of(self._spots, sorted(tensors))
        self._tensors = tensors

    def _learn_read(self, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> None:
        """What others have of the same storages moves counters, too, unless all of it is read. What
        optimizers replay does so in updates only, and behind each of these all is settled."""
        of = shape.owners
        read = {name: tensors[name] for name, owner in of.items() if owner.read == "whole"}
        read |= self._hidden(shape, tensors)
        if not read:
            self._read = None
            self._told = {}
        elif self._read is None or not self._read.is_of(read):
            beside = (name for name, owner in of.items() if owner.read in ("", "part"))
            others = (tensors[name] for name in beside if of[name].kind != "replayed")
            self._read = Owned(read, map(local_tensor, others), self._suspects)
            self._told = self._told_of(shape, tensors, read)

    def _hidden(
        self, shape: Shape, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """What updates read that is no entry itself, by the name of one that has some of it."""
        others = ("part", "inside")
        some = [name for name, owner in shape.owners.items() if owner.read in others]
        if not some:
            return {}  # mostly
        there = {name: memory_of(local_tensor(tensor)) for name, tensor in tensors.items()}
        known = set(there.values())
        found = dict[str, torch.Tensor]()
        for optimizer in self._state.optimizers.values():
            for tensor in updated_tensors(local_optimizer(optimizer)):
                part = local_tensor(tensor)
                memory = None if why_not_storable(part) else memory_of(part)
                if memory is None or memory in known:
                    continue
                known.add(memory)
                having = (name for name in some if memory.overlaps(there[name]))
                if (name := next(having, None)) is not None:
                    found[f"{name}~{len(found) + 1}" if name in found else name] = tensor
        return found

    def _told_of(
        self, shape: Shape, tensors: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]
    ) -> dict[str, list[str]]:
        """What a registered function may change of what is read, by its pattern: all that lies in
        the storages of its entries, as it has their counters."""
        told = self._state.ownership_rules
        if not told.updates:
            return {}
        names = {name: [name] for name in shape.owners}
        for other, name in shape.aliases.items():
            names[name].append(other)
        storages: dict[str, set[int]] = {}
        for name, also in names.items():
            for pattern in told.updates_of(also):
                storages.setdefault(pattern, set()).add(storage_of(local_tensor(tensors[name])))
        lie = {name: storage_of(local_tensor(tensor)) for name, tensor in read.items()}
        return {
            pattern: [name for name, storage in lie.items() if storage in found]
            for pattern, found in storages.items()
        }


def _notice(what: str, step: int, world: int) -> AuditError:
    taken = "is taken at the end of this step, and of each other step in which"
    if world > 1:
        taken = (
            "of all ranks is taken at the end of the step after this one, and after each in which"
        )
    return AuditError(
        f"{what}, in step {step}: no log can repeat that, so a base {taken} anything like it "
        "happens. Recovery stays right, but each such step costs a whole copy of the state, and "
        "can be gone back to while that is among the newest keep= bases, whatever history= is. "
        "This is said once; stats().log_holes counts on",
        step=step,
        hint="now and then (a state that is loaded, averaged weights swapped in): put it between "
        "ckpt.before_update() and ckpt.after_update(). In every step (clamped weights): do it "
        "within step() of an optimizer class of your own, and declare that by "
        'everstep.replay.exactness.declare(); or do without a log (method="lazy")',
    )
