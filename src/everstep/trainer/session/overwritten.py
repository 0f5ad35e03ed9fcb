"""Whether the live state is that of any step: a resume that fails half-way leaves a mixture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import PurePath

from everstep.errors import RecoveryError, StateError
from everstep.restore.start.resume import Resumed

__all__ = ["Overwritten"]


class Overwritten:
    """Follows what resumes do to the live state (adr/006).

    Attributes:
        partly: it was overwritten in part, and is that of no step.
    """

    def __init__(self) -> None:
        self.partly = False
        self._before = False
        self._touches = 0

    @contextlib.contextmanager
    def resuming(self) -> Iterator[None]:
        """Around a resume, which calls :meth:`touch`; :meth:`restored` comes behind it."""
        self._before = self.partly
        self.partly = False
        self._touches = 0
        try:
            yield
        except BaseException:
            self.partly = self.partly or self._before
            raise

    def touch(self) -> None:
        """The live state is going to be overwritten."""
        self.partly = True  # until everything is restored
        self._touches += 1

    def restored(self, resumed: Resumed, run: PurePath) -> None:
        """A resume has ended well.

        Raises:
            RecoveryError: the base that it took does not cover what a damaged one has left.
        """
        loaded = resumed.loaded
        if self.partly and loaded is not None and loaded.mismatches and self._touches > 1:
            raise RecoveryError(
                "a damaged base was read half-way into the live state, and the older one that "
                f"was used instead leaves {len(loaded.mismatches)} part(s) of it out",
                step=loaded.marker.step,
                path=run,
                hint="build the model and optimizer again, then resume",
            )
        self.partly = self._before and loaded is None

    def check(self) -> None:
        """Raises:
        StateError: the state in memory is that of no step.
        """
        if self.partly:
            raise StateError(
                "the state in memory was partly overwritten by a resume that failed; it is not "
                "that of any step",
                hint="resume() another base, or build the model again",
            )
