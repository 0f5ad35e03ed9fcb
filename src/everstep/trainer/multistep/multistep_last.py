"""The last step mark of a base over several steps: what its keeper is told, and when its gradients
are needed no more."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.link.assembly import Assembly
from everstep.link.capture import Capture
from everstep.seams.failpoints import failpoint
from everstep.state.survey.survey import Survey
from everstep.trainer.multistep.multistep_choice import Timed
from everstep.trainer.multistep.multistep_fuzzy import fuzzy_parts, spots_at_mark
from everstep.trainer.multistep.multistep_window import Window

__all__ = ["Last"]


class Last:
    """Of one window, whose last part is about to be copied.

    Args:
        begin: number of the first part that is not captured yet.
        survey: of the state at the mark.
        fuzzy: whoever restores the base makes it whole.
    """

    def __init__(self, window: Window, begin: int, survey: Survey, *, fuzzy: bool) -> None:
        self._window = window
        self._fuzzy = fuzzy
        plan = window.plan
        step = window.identity.step
        if fuzzy:
            self._spots = spots_at_mark(plan.captured(begin), survey.tensors, step)
        else:
            self._samples = plan.samples(begin, survey.tensors)

    def tell(self, timed: Timed, capture: Capture, objects: Mapping[str, bytes]) -> None:
        """All is there: tells the keeper of it, in the lane's thread.

        Args:
            timed: the copy of the last part.

        Raises:
            EverstepError: something of it is not what it should be.
        """
        window = self._window
        fuzzy = self._fuzzy
        timed.ended()
        if window.failed is not None:
            raise window.failed
        failpoint("window.before_assemble")
        window.told = True
        left = None
        if fuzzy:
            memory = window.pool.arena.view[window.room.offset :]
            left = fuzzy_parts(capture.plan, memory, objects, window.seen, self._spots)
            window.tie_updates()
        updates = window.partial_updates(all_of_them=fuzzy)
        samples = () if fuzzy else self._samples
        assembly = Assembly(window.digest, updates, samples, left)
        window.keeper.assemble(capture, objects, assembly, self._rebuilt)
        failpoint("window.after_assemble")

    def left(self) -> None:
        """Nothing is copied any more, in the lane's thread: if the keeper was not told, it never
        will be."""
        if not self._window.told:
            self._window.release_updates()

    def ended(self) -> None:
        """The base is durable, or has failed."""
        if self._window.told:
            self._window.release_updates()

    def _rebuilt(self, whole: bool) -> None:
        window = self._window
        window.whole = whole
        window.release_updates()
        if whole:
            window.pool.drop_kept()  # this one is newer, and survives as they did
