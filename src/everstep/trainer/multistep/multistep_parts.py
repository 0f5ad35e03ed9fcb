"""Copies the parts of a base over several steps, and holds updates back until they are copied (I1).

Each part is copied behind the forward and backward of one step.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.capture.lanes.lane import Lane
from everstep.config.options import Options
from everstep.errors import DeadlineError, EverstepError
from everstep.link.save import as_everstep_error, changed_during_copy_error
from everstep.seams import Clock
from everstep.trainer.base.prepared import Copies
from everstep.trainer.multistep.multistep_choice import Choice
from everstep.trainer.multistep.multistep_window import Copying, Window

__all__ = ["PartCopies"]


class PartCopies:
    """Of one training process.

    Args:
        choice: measures copies.
        stall_s: seconds that training was held up, by cause; counted here, too.
        overtaken: told of a base whose copy took too long: the update goes on.
    """

    def __init__(
        self,
        options: Options,
        lane: Lane,
        clock: Clock,
        choice: Choice,
        stall_s: dict[str, float],
        overtaken: Callable[[Window, EverstepError], None],
    ) -> None:
        self._timeout_s = options.progress_timeout_s
        self._lane = lane
        self._clock = clock
        self._choice = choice
        self._stall_s = stall_s
        self._overtaken = overtaken
        self._copying: list[Copying] = []

    def submit(self, window: Window, copies: Copies, size_bytes: int) -> None:
        """Begins to copy a part, and looks at the end whether it was copied right."""
        sample = None if copies.check is None else copies.check.take()
        step = window.identity.step
        timed = self._choice.timed("part", size_bytes)
        transfer = self._lane.submit(copies.batches, window.block, lambda end: None)
        end = copies.end
        copying = Copying(window, transfer, copies.ends, end)
        self._copying.append(copying)

        def look() -> None:
            try:
                if not transfer.wait(self._timeout_s):
                    raise DeadlineError("copying the state hangs", step=step)
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
        """Holds an update back until what it is going to change has been copied.

        Args:
            optimizer: key of the optimizer that updates; None: anything may be updated.
        """
        if not self._copying:
            return
        start_s = self._clock.monotonic_s()
        for one in self._copying:
            end = one.end if optimizer is None else one.ends.get(optimizer, 0)
            if not one.done and not one.transfer.gate(end, self._timeout_s):
                # Training goes on; the copy that it overtakes is worth nothing.
                late = f"copying the state took longer than {self._timeout_s:g} s"
                error = DeadlineError(late, step=one.window.identity.step)
                one.done = True
                one.window.failed = one.window.failed or error
                self._overtaken(one.window, error)
        self._stall_s["gate"] += self._clock.monotonic_s() - start_s

    @property
    def open(self) -> bool:
        """Whether some may be under way."""
        return bool(self._copying)

    def prune(self) -> None:
        """Forgets what is copied."""
        if self._copying:
            self._copying = [one for one in self._copying if not one.done]

    def forget(self, window: Window) -> None:
        """Nobody waits for the copies of a base that has become void."""
        self._copying = [one for one in self._copying if one.window is not window]
