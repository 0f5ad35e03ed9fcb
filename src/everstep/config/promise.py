"""A promise instead of options: how much training a failure may cost, and which failure.

::

    Checkpointer("runs/a", state, lose_at_most="1 step", even_if="power")

:mod:`everstep.trainer.job.promised` chooses the options that keep it, and
:mod:`everstep.trainer.session.promise` lets training wait at the end of a step until it is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.config.given import UNITS_S, amount_of, one_of
from everstep.errors import OptionError

_STEPS = re.compile(r"\s*(\d+)\s*steps?\s*")
_EXAMPLES = 'lose_at_most="1 step", "10 steps", "30s" or "10min"'
_FAILURES = ("process", "power", "node", "rack")


@dataclass(frozen=True, slots=True)
class Promise:
    """Bound on the training that a failure may cost.

    Attributes:
        steps: steps that have to be trained again, with the one in flight; None if it is a time.
        seconds: training time that is lost; None if it is a number of steps.
        even_if: failure.
        holder: place that has to hold a step before it counts as safe: ``"keeper"``, ``"disk"``,
            ``"peer"`` or ``"store"``; empty until it is chosen.
        places: for the last two: names of the places for copies that survive the failure.
    """

    steps: int | None
    seconds: float | None
    even_if: str
    holder: str = ""
    places: tuple[str, ...] = ()

    @classmethod
    def parse(cls, lose_at_most: object, even_if: object) -> Promise | None:
        """Parse the arguments of a Checkpointer; None: there is no promise.

        Raises:
            OptionError: one of them is invalid, or ``even_if`` is given alone.
        """
        if lose_at_most is None:
            if even_if is not None:
                raise OptionError(
                    f"even_if={even_if!r} needs lose_at_most=",
                    hint=f"{_EXAMPLES} with even_if={even_if!r}",
                )
            return None
        failure = "process" if even_if is None else even_if
        one_of("even_if", failure, _FAILURES)
        text = lose_at_most if isinstance(lose_at_most, str) else ""
        if match := _STEPS.fullmatch(text):
            steps = int(match[1])
            if steps < 1:
                raise OptionError(
                    f"lose_at_most={lose_at_most!r}: the step in flight is always lost",
                    hint='lose_at_most="1 step"',
                )
            return cls(steps, None, str(failure))
        seconds = amount_of(text, UNITS_S)
        if not seconds:
            raise OptionError(
                f"lose_at_most={lose_at_most!r} is neither a number of steps nor a time",
                hint=_EXAMPLES,
            )
        return cls(None, seconds, str(failure))

    @property
    def in_words(self) -> str:
        """The promise as text, e.g. ``"at most 10 steps are lost, even if a node dies"``."""
        if self.seconds is not None:
            amount = f"{self.seconds:g} s of training"
        else:
            amount = "1 step" if self.steps == 1 else f"{self.steps} steps"
        dies = {
            "process": "training processes die",
            "power": "the machines lose power",
            "node": "a node dies with its disks",
            "rack": "a rack dies with its disks",
        }[self.even_if]
        is_or_are = "is" if self.steps == 1 else "are"
        return f"at most {amount} {is_or_are} lost, even if {dies}"
