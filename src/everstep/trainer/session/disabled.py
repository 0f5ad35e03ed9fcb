"""A session that does nothing, for programs that run without checkpoints: ``EVERSTEP_DISABLE=1``.

It starts no keeper, installs no hooks and no signal handlers, meets no other ranks, and does not
look at the run folder. It only counts steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.config.options import DISABLE_VARIABLE
from everstep.errors import RecoveryError
from everstep.link import Save
from everstep.link.save import complete
from everstep.restore.start import Recovery
from everstep.seams import SystemClock
from everstep.seams.group import own_rank
from everstep.seams.progress import log_or_print
from everstep.trainer.base import STALL_CAUSES
from everstep.trainer.session.preemption import PreemptionHandler
from everstep.trainer.session.stats import Stats

if TYPE_CHECKING:
    from everstep.convert.initial import InitialState

_Result = TypeVar("_Result")


class DisabledSession:
    """Stand-in for a :class:`~everstep.trainer.session.session.Session`. Prints one line on rank 0.

    Args:
        run: run folder, for messages.
        values: the user's state dict, for initial weights.

    Attributes:
        at: number of steps that were ended; the timeline is always 0.
    """

    keeper_is_needed = False

    def __init__(self, run: PurePath, values: Mapping[str, Any]) -> None:
        self._run = run
        self._values = values
        self.at = _Position()
        self.is_open = True
        self.preemption = PreemptionHandler(None, SystemClock())
        self.watch = _Unwatched()
        if own_rank() == 0:
            log_or_print(
                f"{run}: checkpointing is disabled by {DISABLE_VARIABLE}: training "
                "starts at step 0, and nothing is saved"
            )

    @property
    def in_words(self) -> str:
        """Settings and step, for ``repr``."""
        return f"disabled by {DISABLE_VARIABLE}; at step {self.at.step}"

    def resume(
        self, step: int | None, *, strict: bool, initial: InitialState | None = None
    ) -> Recovery:
        """Leave the state as the program made it; load initial weights.

        Raises:
            RecoveryError: The state of a step is needed that only a base could give.
        """
        if step or self.at.step:
            wanted = "an earlier state" if step is None else f"step {step}"
            raise RecoveryError(
                f"{wanted} cannot be restored: checkpointing is disabled by {DISABLE_VARIABLE}",
                step=self.at.step,
                path=self._run,
                hint=f"unset {DISABLE_VARIABLE}",
            )
        recovery = Recovery(
            step=0,
            exact=True,
            evidence="nothing to restore",
            source="fresh",
            base_step=None,
            replayed=0,
            seconds=0.0,
            size_bytes=0,
            timeline=0,
            notes=(
                f"checkpointing is disabled by {DISABLE_VARIABLE}: training starts at step 0 even "
                f"if {self._run} has steps, and nothing is saved",
            ),
        )
        if initial is None:
            return recovery
        return initial.load(self._values, strict=strict).told(recovery)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Count a step."""
        self.at.step += 1

    def save(self, metrics: Mapping[str, float], note: str) -> Save:
        """Return a :class:`Save` that says that there is no base."""
        save = Save(self.at.step, 0, disabled=True)
        complete(save.staged, None)
        complete(save.durable, 0)
        return save

    def audited(self, compute: Callable[[], _Result], fraction: float) -> _Result:
        """Compute the gradients; nothing is audited."""
        return compute()

    def wait(self, timeout_s: float | None) -> None:
        """Return at once: there is nothing to wait for."""

    def release(self, *, stay: bool = False) -> None:
        """Close the session."""
        self.is_open = False

    close = release

    def stats(self) -> Stats:
        """Return the number of steps; everything else is 0 or unknown."""
        return Stats(
            step=self.at.step,
            durable_step=None,
            lag_steps=None,
            saves=0,
            committed=0,
            failed=0,
            stall_s=dict.fromkeys(STALL_CAUSES, 0.0),
            written_bytes=0,
            persist_s=0.0,
            host_bytes=0,
        )


@dataclass(slots=True)
class _Position:
    step: int = 0
    timeline: int = 0


class _Unwatched:
    """Stand-in for the watch of a state that nothing is saved of."""

    def begin_change(self) -> None:
        """Do nothing."""

    def changed(self, declared: Sequence[str]) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""
