"""Records the gradient log: what each optimizer consumed, and what each step left behind.

In the training thread as little as possible: a list of references before an update, a wait for
their copies behind it (they run beside the update, on the lane), and at the step mark a copy of
the little that no optimizer replays. Everything else is done by the lane's thread and by the
keeper (LowDiff sections IV and V; I2, I8).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch

from everstep.capture.batches import plan_batches
from everstep.capture.lane import Lane, Transfer
from everstep.errors import (
    DeadlineError,
    EverstepError,
    NonFiniteError,
    UnsupportedStateError,
)
from everstep.format.log import RecordHead
from everstep.keeper.channel import BackgroundChannel
from everstep.keeper.declared import DeclaredLog
from everstep.keeper.disklog import DiskLog
from everstep.keeper.pool import CapturePool, Room
from everstep.keeper.recordable import (
    Grouping,
    Layouts,
    LogKeeper,
    compressors_of,
    digest_of,
    eager,
    form_entries,
    groupings_of,
    look_for_nonfinite,
)
from everstep.keeper.save import Save
from everstep.options import Options
from everstep.replay.exactness import kind_name
from everstep.replay.own import writes_gradients
from everstep.seams import Clock
from everstep.seams.failpoints import failpoint
from everstep.state.image import State
from everstep.state.layout import ShardLayout
from everstep.state.log import GRADIENT, HYPER, UPDATE_OBJECT
from everstep.state.objects import encode
from everstep.state.survey import Shape, Survey
from everstep.state.tree import split

__all__ = ["Recorder", "RecorderStats"]

_SCALER = ("grad_scale", "found_inf")


@dataclass(slots=True, eq=False)
class _Kept:
    number: int
    timeline: int
    step: int
    room: Room
    to_disk: bool


@dataclass(slots=True, eq=False)
class _Under:
    """An update that is being copied."""

    transfer: Transfer
    end: int
    job: Any
    calls: int = 1


@dataclass(slots=True)
class RecorderStats:
    """What the log has cost and done.

    Attributes:
        records, record_bytes, marks: so far.
        holes: updates that could not be recorded; behind each a new base is due.
        stall_s: seconds of the training thread.
    """

    records: int = 0
    record_bytes: int = 0
    marks: int = 0
    holes: int = 0
    stall_s: float = 0.0
    held_bytes: int = 0


class Recorder:
    """Records the updates of all optimizers of a state, and its step marks.

    Args:
        lane: copies.
        log_bytes_max: of records in memory; with more a new base is due.

    Attributes:
        base_due: why the log cannot go on without a new base; None if it can.
        base_step: of the newest base that was asked for.
        disk: which records go to disk.
        relieved_to: tells the number up to which records have gone into a replica; None: there is
            none.
        overrun: called when there is no memory for a record, though there is a replica.
    """

    def __init__(
        self,
        options: Options,
        state: State,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
        *,
        log_bytes_max: int,
    ) -> None:
        self._options = options
        self._state = state
        self._lane = lane
        self._channel = channel
        self._clock = clock
        self.log_bytes_max = log_bytes_max
        self._keeper: LogKeeper | None = None
        self._pool: CapturePool | None = None
        self._block: torch.Tensor | None = None
        self._timeline, self._exact = 0, True
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._compressors = compressors_of(state)
        self._number = 0
        self._step_bytes = 0  # of the step under way
        self._durable_step = -1
        self.base_step = 0
        self.disk = DiskLog(options, channel)
        self.relieved_to: Callable[[], int | None] = lambda: None
        self.overrun: Callable[[], None] = lambda: None
        self._under: _Under | None = None
        self._layouts = Layouts()
        self._declared = DeclaredLog(state)
        self._groupings: dict[str, Grouping] = {}
        self._shape: Shape | None = None
        self._entries: Any = None
        self._digest = ""
        self.base_due: str | None = "no base yet"
        self.stats = RecorderStats()

    def start(
        self,
        keeper: LogKeeper | None,
        pool: CapturePool | None,
        timeline: int,
        exact: bool,
    ) -> None:
        """From now on records go to ``keeper``, as those of ``timeline``."""
        self._keeper, self._timeline, self._exact = keeper, timeline, exact
        with self._lock:
            if pool is not self._pool:
                self._kept.clear()
                self._pool = pool
                self._block = None
                if pool is not None:
                    self._block = torch.frombuffer(pool.arena.view, dtype=torch.uint8)
            for kept in self._kept:
                kept.to_disk = False  # by whom, now?
            self._durable_step = -1
        self.disk.start(keeper)
        self._declared.start()
        self.base_due = self.base_due or "a new timeline"

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """The gradients of an optimizer are what it is going to consume: begins to copy them.

        Args:
            lsn: of the update.
            step: that is under way.
            over: it has consumed them already: a hook that was registered later came last.
        """
        if self._pool is None:
            return
        start_s = self._clock.monotonic_s()
        if self._under is not None:
            self._under.calls += 1  # a closure that is called again: not recorded (see applied)
            return
        try:
            self._under = self._copy(key, lsn, step, over)
        except EverstepError as error:
            self._hole(error.message)
            self._channel.post(error)
        self.stats.stall_s += self._clock.monotonic_s() - start_s

    def applied(self, key: str) -> None:
        """The update is over: gradients may change from now on, so their copies must be made."""
        under, self._under = self._under, None
        if under is None:
            return
        start_s = self._clock.monotonic_s()
        if not under.transfer.gate(under.end, self._options.progress_timeout_s):
            self._hole("copying gradients hangs")
            self._channel.post(DeadlineError("copying gradients hangs"))
        elif under.calls > 1:
            self._hole(f"{key} calls its closure more than once")
        else:
            self._lane.run(under.job)
        self.stats.stall_s += self._clock.monotonic_s() - start_s

    def skipped(self, why: str) -> None:
        """Something has changed what optimizers own that replay cannot repeat."""
        self._declared.start()
        self._hole(why)

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """The function registered for ``pattern`` has run: replay runs it at this place (I8).

        Args:
            lsn: of the update.
            step: that is under way.
        """
        if self._pool is None:
            return
        start_s = self._clock.monotonic_s()
        named = self._declared.ran(pattern)
        head = RecordHead("update", self._timeline, step, lsn, self._digest, self._exact, pattern)
        self._copy_now(head, named, dict)
        self.stats.stall_s += self._clock.monotonic_s() - start_s

    def mark(self, survey: Survey, lsn: int, step: int) -> None:
        """The step is over: records what no optimizer replays (I8)."""
        pool, keeper = self._pool, self._keeper
        if pool is None or keeper is None or self._block is None:
            return
        start_s = self._clock.monotonic_s()
        shape = survey.shape
        regrouped = not all(map(self._is_grouped_as_before, self._groupings))
        if shape.entries is not self._entries or regrouped:
            changed, self._entries = self._entries is not None, shape.entries
            self._groupings = groupings_of(self._state)
            self._digest = digest_of(shape, self._groupings)
            if changed:
                self.base_due = "what the state consists of has changed"
        if regrouped:  # and an update of this step may have been recorded before that
            self._hole("parameters are in other groups than before")
            return
        named = {
            entry.name: survey.tensors[entry.name]
            for entry in shape.entries
            if shape.owners[entry.name].in_marks
        }
        samples, ran = self._declared.samples(survey)
        head = RecordHead("mark", self._timeline, step, lsn, self._digest, self._exact)
        told = self._copy_now(head, named | samples, survey.objects, ran)
        if told is not None:
            # Or more than the step in flight could be lost. Behind it on the lane is nothing but
            # the updates of this step: no update begins while a base is being copied.
            try:
                told.result(self._options.progress_timeout_s)
            except FutureTimeout:
                self._hole("the keeper takes no records")
                self._channel.post(DeadlineError("recording a step hangs", step=step))
            step_bytes, self._step_bytes = self._step_bytes, 0
            self._lane.run(lambda: pool.warm_ahead(2 * step_bytes))  # behind the next backward
            self.stats.marks += 1
            self.disk.marked(self._number, step)
        self.stats.stall_s += self._clock.monotonic_s() - start_s

    def base_taken(self, save: Save) -> None:
        """A base of this very step is being captured."""
        self.base_due = None
        self.base_step = save.step
        self.disk.base_taken()

        def durable(_: Any) -> None:
            if not save.durable.cancelled() and save.durable.exception() is None:
                self.base_durable(save.step)

        save.durable.add_done_callback(durable)

    def base_durable(self, step: int) -> None:
        """Records up to ``step`` are no longer needed; in any thread."""
        with self._lock:
            self._durable_step = max(self._durable_step, step)
        self._release()

    def on_disk(self, number: int) -> None:
        """Records up to ``number`` are on disk; in any thread."""
        self.disk.reached(number)
        self._release()

    def _copy(self, key: str, lsn: int, step: int, over: bool) -> _Under | None:
        optimizer = eager(key, self._state.optimizers[key])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._groupings = self._groupings or groupings_of(self._state)
        if not self._is_grouped_as_before(key):
            self._hole(f"the parameters of {key} are in other groups than before")
            return None
        gradients = [p.grad for p in parameters]
        named: dict[str, torch.Tensor] = {}
        forms, compressed = self._forms(key, parameters), {}
        names = self._groupings[key].names
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            form = forms.get(id(parameter))
            if gradient is not None and form is not None:
                compressed[name] = form_entries(name, gradient, form, named)
            elif gradient is not None:
                if gradient.layout != torch.strided or type(gradient) is not torch.Tensor:
                    raise UnsupportedStateError(
                        f"the gradient of {name} is no plain dense tensor; it cannot be logged",
                        leaves=((name, "a gradient that is not plain and dense"),),
                        hint='method="lazy", or a dense gradient',
                    )
                named[GRADIENT + name] = gradient.detach()
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in group.items() if k != "params"}
            groups.append(split(options, f"{HYPER}/{number}", named))
        for name in _SCALER:
            value = getattr(optimizer, name, None)
            if isinstance(value, torch.Tensor):
                named[name] = value.detach()
        written = any(name in named for name in _SCALER)  # a fused kernel divides in place
        written = written or writes_gradients(type(optimizer), optimizer.param_groups)
        if written and over:
            self._hole(f"gradients of {key} were changed before they could be copied")
            return None
        layout = self._layouts.of(named)
        room = self._room(layout.size_bytes)
        if room is None:
            return None
        pool, block = self._pool, self._block
        assert pool is not None
        assert block is not None
        block = block[room.offset : room.offset + room.size_bytes]
        if not any(tensor.is_cuda for tensor in named.values()):  # pinning takes the pages
            self._lane.run(lambda: pool.populate(room))
        batches = plan_batches(layout, named, named.keys())
        transfer = self._lane.submit(batches, block, lambda end: None)
        head = RecordHead("update", self._timeline, step, lsn, self._digest, self._exact)
        # It must not begin before the copy ends.
        if written and not transfer.gate(layout.size_bytes, self._options.progress_timeout_s):
            raise DeadlineError("copying gradients hangs", step=step)
        about: dict[str, Any] = {
            "optimizer": key,
            "kind": kind_name(type(optimizer)),
            "groups": groups,
        }
        if compressed:
            about["compressed"] = compressed

        def objects() -> dict[str, bytes]:
            assert transfer.wait(self._options.progress_timeout_s)
            return {UPDATE_OBJECT: encode(about, checked=True)}

        return _Under(transfer, layout.size_bytes, lambda: self._tell(head, layout, room, objects))

    def _forms(self, key: str, parameters: Sequence[torch.Tensor]) -> Mapping[int, Any]:
        """Forms of the gradients that training consumes compressed, by ``id(parameter)``."""
        compressor = self._compressors.get(key)
        if compressor is None:
            return {}
        compressor.check()
        return {key: form for key, form in compressor.last.items() if form is not None}

    def _copy_now(
        self,
        head: RecordHead,
        named: Mapping[str, torch.Tensor],
        objects: Callable[[], Mapping[str, bytes]],
        ran: frozenset[str] = frozenset(),
    ) -> Future[None] | None:
        """Copies tensors that may change at once, and lets the keeper be told; None if there is
        no memory.

        Args:
            ran: declared updates since the last mark.
        """
        pool = self._pool
        assert pool is not None
        assert self._block is not None
        layout = self._layouts.of(named)
        room = self._room(layout.size_bytes)
        if room is None:
            return None
        pool.populate(room)
        block = self._block[room.offset : room.offset + room.size_bytes]
        self._lane.mark(plan_batches(layout, named, named.keys()), block)
        return self._lane.run(lambda: self._tell(head, layout, room, objects, ran))

    def _tell(
        self,
        head: RecordHead,
        layout: ShardLayout,
        room: Room,
        objects: Callable[[], Mapping[str, bytes]],
        ran: frozenset[str] = frozenset(),
    ) -> None:
        """In the lane's thread, behind the copies: the record is whole."""
        keeper = self._keeper
        try:
            encoded = objects()
            failpoint("log.before_record")
            with self._lock:
                self._number += 1
                number = self._number
                self._kept.append(_Kept(number, head.timeline, head.step, room, self.disk.on))
            assert keeper is not None
            if head.kind == "mark":
                assert self._block is not None
                self._declared.check(head, layout, self._block[room.offset :], ran)
            keeper.log(number, head, layout, encoded, room.offset)
            failpoint("log.after_record")
            self.stats.records += 1
            if self._options.log.watch and head.kind == "update" and self._block is not None:
                look_for_nonfinite(head, layout, self._block[room.offset :])
            self.stats.record_bytes += layout.size_bytes + sum(map(len, encoded.values()))
        except NonFiniteError as error:
            self._channel.post(error)  # the record is there all the same
        except EverstepError as error:
            self._channel.post(error)
            self._hole(error.message)

    def _room(self, size_bytes: int) -> Room | None:
        """Memory for a record; None, and a new base is due, if there is none."""
        pool = self._pool
        assert pool is not None
        held, relieved_to = self._held_bytes(), self.relieved_to()
        if held + size_bytes > self.log_bytes_max // 2:
            if relieved_to is None:
                self.base_due = self.base_due or "the log has half filled its memory"
            else:
                self._release(relieved_to)
                held = self._held_bytes()
        self.stats.held_bytes = held
        self._step_bytes += size_bytes
        fits = held + size_bytes <= self.log_bytes_max
        room = pool.acquire_now(max(1, size_bytes)) if fits else None
        if room is None and fits and relieved_to is not None:  # there is more in the arena
            self._release(relieved_to)
            room = pool.acquire_now(max(1, size_bytes))
        if room is None:
            self._hole("there is no host memory for the log")
            if relieved_to is not None:
                self.overrun()
        return room

    def _held_bytes(self) -> int:
        with self._lock:
            return sum(kept.room.size_bytes for kept in self._kept)

    def _hole(self, why: str) -> None:
        self.stats.holes += 1
        self.base_due = self.base_due or why

    def _release(self, relieved_to: int = 0) -> None:
        """Lets go of records that nobody needs.

        Args:
            relieved_to: nor those up to this number.
        """
        pool, keeper = self._pool, self._keeper
        with self._lock:
            free: list[_Kept] = []
            while self._kept:
                kept = self._kept[0]
                old = kept.timeline < self._timeline and self._durable_step >= 0
                unwritten = kept.to_disk and not self.disk.has(kept.number)
                needed = kept.step > self._durable_step and not old
                if unwritten or (needed and kept.number > relieved_to):
                    break
                free.append(self._kept.pop(0))
        if free and pool is not None and keeper is not None:
            keeper.forget_log(free[-1].number)
            for kept in free:
                pool.release(kept.room)

    def _is_grouped_as_before(self, key: str) -> bool:
        return self._groupings[key].holds(self._state.optimizers[key])
