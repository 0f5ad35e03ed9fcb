"""Detect writes to optimizer-owned tensors that no hook announced (I8).

The log holds the gradients of each update, and replay applies nothing else: clamped weights, a
state loaded in the middle of a run, or a reset moment would be missing from its result. So between
the end of an update and the beginning of the next one nothing may be written. Version counters are
compared each time (hints only, see ``capture/version_counters.py``), and a few elements in some
steps: in the first steps above all, where code that runs in each step shows. Replay finds the
remaining writes by the samples in each step mark.

Each step mark holds completely the tensors that two optimizers own, or that views share. The log
therefore has writes to these after the last update of a step, but not writes after the mark, which
the next update reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.capture import Versions
from everstep.capture.mark_samples import MarkSampler, mark_entries, sampled_bits
from everstep.capture.version_counters import storage_of
from everstep.errors import AuditError
from everstep.format import digest
from everstep.link import BackgroundChannel
from everstep.state.ownership import memory_of, updated_tensors
from everstep.state.providers import local_optimizer
from everstep.state.ranks import updated_elsewhere
from everstep.state.survey import Shape, Survey, same_objects
from everstep.state.training_state import State
from everstep.state.values.tensors import host_bytes, local_tensor, why_not_storable

SAMPLED_FIRST_STEPS = 8
"""Number of first steps of a timeline in which elements are compared."""

SAMPLE_EVERY_STEPS = 16
"""Interval of later steps with a comparison; every step after the first finding."""


class WatchedTensors:
    """Tensors that one optimizer owns, watched between its updates.

    Args:
        tensors: watched tensors, by entry name.
        beside: all other tensors of the state, whose writes move shared counters; None if unknown.
        suspects: names of tensors compared completely: samples of them have changed once without a
            version counter moving.
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
        self._spots: MarkSampler | None = None  # created at the first comparison
        self._remembered: tuple[int, Mapping[str, Any]] | None = None

    def watches(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if exactly these tensors are watched under these names."""
        mine = self.tensors
        return mine.keys() == tensors.keys() and same_objects(
            tuple(mine.values()), tuple(tensors.values())
        )

    def settle(self, step: int | None) -> None:
        """Accept the current contents; later changes are relative to them.

        Args:
            step: step whose sample of elements is remembered; None to remember none.
        """
        self._seen = self._versions.now()
        self._remembered = None
        self._digests = dict(self._digests_now())
        if step is not None:
            self._spots = self._spots or MarkSampler(self.tensors)
            if self._spots.intact:
                self._remembered = step, self._spots.take(step)

    def counted(self) -> str | None:
        """Return the name of a tensor whose version counter has moved, or None."""
        return self._versions.moved(self._seen)

    def _digests_now(self) -> Iterator[tuple[str, str]]:
        for name in self._suspects:
            tensor = self.tensors.get(name)
            if tensor is not None and tensor.device.type == "cpu" and tensor.is_contiguous():
                yield name, digest(host_bytes(tensor.detach()))

    def written(self, ignored: Collection[str] = ()) -> str | None:
        """Return the name of a tensor that was written to, or None.

        Args:
            ignored: names of tensors to ignore.
        """
        found = self._versions.moved(self._seen, ignored)
        if found is None and self._digests:
            pairs = ((name, now) for name, now in self._digests_now() if name not in ignored)
            found = next((name for name, now in pairs if self._digests.get(name, now) != now), None)
        if found is None and self._remembered is not None and self._spots is not None:
            step, values = self._remembered
            found = self._spots.other(step, values) if self._spots.intact else None
        return None if found in ignored else found


@dataclass(slots=True)
class _Sampling:
    """Choice of the steps in which elements are compared, not only counters.

    Attributes:
        step: step in progress.
        first_until: last of the first steps of the timeline.
        suspicious: True after a finding.
    """

    step: int = 0
    first_until: int = 0
    suspicious: bool = False

    @property
    def sampled_step(self) -> int | None:
        """Return the step in progress if its elements are compared, else None."""
        step = self.step
        sampled = self.suspicious or step <= self.first_until or step % SAMPLE_EVERY_STEPS == 0
        return step if sampled else None


class _MarkSamples:
    """Samples of replayed tensors in step marks."""

    def __init__(self) -> None:
        self._spots = MarkSampler({})
        self._which = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._last: tuple[int, Mapping[str, torch.Tensor]] | None = None  # step and samples

    def choose(self, replayed: Mapping[str, torch.Tensor]) -> None:
        """Sample these tensors from now on."""
        self._spots = MarkSampler(replayed)

    def describe(self, entries: Iterable[str]) -> None:
        """Compute the bits that tell which of all entries are sampled."""
        self._which = sampled_bits(self._spots, sorted(entries))

    def take(self, step: int) -> dict[str, torch.Tensor]:
        """Return the samples of a mark, and remember them."""
        samples = mark_entries(self._spots, self._which, step)
        self._last = step, samples
        return samples

    def forget(self) -> None:
        """Forget the last mark's: the step in progress may not be recorded."""
        self._last = None

    @property
    def unchanged(self) -> bool:
        """Return True if the elements are those of the last mark; or it was not recorded."""
        if self._last is None:
            return True
        step, then = self._last
        if not self._spots.intact:
            return False
        now = mark_entries(self._spots, self._which, step)
        return all(torch.equal(now[name], then[name]) for name in then)


class UntrackedWrites:
    """Watch the optimizer-owned tensors of a state between updates.

    Training goes on after any finding; the log ends before it, and bases are taken instead. The
    user is warned once.

    Args:
        channel: delivers the warning.
        state: state with the optimizers.
        on_first: called at the first finding.

    Attributes:
        follows_base: True if the log continues from a base; otherwise no log exists from which a
            change would be missing.
    """

    def __init__(
        self,
        channel: BackgroundChannel,
        state: State,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._state = state
        self.follows_base = False
        self._on_first = on_first
        self._lock = threading.Lock()
        self._warned = False
        self._torn_reason: str | None = None
        self._watched: dict[str, WatchedTensors] = {}
        self._read: WatchedTensors | None = None  # read by updates, and logged completely
        self._writes_of_pattern: Mapping[str, Collection[str]] = {}  # names in _read, by pattern
        # Of the survey whose tensors are watched.
        self._followed: tuple[Shape, Mapping[str, torch.Tensor]] | None = None
        self._samples = _MarkSamples()
        self._sampling = _Sampling()
        self._suspects: set[str] = set()

    def start(self, survey: Survey | None, step: int) -> None:
        """Accept the current state as that of the log and its bases.

        Args:
            survey: survey of the state; None if nothing is recorded.
            step: step that has just ended.
        """
        self._watched = {}
        self._followed = None
        self._torn_reason = None
        self._samples.forget()
        self._read = None
        self._sampling.step = step + 1
        self._sampling.first_until = step + SAMPLED_FIRST_STEPS
        if survey is not None:
            self._follow(survey)
            self.accept()

    def accept(self) -> None:
        """Accept all writes so far: a base or a record holds them."""
        for watched in (*self._watched.values(), self._read):
            if watched is not None:
                watched.settle(self._sampling.sampled_step)

    def before(self, key: str, step: int) -> str | None:
        """Return why the log cannot continue with the next update of an optimizer, or None."""
        self._sampling.step = step
        if torch.compiler.is_compiling():  # the copy of the inputs refuses that
            return None
        some = (self._watched.get(key), self._read)
        written = (self._written(watched) for watched in some if watched is not None)
        return self._report(next((name for name in written if name), None), step)

    def applied(self, key: str) -> None:
        """Accept the writes of an optimizer's update, which has ended."""
        if torch.compiler.is_compiling():
            return
        for watched in (self._watched.get(key), self._read):  # every update may write to _read
            if watched is not None:
                watched.settle(self._sampling.sampled_step)

    def declared(self, pattern: str) -> None:
        """Accept the writes of the function registered for ``pattern`` to entries that updates
        read.

        Other writes are looked for first; they end the log at the mark."""
        read = self._read
        mine = self._writes_of_pattern.get(pattern)
        if read is None or not mine:
            return
        if (torn := self._report(self._written(read, mine), self._sampling.step)) is not None:
            self._torn_reason = torn
        read.settle(self._sampling.sampled_step)

    def at_mark(self, survey: Survey, step: int) -> str | None:
        """Return why the log cannot continue at a step mark, or None."""
        with self._lock:  # the lane's thread may set another one
            torn = self._torn_reason
            self._torn_reason = None
        self._samples.forget()
        self._sampling.step = step + 1
        found = next((name for w in self._watched.values() if (name := self._written(w))), None)
        self._follow(survey)
        if found is not None or self._sampling.sampled_step is not None:
            self.accept()
        elif self._read is not None:  # the mark holds its current contents
            self._read.settle(None)
        return self._report(found, step) or (torn if self.follows_base else None)

    def samples(self, step: int) -> dict[str, torch.Tensor]:
        """Return the samples of a mark's state; call :meth:`at_mark` with its survey before."""
        return self._samples.take(step)

    @property
    def is_as_marked(self) -> bool:
        """Return True if counters and samples show no write since the last mark."""
        watched = (*self._watched.values(), *([] if self._read is None else [self._read]))
        return not any(one.written() for one in watched) and self._samples.unchanged

    def handles_torn_base(self, error: AuditError) -> bool:
        """Make a new base due at the next step mark, copied there at once. In any thread.

        A base is worthless because code wrote to the state while it was copied; that is a warning,
        not an error."""
        step = (error.step or 0) + 1
        why = f"the state was changed while the base of step {step - 1} was copied"
        with self._lock:
            self._torn_reason = why
        self._warn(error.message, step)
        return True

    def _written(self, watched: WatchedTensors, ignored: Collection[str] = ()) -> str | None:
        """Return the name of a written tensor, or None; watch it completely if no counter
        has moved."""
        name = watched.written(ignored)
        if name is not None and self.follows_base and watched.counted() is None:
            self._suspects.add(name)
        return name

    def _report(self, name: str | None, step: int) -> str | None:
        if name is None or not self.follows_base:
            return None
        self._warn(f"{name!r} was changed outside its optimizer's step()", step)
        return f"{name!r} was changed outside its optimizer"

    def _warn(self, event: str, step: int) -> None:
        # The lane's thread warns of torn bases, the training thread of writes: only the first one
        # is posted.
        with self._lock:
            warned = self._warned
            self._warned = True
        self._sampling.suspicious = True
        if not warned:
            self._on_first()
            self._channel.post_notice(_notice(event, step, self._state.ranks.world))

    def _follow(self, survey: Survey) -> None:
        """Watch the tensors of a survey: some may be new, gone, or replaced."""
        shape = survey.shape
        tensors = survey.tensors
        followed = self._followed
        if followed is not None and shape is followed[0] and tensors is followed[1]:
            return
        # Set again at the end: after an interrupt in between, all of this is done again.
        self._followed = None
        self._follow_read(shape, tensors)
        before = self._watched
        watched = dict[str, WatchedTensors]()
        replayed: dict[str, dict[str, torch.Tensor]] = {}
        for name, owner in shape.owners.items():
            if owner.kind == "replayed" and owner.optimizer is not None:
                replayed.setdefault(owner.optimizer, {})[name] = tensors[name]
        for key, now in replayed.items():
            old = before.get(key)
            if old is None or not old.watches(now):
                others = (tensor for name, tensor in tensors.items() if name not in now)
                old = WatchedTensors(now, map(local_tensor, others), self._suspects)
            watched[key] = old
        if watched != before:
            all_of = (one.tensors for one in watched.values())
            # This rank's log does not replay tensors that another rank updates.
            left_out = updated_elsewhere(self._state)
            self._samples.choose(
                {n: t for found in all_of for n, t in found.items() if n not in left_out}
            )
        self._watched = watched
        self._samples.describe(tensors)
        self._followed = shape, tensors

    def _follow_read(self, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> None:
        """Watch tensors that updates read and marks hold completely.

        Views of the same storages share their counters, so these are excluded unless updates read
        all of them. Replayed tensors change in updates only, and every update settles all."""
        of = shape.owners
        read = {name: tensors[name] for name, owner in of.items() if owner.read == "whole"}
        read |= self._hidden_reads(shape, tensors)
        if not read:
            self._read = None
            self._writes_of_pattern = {}
        elif self._read is None or not self._read.watches(read):
            beside = (name for name, owner in of.items() if owner.read in ("", "part"))
            others = (tensors[name] for name in beside if of[name].kind != "replayed")
            self._read = WatchedTensors(read, map(local_tensor, others), self._suspects)
            self._writes_of_pattern = self._declared_writes(shape, tensors, read)

    def _hidden_reads(
        self, shape: Shape, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return tensors that updates read but no entry holds, by the name of an entry that
        overlaps."""
        others = ("part", "inside")
        some = [name for name, owner in shape.owners.items() if owner.read in others]
        if not some:
            return {}
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

    def _declared_writes(
        self, shape: Shape, tensors: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]
    ) -> dict[str, list[str]]:
        """Return, by pattern, the watched names that a registered function may write to: all in
        the storages of its entries, since these share counters."""
        registered = self._state.ownership_rules
        if not registered.updates:
            return {}
        names = {name: [name] for name in shape.owners}
        for other, name in shape.aliases.items():
            names[name].append(other)
        storages: dict[str, set[int]] = {}
        for name, also in names.items():
            for pattern in registered.updates_of(also):
                storages.setdefault(pattern, set()).add(storage_of(local_tensor(tensors[name])))
        lie = {name: storage_of(local_tensor(tensor)) for name, tensor in read.items()}
        return {
            pattern: [name for name, storage in lie.items() if storage in found]
            for pattern, found in storages.items()
        }


def _notice(event: str, step: int, world: int) -> AuditError:
    when = "a base is taken at the end of this step"
    if world > 1:
        when = "all ranks take a base at the end of the next step"
    return AuditError(
        f"{event}, in step {step}: no log can repeat that, so {when}, as after every later step "
        "with such a change. Recovery stays correct, but each such step costs a complete copy of "
        "the state, and rewind() reaches it only while its base is among the newest keep= bases, "
        "whatever history= is. This warning is given once; stats().log_holes counts further steps",
        step=step,
        hint="if it happens now and then (a state is loaded, averaged weights are swapped in), put "
        "it between ckpt.before_update() and ckpt.after_update(). If it happens in every step "
        "(clamped weights), do it inside step() of an optimizer class of your own, declared with "
        'everstep.replay.exactness.declare(), or use a method without a log (method="lazy")',
    )
