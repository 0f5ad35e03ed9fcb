"""What the user holds of a base under way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from everstep.errors import AuditError, EverstepError
from everstep.seams.processes.conditions import Outcome

__all__ = [
    "Save",
    "as_everstep_error",
    "changed_during_copy_error",
    "complete",
    "copy_outcome",
    "fail",
    "failing_save",
]

_T = TypeVar("_T")


@dataclass(slots=True)
class Save:
    """A base that was asked for.

    Attributes:
        step: the user's step that it holds.
        timeline: the timeline that it is written to.
        staged: done when the state has been captured: from then on training may change it.
        parked: it is to stay in memory, and becomes durable only if it is asked for again.
        in_memory: it lives in the memory of keepers only; ``durable`` is done when it does.
        durable: done when the base is committed: it survives the machine. Its result is the
            base's size in bytes; it carries the exception if the base failed.
    """

    step: int
    timeline: int
    staged: Future[None] = field(default_factory=Outcome)
    durable: Future[int] = field(default_factory=Outcome)
    parked: bool = False
    in_memory: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, or was withdrawn."""
        future = self.durable
        return future.done() and (future.cancelled() or future.exception() is not None)


def complete(future: Future[_T], result: _T) -> None:
    """Sets a result, unless another thread was faster, or whoever asked has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def fail(future: Future[_T], error: BaseException) -> None:
    """Sets an exception, as :func:`complete` sets a result; without its traceback, which would keep
    what was in use where it was raised: memory of a keeper that is gone, say."""
    error.__traceback__ = None
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def copy_outcome(save: Save, other: Save) -> None:
    """What becomes of ``other`` becomes of ``save``."""
    other.staged.add_done_callback(functools.partial(_pass_on, save.staged))
    other.durable.add_done_callback(functools.partial(_pass_on, save.durable))


def _pass_on(future: Future[_T], ended: Future[_T]) -> None:
    if ended.cancelled():
        future.cancel()
    elif (error := ended.exception()) is not None:
        fail(future, error)
    else:
        complete(future, ended.result())


@dataclass(slots=True)
class failing_save:  # noqa: N801 - a context manager; one made of a generator takes three times as long
    """Whoever waits for ``save`` hears what fails inside; it goes to ``post``, and no further.
    Anything else, an interrupt or a mistake, cancels the save, and goes on to the caller."""

    save: Save
    post: Callable[[EverstepError], object]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, EverstepError):
            fail(self.save.staged, error)
            fail(self.save.durable, error)
            self.post(error)
            return True
        if error is not None:
            self.save.staged.cancel()
            self.save.durable.cancel()
        return False


def changed_during_copy_error(name: str, step: int) -> AuditError:
    """The error that an entry is not what its step left behind."""
    return AuditError(
        f"{name!r} was changed while it was being copied, and not by an optimizer's step()",
        step=step,
        hint="call ckpt.before_update() before such changes and ckpt.after_update() after them "
        '(averaged weights swapped in for an evaluation, CUDA graphs), or use method="async"',
    )


def as_everstep_error(error: BaseException, step: int | None) -> EverstepError:
    """What went wrong while the state was copied, as an error of this library."""
    if isinstance(error, EverstepError):
        return error
    ours = EverstepError(f"internal error while the state was copied: {error!r}", step=step)
    ours.__cause__ = error
    return ours
