"""Copies of a window: parts of the state, and the gradients that updates consume (GoCkpt, sections
4.2.1 and 4.2.4).

Each part is copied during the forward and backward of one step, and updates wait for it (I1).
Gradients are copied for parameters captured in an earlier step: the keeper brings these to the last
step with them. Either the update ends only when they are copied (GoCkpt), or the copies continue
after it, as long as nothing writes to the gradients (GoCkpt-O; :mod:`.held_gradients`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from everstep.capture.lanes.batches import Chunks, plan_batches
from everstep.capture.lanes.lane import Lane, Transfer
from everstep.config.options import Options
from everstep.errors import AuditError, DeadlineError, EverstepError
from everstep.link.pool import Block
from everstep.link.save import as_everstep_error, changed_during_copy_error
from everstep.seams import Clock
from everstep.state.layout.names import GRADIENT, UPDATE_OBJECT
from everstep.state.training_state import State
from everstep.state.values.objects import encode
from everstep.state.values.tensors import is_dtensor
from everstep.trainer.base.prepared_base import PlannedCopies
from everstep.trainer.log.update_inputs import InputReader
from everstep.trainer.multistep.held_gradients import (
    GradientCheck,
    GraphMemory,
    HeldGradients,
    SamplePlaces,
    own_their_memory,
)
from everstep.trainer.multistep.partition import Partitioner
from everstep.trainer.multistep.window import CopiedUpdate, PartCopy, Window

__all__ = [
    "AbandonWindow",
    "PartCopies",
    "UpdateCopies",
]


class PartCopies:
    """Copies of parts.

    Args:
        options: options of the Checkpointer.
        lane: makes the copies.
        clock: measures time.
        partitioner: measures copies.
        stall_s: stall times by cause, in seconds; updated here.
        on_late: called with a window whose copy took too long: the update goes on.
    """

    def __init__(
        self,
        options: Options,
        lane: Lane,
        clock: Clock,
        partitioner: Partitioner,
        stall_s: dict[str, float],
        on_late: Callable[[Window, EverstepError], None],
    ) -> None:
        self._timeout_s = options.progress_timeout_s
        self._lane = lane
        self._clock = clock
        self._partitioner = partitioner
        self._stall_s = stall_s
        self._on_late = on_late
        self._copying: list[PartCopy] = []

    def submit(self, window: Window, copies: PlannedCopies, size_bytes: int) -> None:
        """Begin to copy a part; it is checked in the lane's thread afterwards."""
        sample = None if copies.check is None else copies.check.take()
        step = window.identity.step
        timed = self._partitioner.timed("part", size_bytes)
        transfer = self._lane.submit(copies.batches, window.block, lambda end: None)
        end = copies.end
        copying = PartCopy(window, transfer, copies.ends, end)
        self._copying.append(copying)

        def look() -> None:
            try:
                if not transfer.wait(self._timeout_s):
                    raise DeadlineError("copying the state to host memory has hung", step=step)
                timed.ended(transfer.copied_s)
                if copies.check is not None and sample is not None:
                    torn = copies.check.differing(sample, window.block)
                    if torn is not None:
                        raise changed_during_copy_error(torn, step)
            except Exception as error:
                window.failed = window.failed or as_everstep_error(error, step)
            finally:
                copying.done = True

        self._lane.run(look)

    def gate(self, optimizer: str | None) -> None:
        """Block an update until the parts it will change have been copied.

        Args:
            optimizer: key of the optimizer about to update; None if anything may be updated.
        """
        if not self._copying:
            return
        start_s = self._clock.monotonic_s()
        for one in self._copying:
            end = one.end if optimizer is None else one.ends.get(optimizer, 0)
            if not one.done and not one.transfer.gate(end, self._timeout_s):
                # Do not block training for ever: the update goes on, the window is void.
                late = f"copying the state to host memory took longer than {self._timeout_s:g} s"
                error = DeadlineError(late, step=one.window.identity.step)
                one.done = True
                one.window.failed = one.window.failed or error
                self._on_late(one.window, error)
        self._stall_s["gate"] += self._clock.monotonic_s() - start_s

    @property
    def open(self) -> bool:
        """Return True if copies may be in progress."""
        return bool(self._copying)

    def prune(self) -> None:
        """Forget completed copies."""
        if self._copying:
            self._copying = [one for one in self._copying if not one.done]

    def forget(self, window: Window) -> None:
        """Forget the copies of an abandoned window: nothing waits for them."""
        self._copying = [one for one in self._copying if one.window is not window]


