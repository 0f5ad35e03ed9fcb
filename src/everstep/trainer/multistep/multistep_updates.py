"""Copies what updates consume while a base over several steps is under way (GoCkpt 4.2.1, 4.2.4).

Only for parameters that were captured in a step before: with these gradients the keeper brings them
to the last step. Either the update is over only when they are copied (GoCkpt), or the copies run on
behind it, as long as nobody writes the gradients over (GoCkpt-O; :mod:`.multistep_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from everstep.capture.lanes.batches import Chunks, plan_batches
from everstep.capture.lanes.lane import Lane, Transfer
from everstep.config.options import Options
from everstep.errors import AuditError, DeadlineError, EverstepError
from everstep.link.pool import Block
from everstep.link.save import as_everstep_error
from everstep.seams import Clock
from everstep.state.layout.names import GRADIENT, UPDATE_OBJECT
from everstep.state.training_state import State
from everstep.state.values.objects import encode
from everstep.state.values.tensors import is_dtensor
from everstep.trainer.log.consumed import Consumption
from everstep.trainer.multistep.multistep_choice import Choice
from everstep.trainer.multistep.multistep_gradients import (
    GradientCheck,
    GradientPlaces,
    GraphMemory,
    HeldGradients,
    are_alone,
)
from everstep.trainer.multistep.multistep_window import CopiedUpdate, Window

__all__ = ["GiveUp", "UpdateCopies"]

GiveUp = Callable[[str, EverstepError | None], None]
"""The base that is under way has become void: why, and what is to be reported."""


class UpdateCopies:
    """Of one training process.

    Args:
        choice: measures copies.
        stall_s: seconds that training was held up, by cause; counted here, too.
        give_up: called where a base becomes void.
        tell: called with what the user should know though nothing has failed.

    Attributes:
        consumption: looks at what optimizers consume.
        held: gradients whose copies run on behind their update.
        waits: updates wait for the copies of their gradients.
        told: that a gradient was torn, if one was.
    """

    def __init__(
        self,
        options: Options,
        state: State,
        lane: Lane,
        clock: Clock,
        choice: Choice,
        stall_s: dict[str, float],
        give_up: GiveUp,
        tell: Callable[[EverstepError], None],
    ) -> None:
        self._timeout_s = options.progress_timeout_s
        self._yields = options.method.held_steps > 1
        self._lane = lane
        self._clock = clock
        self._choice = choice
        self._stall_s = stall_s
        self._give_up = give_up
        self._tell = tell
        self._under: CopiedUpdate | None = None
        self._seen_lsn = -1  # of the update that has told what it consumes
        self._places = GradientPlaces()
        self._graphs = GraphMemory()
        self.consumption = Consumption(state)
        self.held = HeldGradients(state, self._wait)
        self.waits = not options.method.overlap_forward
        self.told: AuditError | None = None

    @property
    def under_way(self) -> bool:
        """Whether an update has begun and is not over."""
        return self._under is not None

    def forget(self) -> None:
        """The update that is under way is of no use."""
        if self._under is not None:
            self._choice.over(self._under.timed)
        self._under = None
        self._seen_lsn = -1

    def consumed(self, window: Window, key: str, lsn: int, step: int, *, over: bool) -> None:
        """The gradients of an optimizer are what it is going to consume: begins to copy those of
        captured parameters.

        Args:
            lsn: of the update.
            step: that is under way.
            over: it has consumed them already: a hook that was registered later came last.
        """
        if lsn == self._seen_lsn:
            if self._under is not None:
                self._under.calls += 1  # a closure that is called again: nothing replays that
            return
        self._under = None
        self._seen_lsn = lsn
        names = window.captured.get(key)
        if not names:
            return
        try:
            self._under = self._copy(window, key, names, lsn, step, over)
        except Exception as error:  # which is no reason for training to fail
            ours = as_everstep_error(error, step)
            self._give_up(ours.message, ours)

    def applied(self, window: Window, key: str) -> bool:
        """The update is over: gradients may change, unless their copies run on behind it.

        Returns:
            Whether it can be repeated; otherwise the base was given up.
        """
        under = self._under
        self._under = None
        lsn = self._seen_lsn  # after going back there is another of that number
        self._seen_lsn = -1
        if under is not None:
            if under.calls > 1:
                self._choice.over(under.timed)
                self._give_up(f"{key} calls its closure more than once", None)
                return False
            if under.held is not None:
                size_bytes = under.layout.size_bytes
                self.held.hold(key, under.transfer, size_bytes, under.held, under.check)
            else:
                self._wait(under.transfer, under.layout.size_bytes)
            window.updates.append(under)
            self._lane.run(lambda: self._encode(window, under))
        return window.account(lsn, copied=under is not None)

    def _copy(
        self,
        window: Window,
        key: str,
        names: frozenset[str],
        lsn: int,
        step: int,
        over: bool,
    ) -> CopiedUpdate | None:
        """Begins to copy what an update consumes for captured parameters; None if the window has
        become void, or there is nothing to copy."""
        if not self.consumption.grouped_as_before(key):
            self._give_up(f"the parameters of {key} are in other groups than before", None)
            return None
        consumed = self.consumption.look(key, names)
        gradients = {n: t for n, t in consumed.tensors.items() if n.startswith(GRADIENT)}
        if not gradients and "compressed" not in consumed.about:
            return None
        if consumed.written and over:
            self._give_up(f"gradients of {key} were changed before they could be copied", None)
            return None
        layout = consumed.layout
        room = self._room(window, layout.size_bytes)
        if room is None:
            if window.keeper.lost is None:
                self._choice.too_large()
            self._give_up("there is no host memory for gradients", None)
            return None
        window.rooms.append(room)
        into = window.memory[room.offset : room.offset + room.size_bytes]
        end = room.offset + room.size_bytes
        if consumed.in_host_memory and end > window.pool.touched_bytes:  # pinning takes the pages
            self._lane.run(lambda: window.pool.populate(room))
        held = None
        check = None
        batches = consumed.batches
        if gradients and not self.waits and not consumed.written:
            held = self._alone(key, names)
        if held is not None:
            check = GradientCheck(gradients, layout, lsn, self._places)
            if others := consumed.tensors.keys() - gradients.keys():  # a schedule writes to these
                self._lane.mark(plan_batches(layout, consumed.tensors, others), into)
                batches = plan_batches(layout, consumed.tensors, gradients.keys())
        # What may be held for several steps is less urgent than the part of the next one.
        yielding = held is not None and self._yields
        progress = check.copied if check is not None else lambda end: None
        chunks = Chunks(batches, self._choice.chunk_bytes)
        submit = self._lane.submit_yielding if yielding else self._lane.submit
        transfer = submit(chunks, into, progress)
        timed = self._choice.timed("gradients", layout.size_bytes, yielding=yielding)
        window.watch.gradient_bytes += layout.size_bytes
        if consumed.written:  # by the update, which must not begin before the copy ends
            self._wait(transfer, layout.size_bytes)
        head = window.head(step, lsn)
        return CopiedUpdate(head, layout, transfer, room, timed, consumed, held, check)

    def _room(self, window: Window, size_bytes: int) -> Block | None:
        """Memory for gradients; None if there is none, now that nobody waits for what is kept."""
        room = window.pool.acquire_now(max(1, size_bytes))
        if room is None:
            window.pool.drop_kept()  # durable, all of it
            room = window.pool.acquire_now(max(1, size_bytes))
        return room

    def _alone(
        self, key: str, names: frozenset[str]
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Captured parameters and their gradients; None where these lie in memory that others may
        write to, or no hook would tell of a backward, as FSDP puts its parts together."""
        members = self.consumption.members(key, names)
        found = [(p, gradient) for _, p in members if (gradient := p.grad) is not None]
        guarded = all(p.requires_grad and not is_dtensor(p) for p, _ in found)
        gradients = [gradient for _, gradient in found]
        alone = guarded and are_alone(gradients) and not self._graphs.has(gradients)
        return found if alone else None

    def _encode(self, window: Window, update: CopiedUpdate) -> None:
        """In the lane's thread, behind the copies of an update."""
        step = update.head.step
        try:
            if not update.transfer.wait(self._timeout_s):
                raise DeadlineError("copying gradients hangs", step=step)
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
            self._choice.over(update.timed)
            update.consumed = update.held = update.check = None

    def _torn(self, name: str, step: int) -> AuditError:
        """Somebody has zeroed a gradient by hand, say, which is a good loop: nothing fails but a
        base, and from now on updates wait. Said once."""
        error = AuditError(
            f"the gradient of {name} was written to while it was being copied, and not by the "
            "zero_grad() of an optimizer or module of the state, or a backward: this base begins "
            "anew, and from now on updates wait for such copies",
            step=step,
            hint='optimizer.zero_grad(); or method="gockpt", which always waits',
        )
        if self.told is None:
            self.waits = True
            self.told = error
            self._tell(error)
        return self.told

    def _wait(self, transfer: Transfer, end: int) -> None:
        start_s = self._clock.monotonic_s()
        if not transfer.gate(end, self._timeout_s):
            error = DeadlineError("copying gradients hangs")
            self._give_up(error.message, error)
        self._stall_s["gradients"] += self._clock.monotonic_s() - start_s
