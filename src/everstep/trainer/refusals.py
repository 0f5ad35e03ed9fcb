"""The end of a method that refuses an update while training runs.

A log and a base over several steps refuse some updates only when they happen: sparse gradients,
gradients that share memory, an ``optimizer.step()`` that is compiled. And a loop that clamps
weights outside of its optimizers needs a base in each step. With a method that the user has given,
the first is an error, and the second the user's choice. A method that was chosen automatically is
given up instead: a base of that step is taken, and lazy bases go on. The reason is emitted, so that
no later start of the run chooses that method.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from everstep.errors import EverstepError, UnsupportedStateError
from everstep.link import BackgroundChannel

_WRITTEN_MAX = 4  # steps, each of which costs a base
_WRITTEN_WITHIN = 16


class Refusals:
    """Updates that the method refuses while training runs: errors, or the end of its log.

    Args:
        report: called once with the reason, if the method was chosen automatically; None if the
            user has given it: refusals are errors then.

    Attributes:
        why: reason why nothing is logged any more; empty as long as all is.
    """

    def __init__(
        self, channel: BackgroundChannel, report: Callable[[str], None] | None = None
    ) -> None:
        self._channel = channel
        self._report = report
        self._written = deque[int](maxlen=_WRITTEN_MAX)  # newest steps with such writes
        self.why = ""

    @property
    def is_over(self) -> bool:
        """True if an update was refused, and nothing is logged any more."""
        return bool(self.why)

    @property
    def are_errors(self) -> bool:
        """True if the user has given the method."""
        return self._report is None

    def post(
        self,
        error: EverstepError,
        kinds: tuple[type[EverstepError], ...] = (UnsupportedStateError,),
    ) -> None:
        """Post an error, or end the log if it is a refusal: of one of the ``kinds``."""
        if self.are_errors or not isinstance(error, kinds):
            self._channel.post(error)
        else:
            self.end(in_one_line(error), error.step)

    def written(self, step: int, why: str) -> None:
        """Count a step with writes that the log lacks; end the log if there are many."""
        steps = self._written
        if step not in steps:
            steps.append(step)
        often = len(steps) == _WRITTEN_MAX and abs(step - steps[0]) < _WRITTEN_WITHIN
        if self._report is not None and often:
            self.end(f"{why}, in {_WRITTEN_MAX} of {step - steps[0] + 1} steps", step)

    def end(self, why: str, step: int | None) -> None:
        """End the log, here or on another rank, with a notice."""
        if self.why or self._report is None:
            return
        self.why = why
        self._report(why)
        self._channel.post_notice(
            UnsupportedStateError(
                f"method='auto' records no gradients any more, and goes on with bases alone: {why}",
                leaves=(),
                step=step,
                hint='method="lazy", every="auto" does so from the start',
            )
        )


def in_one_line(error: EverstepError) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(error.message.split())
