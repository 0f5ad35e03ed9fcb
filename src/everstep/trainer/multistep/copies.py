"""Copies of a window: parts of the state, and the gradients that updates consume (GoCkpt, sections
4.2.1, 4.2.2 and 4.2.4).

Each part is copied during the forward and backward of one step, and updates wait for it (I1).
Gradients are copied for parameters captured in an earlier step: the keeper brings these to the last
step with them. Either the update ends only when they are copied (GoCkpt), or the copies continue
after it, as long as nothing writes to the gradients (GoCkpt-O; :mod:`.held_gradients`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from everstep.capture import Batch, Chunks, Transfer, plan_batches
from everstep.errors import AuditError, DeadlineError
from everstep.link import as_everstep_error
from everstep.link.pool import Block
from everstep.link.save import changed_during_copy_error
from everstep.seams.processes import wait_done
from everstep.state.layout import GRADIENT
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.values.objects import encode
from everstep.state.values.tensors import is_dtensor
from everstep.trainer.base import PlannedCopies, Saver
from everstep.trainer.log import HeldRecords, InputReader, LogMemory, UpdateInputs
from everstep.trainer.multistep.held_gradients import (
    CopyGate,
    GradientCheck,
    GraphMemory,
    HeldGradients,
    own_their_memory,
)
from everstep.trainer.multistep.partition import Partitioner, TimedCopy
from everstep.trainer.multistep.window import CopiedUpdate, Window, WindowVoid
from everstep.trainer.participant import TrainingContext


@dataclass(eq=False, slots=True)
class _PartCopy:
    """Copy of a part in progress.

    Attributes:
        window: window of the part.
        transfer: the copy.
        ends: bytes of the block that must be copied before an optimizer may update, by its key.
        end: offset of the end of the part, in bytes.
        done: True when it was copied and checked.
    """

    window: Window
    transfer: Transfer
    ends: Mapping[str, int]
    end: int
    done: bool = False


@dataclass(eq=False, slots=True)
class _PendingUpdate:
    """Update whose gradients are being copied.

    Attributes:
        window: window that needs them.
        key: key of the optimizer.
        update: the update, as the window keeps it.
        transfer: the copies.
        timed: measurement of the copies.
        inputs: inputs of the update; None after the copy, so that gradients are not kept longer.
        held: parameters and gradients, if the copies may continue after the update.
        check: check of these gradients.
        calls: number of calls of the optimizer's closure.
    """

    window: Window
    key: str
    update: CopiedUpdate
    transfer: Transfer
    timed: TimedCopy
    inputs: UpdateInputs | None
    held: Sequence[tuple[torch.Tensor, torch.Tensor]] | None
    check: GradientCheck | None
    calls: int = 1


class WindowCopies:
    """Copies of the windows of one process: parts of the state, and gradients.

    Args:
        saver: counts the time that training waits.
        partitioner: measures copies.
        log: records of the gradient log, which serve the windows; None without a log.

    Attributes:
        partitioner: measures copies.
        consumption: collects the inputs of updates.
        held: gradients whose copies continue after their update.
        waits: updates wait for the copies of their gradients.
        reported: error of the first torn gradient; None if there was none.
    """

    def __init__(
        self,
        context: TrainingContext,
        saver: Saver,
        partitioner: Partitioner,
        log: LogMemory | None = None,
    ) -> None:
        options = context.options
        self._held_steps = options.method.held_steps
        self._lane = context.lane
        self._log = log
        self._gate = CopyGate(saver, options.progress_timeout_s)
        self._channel = context.channel
        self._copying: list[_PartCopy] = []
        self._pending: _PendingUpdate | None = None
        self._seen_lsn = -1  # of the last update whose inputs were collected
        self._graphs = GraphMemory()
        self.partitioner = partitioner
        self.consumption = InputReader(context.state)
        self.held = HeldGradients(context.state, self._gate)
        self.waits = not options.method.overlap_forward
        self.reported: AuditError | None = None

    @property
    def open(self) -> bool:
        """Return True if an update may have to wait for copies of parts or gradients."""
        return bool(self._copying) or self.held.open

    def gate(self, optimizer: str | None) -> None:
        """Block an update until the parts it will change, and all gradients but those of the last
        ``held_steps`` updates, are copied.

        Args:
            optimizer: key of the optimizer about to update; None if anything may be updated.
        """
        for one in self._copying:
            # A window that has failed is void: no update waits for the rest of its copies.
            if not one.done and one.window.failed is None:
                end = one.end if optimizer is None else one.ends.get(optimizer, 0)
                self._gate.wait(one.window, one.transfer, end, "gate")
        # The gradients of the update that begins now may be held as well, so one fewer of the
        # earlier updates may still be in flight.
        self.held.gate(optimizer, keep=0 if optimizer is None else self._held_steps - 1)

    def hold_records(self) -> HeldRecords | None:
        """Return the records of the log from now on, for a window that begins; None without a
        log."""
        return None if self._log is None else self._log.hold()

    def prune(self) -> None:
        """Forget completed copies of parts."""
        if self._copying:
            self._copying = [one for one in self._copying if not one.done]

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Run a function in the lane's thread, after all copies and checks queued so far."""
        return self._lane.run(job)

    def await_checks(self, window: Window) -> None:
        """Wait for all copies of a window, and their checks."""
        # A check runs on the lane after its copies, so an empty job after them all is enough.
        self.held.gate()
        if not wait_done(self.run(lambda: None), self._gate.timeout_s):
            late = "copying the state to host memory has hung"
            window.fail(DeadlineError(late, step=window.identity.step))

    def abandon(self, window: Window) -> None:
        """Let nothing wait for the copies of an abandoned window; release its memory."""
        self._copying = [one for one in self._copying if one.window is not window]
        # On the lane, after copies that were begun: until then they write into this memory.
        self.run(window.release)

    # --- Parts of the state -------------------------------------------------------------

    def submit_part(self, window: Window, copies: PlannedCopies, size_bytes: int) -> None:
        """Begin to copy a part; it is checked in the lane's thread afterwards."""
        # Before the copies begin: whatever is written from now on must differ from the sample.
        sample = None if copies.check is None else copies.check.take()
        # Not read later: the window has moved to another mark when the check runs.
        step = window.identity.step
        timed = self.partitioner.timed(size_bytes)
        transfer = self._lane.submit(copies.batches, window.block, lambda end: None)
        one = _PartCopy(window, transfer, copies.ends, copies.end)
        self._copying.append(one)

        def check() -> None:
            try:
                if not transfer.wait(self._gate.timeout_s):
                    raise DeadlineError("copying the state to host memory has hung", step=step)
                timed.ended(transfer.copied_s)
                if copies.check is not None and sample is not None:
                    torn = copies.check.differing(sample, window.block)
                    if torn is not None:
                        raise changed_during_copy_error(torn, step)
            except Exception as error:
                # The training thread abandons the window at its next update or mark: only there is
                # no copy of it being submitted.
                window.fail(as_everstep_error(error, step))
            finally:
                # Also after a failure: no update may wait for this part any more.
                one.done = True

        self.run(check)

    # --- Gradients ----------------------------------------------------------------------

    @property
    def update_under_way(self) -> bool:
        """Return True if an update has begun and not ended."""
        return self._seen_lsn >= 0

    def forget_update(self) -> None:
        """Forget the update in progress."""
        if self._pending is not None:
            self.partitioner.over(self._pending.timed)
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

        Raises:
            WindowVoid: the update cannot be replayed, or there is no memory for its gradients.
        """
        # A closure that is called again reports the same update again.
        if lsn == self._seen_lsn:
            if self._pending is not None:
                self._pending.calls += 1  # a closure called again cannot be replayed
            return
        self._pending = None
        self._seen_lsn = lsn
        names = window.captured.get(key)
        if not names or window.logged is not None:  # the log copies them
            return
        # All records of a window carry the digest of the groups at its beginning.
        if not self.consumption.grouped_as_before(key):
            raise WindowVoid(f"the parameters of {key} moved to other parameter groups")
        inputs = self.consumption.look(key, names)
        gradients = {n: t for n, t in inputs.tensors.items() if n.startswith(GRADIENT)}
        if not gradients and "compressed" not in inputs.about:
            return
        if inputs.written and over:
            raise WindowVoid(
                f"optimizer {key} writes to its gradients, which were seen only after that"
            )
        room = self._reserve(window, inputs)
        update = CopiedUpdate(window.head(step, lsn), inputs.layout, room)
        # Copies that go on during the update would be torn by an optimizer that writes to its
        # gradients.
        held = None
        if gradients and not self.waits and not inputs.written:
            held = self._holdable(key, names)
        self._pending = pending = self._submit(window, key, update, inputs, gradients, held)
        window.costs.gradient_bytes += inputs.layout.size_bytes
        if inputs.written:  # the update must not begin before the copy ends
            self._gate.wait(window, pending.transfer, inputs.layout.size_bytes, "gradients")

    def applied(self, window: Window) -> None:
        """End an update: gradients may change now, unless their copies continue.

        Raises:
            WindowVoid: it cannot be replayed.
        """
        pending = self._pending
        self._pending = None
        lsn = self._seen_lsn  # cleared: after a rewind another update has the same number
        self._seen_lsn = -1
        if pending is None:
            window.account(lsn)
            return
        if pending.calls > 1:
            self.partitioner.over(pending.timed)
            raise WindowVoid(f"optimizer {pending.key} called its closure more than once")
        transfer = pending.transfer
        size_bytes = pending.update.layout.size_bytes
        if pending.held is not None:
            self.held.hold(window, pending.key, transfer, size_bytes, pending.held, pending.check)
        else:
            # Once this returns the program may zero the gradients, or add to them.
            self._gate.wait(window, transfer, size_bytes, "gradients")
        # Before it is accounted for: the window may be found void there, and the measurement of the
        # copies must end all the same.
        self._lane.run(lambda: self._encode(pending))
        window.account(lsn, pending.update)

    def _reserve(self, window: Window, inputs: UpdateInputs) -> Block:
        """Reserve memory for gradients.

        Raises:
            WindowVoid: there is none, even after kept bases were dropped.
        """
        size_bytes = max(1, inputs.layout.size_bytes)
        room = window.pool.acquire_now(size_bytes)
        if room is None:
            window.pool.drop_kept()  # bases kept in the arena are durable
            room = window.pool.acquire_now(size_bytes)
        if room is None:
            # The pool of a lost keeper hands out nothing, which does not mean that the parts are
            # too large.
            if window.keeper.lost is None:
                self.partitioner.too_large()
            raise WindowVoid("there is no host memory left for gradients")
        # Listed before its copies begin: if the window is abandoned, this list is what is released.
        window.rooms.append(room)
        # For device copies, pinning has touched the pages.
        end = room.offset + room.size_bytes
        if inputs.in_host_memory and end > window.pool.touched_bytes:
            self._lane.run(lambda: window.pool.populate(room))
        return room

    def _submit(
        self,
        window: Window,
        key: str,
        update: CopiedUpdate,
        inputs: UpdateInputs,
        gradients: Mapping[str, torch.Tensor],
        held: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    ) -> _PendingUpdate:
        """Begin to copy the inputs of an update."""
        layout = inputs.layout
        into = window.memory_of(update.room)
        batches: Sequence[Batch] = inputs.batches
        check = None
        if held is not None:
            check = GradientCheck(gradients, layout, update.head.lsn)
            # Other tensors (learning rates) are written by schedulers: copied now, not held.
            if others := inputs.tensors.keys() - gradients.keys():
                self._lane.copy_now(plan_batches(layout, inputs.tensors, others), into)
                batches = plan_batches(layout, inputs.tensors, gradients.keys())
        # Gradients held for several steps are less urgent than the part of the next step.
        yielding = held is not None and self._held_steps > 1
        submit = self._lane.submit_yielding if yielding else self._lane.submit
        # The version counters are read as soon as the gradients are copied: later writes are
        # allowed.
        progress = check.copied if check is not None else lambda end: None
        transfer = submit(Chunks(batches, self.partitioner.chunk_bytes), into, progress)
        timed = self.partitioner.timed(layout.size_bytes, yielding=yielding)
        return _PendingUpdate(window, key, update, transfer, timed, inputs, held, check)

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

    def _encode(self, pending: _PendingUpdate) -> None:
        """Encode an update and check its gradients; in the lane's thread, after its copies."""
        update = pending.update
        step = update.head.step
        try:
            if not pending.transfer.wait(self._gate.timeout_s):
                raise DeadlineError("copying gradients to host memory has hung", step=step)
            pending.timed.ended(pending.transfer.copied_s)
            assert pending.inputs is not None
            update.objects = {UPDATE_OBJECT: encode(pending.inputs.about, checked=True)}
            check = pending.check
            into = pending.window.memory_of(update.room)
            if check is not None and (torn := check.torn(into)) is not None:
                raise self._torn(torn, step)
        except Exception as error:
            pending.window.fail(as_everstep_error(error, step))
        finally:
            self.partitioner.over(pending.timed)
            pending.inputs = pending.held = pending.check = None

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
            self._channel.post_notice(error)
        # Later errors are the same object, by which handles_torn_base() knows that a warning was
        # given.
        return self.reported
