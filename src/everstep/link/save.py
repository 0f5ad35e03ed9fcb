"""Handle of a base in progress, as the user holds it, and helpers to complete its futures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from everstep.errors import AuditError, EverstepError
from everstep.format import ShardIdentity
from everstep.seams.processes import Outcome

_T = TypeVar("_T")


@dataclass(slots=True)
class Save:
    """A base that was requested.

    Attributes:
        step: the user's step that it holds.
        timeline: the timeline that it is written to.
        staged: done when the state was captured: from then on training may change it.
        durable: done when the base is committed and survives the machine. The result is the size of
            the base in bytes; the exception is the reason of a failure.
        parked: True if it stays in memory, and becomes durable only on another request.
        in_memory: True if it lives in the memory of keepers only; ``durable`` then means that.
        disabled: True if checkpointing is disabled: there is no base, and both futures are done at
            once. The result of ``durable`` is then 0 bytes.
    """

    step: int
    timeline: int
    staged: Future[None] = field(default_factory=Outcome)
    durable: Future[int] = field(default_factory=Outcome)
    parked: bool = False
    in_memory: bool = False
    disabled: bool = False

    @property
    def is_lost(self) -> bool:
        """True if the base has failed or was withdrawn."""
        future = self.durable
        return future.done() and (future.cancelled() or future.exception() is not None)

    @property
    def is_durable(self) -> bool:
        """True if the base is committed."""
        return self.durable.done() and not self.is_lost and not self.disabled

    @property
    def is_staged(self) -> bool:
        """True if the state was captured without an error."""
        future = self.staged
        done = future.done() and not future.cancelled() and future.exception() is None
        return done and not self.disabled

    def is_of(self, identity: ShardIdentity) -> bool:
        """Return True if it is a base of the same step of the same timeline."""
        return (self.timeline, self.step) == (identity.timeline, identity.step)


def complete(future: Future[_T], result: _T) -> None:
    """Set a result, unless another thread was faster or the requester has cancelled the future."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def fail(future: Future[_T], error: BaseException) -> None:
    """Set an exception, unless the future is done."""
    # The traceback would keep the objects of its frames alive: a lost keeper's memory, say.
    error.__traceback__ = None
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def copy_outcome(save: Save, other: Save) -> None:
    """Complete the futures of ``save`` as those of ``other``."""
    other.staged.add_done_callback(functools.partial(_pass_on, save.staged))
    other.durable.add_done_callback(functools.partial(_pass_on, save.durable))


def _pass_on(future: Future[_T], ended: Future[_T]) -> None:
    if ended.cancelled():
        future.cancel()
    elif (error := ended.exception()) is not None:
        fail(future, error)
    else:
        complete(future, ended.result())


# A class and no generator, which would take three times as long.
@dataclass(slots=True)
class failing_save:  # noqa: N801 - used as a function
    """Context that fails ``save`` with an EverstepError of its block, posts it, and suppresses it.

    Any other exception (an interrupt, a bug) cancels the save and is raised.
    """

    save: Save
    post: Callable[[EverstepError], object]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        # Both futures: a thread may wait for either of them.
        if isinstance(error, EverstepError):
            fail(self.save.staged, error)
            fail(self.save.durable, error)
            self.post(error)
            return True
        if error is not None:
            # An interrupt or a bug is the caller's: waiters must not hang because of it.
            self.save.staged.cancel()
            self.save.durable.cancel()
        return False


def changed_during_copy_error(name: str, step: int) -> AuditError:
    """Return the error for an entry that changed while it was copied."""
    return AuditError(
        f"{name!r} was changed while it was being copied, and not by an optimizer's step()",
        step=step,
        hint="call ckpt.before_update() before such changes and ckpt.after_update() after them "
        '(averaged weights swapped in for an evaluation, CUDA graphs), or use method="async"',
    )


def as_everstep_error(error: BaseException, step: int | None) -> EverstepError:
    """Return an exception raised while the state was copied as an EverstepError."""
    if isinstance(error, EverstepError):
        return error
    ours = EverstepError(f"internal error while the state was copied: {error!r}", step=step)
    ours.__cause__ = error
    return ours
