"""Updates of optimizers of classes that nobody here knows."""

from __future__ import annotations

from pathlib import PurePath

from everstep.errors import MismatchError, ReplayError

__all__ = ["UnknownClassError"]


class UnknownClassError(ReplayError):
    """What an update has done nobody here can know: the log names another class for it than the
    optimizer has, and that is not at hand.

    Attributes:
        optimizer: its key in the state.
    """

    def __init__(self, message: str, *, step: int, optimizer: str) -> None:
        super().__init__(message, step=step)
        self.optimizer = optimizer

    def refused(self, before: int, path: PurePath) -> MismatchError:
        """The error where no step may be left out.

        Args:
            before: the step that can be gone on from all the same.
            path: of the base.
        """
        return MismatchError(
            f"from step {self.step} on the log cannot be replayed: {self.message}",
            mismatches=((self.optimizer, "updates of a class that is not known here"),),
            step=self.step,
            path=path,
            hint="declare that class here, too (everstep.replay.exactness.declare): it replays its "
            "log then; or resume() once with an optimizer of that class, and save(); or "
            f"resume(strict=False) to go on from step {before}",
        )
