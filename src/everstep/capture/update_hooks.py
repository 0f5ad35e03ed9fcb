"""Hooks on the user's optimizers: count updates, and hold each back at the gate."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from everstep.errors import StateError

_TURN_S = 60.0  # timeout for an update in another thread
_POLL_S = 0.0005


@dataclass(slots=True)
class UpdateHooks:
    """Counter of optimizer updates (the LSN), which calls the gate before each.

    A subclass that calls ``super().step()`` fires the hooks twice, one pair within the other; a
    ``step()`` that raises fires the first and not the second. The outermost call still on the stack
    tells these cases apart. Changes by a failed call, or by another optimizer within a call, are in
    no record: they count as a lost update.

    Attributes:
        gate: called with the key of the optimizer before it updates anything (I1).
        consumed: called when the gradients are final: after all other hooks, or inside the closure
            of the optimizer (I2).
        applied: called when the update is complete.
        lost: called with the reason when something may have been updated without a record.
        lsn: number of updates so far, of all optimizers together.
        reports: number of times that the outermost call has called ``consumed``.
        within: another optimizer was called within the outermost call.
        thread: thread of the outermost call.
        failed: an update has failed since the last step mark, possibly half-way.
        counts_failed: a failed update counts as an update; not if ranks share LSNs.
        wait_for_others: called with a key; returns when no other thread is taking a base.
    """

    gate: Callable[[str], None]
    consumed: Callable[[str], None] | None = None
    applied: Callable[[str], None] | None = None
    lost: Callable[[str], None] | None = None
    lsn: int = 0
    handles: list[Any] = field(default_factory=list)
    outermost: FrameType | None = None
    depth: int = 0
    reports: int = 0
    key: str = ""
    within: bool = False
    thread: int = 0
    failed: bool = False
    counts_failed: bool = False
    wait_for_others: Callable[[str], None] = lambda key: None
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, key: str, optimizer: Optimizer) -> None:
        """Count and gate the updates of ``optimizer`` from now on."""
        before_hooks: Any = optimizer._optimizer_step_pre_hooks
        after_hooks: Any = optimizer._optimizer_step_post_hooks
        last: Any = None

        def before(*_: Any) -> None:
            # The call of step() that runs this hook. Its frame is on the stack until the call has
            # returned or raised.
            caller = sys._getframe(1)
            if self.outermost is None or not _on_stack(self.outermost, caller):
                self._begin(key, caller)
            self.depth += 1
            self.within = self.within or key != self.key
            # After the claim: a thread that takes a base checks for claims before it begins.
            self.wait_for_others(key)
            self.gate(key)

        def after(*_: Any) -> None:
            late = self.depth <= 1 and self.consumed is not None and not self.reports
            if self.depth <= 1 and self.consumed is not None and self.applied is not None:
                if late:  # our last hook did not run last: use the gradients as they are now
                    self.consumed(key)
                self.applied(key)
            self._after(late=late)
            if last is not None:  # hooks that the user registers later must run before it
                before_hooks.move_to_end(last.id)

        def consume() -> None:
            self.reports += 1
            if self.consumed is not None:  # a nested call may also call this closure
                self.consumed(key)

        def at_last(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if self.depth > 1:
                return None  # a nested call
            if not _is_last(before_hooks, last.id):
                return None  # later hooks may still change gradients and parameters
            # A closure computes the gradients, so they are final only after it. args[0] is the
            # optimizer.
            if len(args) > 1 and callable(args[1]):
                return (args[0], _then(args[1], consume), *args[2:]), options
            if callable(options.get("closure")):
                return args, {**options, "closure": _then(options["closure"], consume)}
            consume()
            return None

        # Marks a hook that only observes: _is_last() of another Checkpointer skips it.
        at_last.looks_on = True  # type: ignore[attr-defined]
        first = optimizer.register_step_pre_hook(before)
        # Run before all other hooks of this optimizer: one of them may change parameters.
        before_hooks.move_to_end(first.id, last=False)
        final = optimizer.register_step_post_hook(after)
        # Run first as well: one of the others may free or zero gradients.
        after_hooks.move_to_end(final.id, last=False)
        self.handles += [first, final]
        if self.consumed is not None:
            last = optimizer.register_step_pre_hook(at_last)
            self.handles.append(last)

    def _begin(self, key: str, caller: FrameType) -> None:
        """Begin an outermost call when none is in progress in another thread.

        Updates are recorded one after the other, so they must be made one after the other.
        """
        me = threading.get_ident()
        since_s = time.monotonic()
        while True:
            # Test and claim under one lock: otherwise two threads could both find no update in
            # progress.
            with self._claim:
                others = self.outermost is not None and self.thread != me
                if not others or not in_thread(self.outermost, self.thread):
                    self.settle()
                    self.outermost = caller
                    self.depth = 0
                    self.reports = 0
                    self.key = key
                    self.within = False
                    self.thread = me
                    return
            if time.monotonic() - since_s > _TURN_S:
                raise StateError(
                    f"{key} waits for an update of {self.key} in another thread, which has not "
                    f"ended within {_TURN_S:g} s",
                    hint="updates must not overlap: end one before the next one begins",
                )
            # Polled: an update that raises notifies nobody; only its frame shows that it has ended.
            time.sleep(_POLL_S)

    def updated(self) -> None:
        """Count an update that was made without an optimizer."""
        self.lsn += 1

    def restored(self, lsn: int) -> None:
        """Set the LSN of a restored state, and forget earlier failures."""
        self.outermost = None
        self.depth = 0
        self.failed = False
        self.lsn = lsn

    def settle(self) -> None:
        """Record an update as failed if it has not ended and is on no stack."""
        if self.outermost is None or _on_stack(self.outermost, sys._getframe(1)):
            return
        if self.thread != threading.get_ident() and in_thread(self.outermost, self.thread):
            return
        self.outermost = None
        self.depth = 0
        self.failed = True
        # With a log _lose() counts it.
        if self.lost is None and self.counts_failed:
            self.lsn += 1
        self._lose(f"an update of {self.key} has failed")

    def close(self) -> None:
        """Stop counting."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _after(self, *, late: bool) -> None:
        """End a call.

        Args:
            late: a hook registered in between ran last, so its changes were not recorded.
        """
        self.depth -= 1
        if self.depth <= 0:
            self.depth = 0
            self.lsn += 1
            if self.within:
                self._lose(f"another optimizer was called within {self.key}")
            elif late:
                self._lose(f"a new hook of {self.key} ran last, so its changes were not recorded")
            self.outermost = None  # from now on another thread may begin an update

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            self.lsn += 1
            self.lost(why)


def in_thread(wanted: FrameType | None, thread: int) -> bool:
    """Return True if a call is in progress in a thread, which may have ended.

    The stack of a running thread cannot be walked: ``f_back`` may return a dead frame. But Python
    refuses to clear a frame that is being executed, and clearing a finished one has no effect.
    """
    if wanted is None or thread not in sys._current_frames():  # as after a fork
        return False
    try:
        wanted.clear()
    except RuntimeError:
        return True
    return False


def _is_last(hooks: Any, number: int) -> bool:
    """Return True if only hooks of other Checkpointers, which only observe, come after this one."""
    for other, hook in reversed(hooks.items()):
        if other == number:
            return True
        if not getattr(hook, "looks_on", False):
            return False
    return False


def _then(closure: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that calls ``closure``, then ``action``."""

    @functools.wraps(closure)
    def both(*args: Any, **options: Any) -> Any:
        result = closure(*args, **options)
        action()
        return result

    return both


def _on_stack(wanted: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
