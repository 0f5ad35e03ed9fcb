"""When several ranks take a base that no schedule has, as their logs need one: all at one step.

A log begins at a base, so the first step of a start takes one, on every rank. Later one rank alone
may need it (its memory is half full, it could not record an update); the others learn of that at
one step of :data:`ASK_EVERY`, in an exchange of a few bytes. Until then that rank's log has a hole,
and a resume goes back to before it.
"""

from __future__ import annotations

from everstep.keeper.job import Job

__all__ = ["ASK_EVERY", "Joint"]

ASK_EVERY = 10
"""Steps between two exchanges."""


class Joint:
    """Says at which steps a rank takes a base for the sake of its log.

    Args:
        job: None: it is alone, and takes one when it needs one.
    """

    def __init__(self, job: Job | None) -> None:
        self._job = job
        self._first = 1

    def began(self, step: int) -> None:
        """A start of the job has restored the state of ``step``."""
        self._first = step + 1

    def due(self, step: int, needed: bool) -> bool:
        """Whether a base is taken at the end of ``step``; every rank asks at each of its steps.

        Args:
            needed: by this rank.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        if self._job is None:
            return needed
        since = step - self._first
        if since == 0:
            return True
        if since % ASK_EVERY:
            return False
        return self._job.any_rank(f"end step {step}", needed)