AbandonWindow = Callable[[str, EverstepError | None], None]
"""Abandon the open window: reason, and error to report."""


class UpdateCopies:
    """Copies of the gradients that updates consume.

    Args:
        options: options of the Checkpointer.
        state: state with the optimizers.
        lane: makes the copies.
        clock: measures time.
        partitioner: measures copies.
        stall_s: stall times by cause, in seconds; updated here.
        abandon: abandons the open window.
        warn: warns the user, though nothing has failed.

    Attributes:
        consumption: collects the inputs of updates.
        held: gradients whose copies continue after their update.
        waits: updates wait for the copies of their gradients.
        reported: error of the first torn gradient; None if there was none.
    """

    def __init__(
        self,
        options: Options,
        state: State,
        lane: Lane,
        clock: Clock,
        partitioner: Partitioner,
        stall_s: dict[str, float],
        abandon: AbandonWindow,
        warn: Callable[[EverstepError], None],
    ) -> None:
        self._timeout_s = options.progress_timeout_s
        self._copies_yield = options.method.held_steps > 1
        self._lane = lane
        self._clock = clock
        self._partitioner = partitioner
        self._stall_s = stall_s
        self._abandon = abandon
        self._warn = warn
        self._pending: CopiedUpdate | None = None
        self._seen_lsn = -1  # of the last update whose inputs were collected
        self._places = SamplePlaces()
        self._graphs = GraphMemory()
        self.consumption = InputReader(state)
        self.held = HeldGradients(state, self._wait)
        self.waits = not options.method.overlap_forward
        self.reported: AuditError | None = None

    @property
    def under_way(self) -> bool:
        """Return True if an update has begun and not ended."""
        return self._pending is not None

    def forget(self) -> None:
        """Forget the update in progress."""
        if self._pending is not None:
            self._partitioner.over(self._pending.timed)
        self._pending = None
        self._seen_lsn = -1

    def consumed(self, window: Window, key: str, lsn: int, step: int, *, over: bool) -> None:
        """Begin to copy the gradients of captured parameters that an optimizer is about to consume.

        Args:
            window: open window.
            key: key of the optimizer.
            lsn: number of the update.
            step: step in progress.
            over: the update has already run: a hook registered later was called last.
        """
        if lsn == self._seen_lsn:
            if self._pending is not None:
                self._pending.calls += 1  # a closure called again cannot be replayed
            return
        self._pending = None
        self._seen_lsn = lsn
        names = window.captured.get(key)
        if not names:
            return
        try:
            self._pending = self._copy(window, key, names, lsn, step, over)
        except Exception as error:  # must not make training fail
            ours = as_everstep_error(error, step)
            self._abandon(ours.message, ours)

    def applied(self, window: Window, key: str) -> bool:
        """End an update: gradients may change now, unless their copies continue.

        Returns:
            True if the update can be replayed; otherwise the window was abandoned.
        """
        pending = self._pending
        self._pending = None
        lsn = self._seen_lsn  # cleared: after a rewind another update has the same number
        self._seen_lsn = -1
        if pending is not None:
            if pending.calls > 1:
                self._partitioner.over(pending.timed)
                self._abandon(f"optimizer {key} called its closure more than once", None)
                return False
            if pending.held is not None:
                size_bytes = pending.layout.size_bytes
                self.held.hold(key, pending.transfer, size_bytes, pending.held, pending.check)
            else:
                self._wait(pending.transfer, pending.layout.size_bytes)
            window.updates.append(pending)
            self._lane.run(lambda: self._encode(window, pending))
        return window.account(lsn, copied=pending is not None)

    def _copy(
        self,
        window: Window,
        key: str,
        names: frozenset[str],
        lsn: int,
        step: int,
        over: bool,
    ) -> CopiedUpdate | None:
        """Begin to copy the inputs of an update for captured parameters.

        Returns:
            None if the window was abandoned, or if there is nothing to copy.
        """
        if not self.consumption.grouped_as_before(key):
            self._abandon(f"the parameters of {key} moved to other parameter groups", None)
            return None
        consumed = self.consumption.look(key, names)
        gradients = {n: t for n, t in consumed.tensors.items() if n.startswith(GRADIENT)}
        if not gradients and "compressed" not in consumed.about:
            return None
        if consumed.written and over:
            self._abandon(
                f"optimizer {key} writes to its gradients, which were seen only after that", None
            )
            return None
        layout = consumed.layout
        room = self._room(window, layout.size_bytes)
        if room is None:
            if window.keeper.lost is None:
                self._partitioner.too_large()
            self._abandon("there is no host memory left for gradients", None)
            return None
        window.rooms.append(room)
        into = window.memory[room.offset : room.offset + room.size_bytes]
        end = room.offset + room.size_bytes
        # For device copies, pinning has touched the pages.
        if consumed.in_host_memory and end > window.pool.touched_bytes:
            self._lane.run(lambda: window.pool.populate(room))
        held = None
        check = None
        batches = consumed.batches
        if gradients and not self.waits and not consumed.written:
            held = self._holdable(key, names)
        if held is not None:
            check = GradientCheck(gradients, layout, lsn, self._places)
            # Other tensors (learning rates) are written by schedulers: copied now, not held.
            if others := consumed.tensors.keys() - gradients.keys():
                self._lane.copy_now(plan_batches(layout, consumed.tensors, others), into)
                batches = plan_batches(layout, consumed.tensors, gradients.keys())
        # Gradients held for several steps are less urgent than the part of the next step.
        yielding = held is not None and self._copies_yield
        progress = check.copied if check is not None else lambda end: None
        chunks = Chunks(batches, self._partitioner.chunk_bytes)
        submit = self._lane.submit_yielding if yielding else self._lane.submit
        transfer = submit(chunks, into, progress)
        timed = self._partitioner.timed("gradients", layout.size_bytes, yielding=yielding)
        window.watch.gradient_bytes += layout.size_bytes
        if consumed.written:  # the update must not begin before the copy ends
            self._wait(transfer, layout.size_bytes)
        head = window.head(step, lsn)
        return CopiedUpdate(head, layout, transfer, room, timed, consumed, held, check)

    def _room(self, window: Window, size_bytes: int) -> Block | None:
        """Reserve memory for gradients; None if there is none, even after kept bases were
        dropped."""
        room = window.pool.acquire_now(max(1, size_bytes))
        if room is None:
            window.pool.drop_kept()  # bases kept in the arena are durable
            room = window.pool.acquire_now(max(1, size_bytes))
        return room

    def _holdable(
        self, key: str, names: frozenset[str]
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return captured parameters and gradients, if no code can write to these without being
        noticed.

        Gradients in shared memory or in memory of CUDA graphs, and those that no backward hook
        announces (FSDP assembles its shards itself), are not held."""
        members = self.consumption.members(key, names)
        found = [(p, gradient) for _, p in members if (gradient := p.grad) is not None]
        guarded = all(p.requires_grad and not is_dtensor(p) for p, _ in found)
        gradients = [gradient for _, gradient in found]
        alone = guarded and own_their_memory(gradients) and not self._graphs.has(gradients)
        return found if alone else None

    def _encode(self, window: Window, update: CopiedUpdate) -> None:
        """Encode an update and check its gradients; in the lane's thread, after its copies."""
        step = update.head.step
        try:
            if not update.transfer.wait(self._timeout_s):
                raise DeadlineError("copying gradients to host memory has hung", step=step)
            update.timed.ended(update.transfer.copied_s)
            assert update.consumed is not None
            update.objects = {UPDATE_OBJECT: encode(update.consumed.about, checked=True)}
            room = update.room
            check = update.check
            into = window.memory[room.offset : room.offset + room.size_bytes]
            if check is not None and (torn := check.torn(into)) is not None:
                raise self._torn(torn, step)
        except Exception as error:
            window.failed = window.failed or as_everstep_error(error, step)
        finally:
            self._partitioner.over(update.timed)
            update.consumed = update.held = update.check = None

    def _torn(self, name: str, step: int) -> AuditError:
        """Return the error of a torn gradient, and warn the first time.

        The program may be correct (it zeroes a gradient by hand, say): only the base fails, and
        from now on updates wait for the copies."""
        error = AuditError(
            f"the gradient of {name} was written to while it was being copied, by code other than "
            "backward or the zero_grad() of an optimizer or module of the state: this base is "
            "taken again, and from now on updates wait for such copies",
            step=step,
            hint='use optimizer.zero_grad(), or method="gockpt", which always waits',
        )
        if self.reported is None:
            self.waits = True
            self.reported = error
            self._warn(error)
        return self.reported

    def _wait(self, transfer: Transfer, end: int) -> None:
        start_s = self._clock.monotonic_s()
        if not transfer.gate(end, self._timeout_s):
            error = DeadlineError("copying gradients to host memory has hung")
            self._abandon(error.message, error)
        self._stall_s["gradients"] += self._clock.monotonic_s() - start_s
