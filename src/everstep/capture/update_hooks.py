"""Hooks on the user's optimizers: they count updates, and hold each back at the gate."""

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

__all__ = ["UpdateHooks", "in_thread"]

_TURN_S = 60.0  # for an update in another thread
_LOOK_AGAIN_S = 0.0005


@dataclass(slots=True)
class UpdateHooks:
    """Counts optimizer updates: the LSN; and asks the gate before each.

    A subclass that calls ``super().step()`` fires the hooks twice, one pair within the other;
    a ``step()`` that raises fires the first and not the second. The outermost call that is
    still on the stack tells the two apart. What one that raised has done to parameters, and what
    another optimizer did within a call, is in no record: it counts as an update that is lost.

    Attributes:
        gate: called with the key of the optimizer before it updates anything (I1).
        consumed: called when the gradients are what the optimizer is going to consume: behind
            all other hooks, or inside its closure (I2).
        applied: called when the update is over.
        lost: called, with the reason, when something may have been updated without a record.
        lsn: updates so far, of all optimizers together.
        told: how often the outermost call has said what it consumes.
        within: whether another optimizer was called within the outermost call.
        thread: of the outermost call.
        failed: one has failed since the last step mark, perhaps half-way.
        counts_failed: it counts as an update; where ranks have their numbers in common it does not.
        wait_for_others: called with a key, returns when no other thread is taking a base.
    """

    gate: Callable[[str], None]
    consumed: Callable[[str], None] | None = None
    applied: Callable[[str], None] | None = None
    lost: Callable[[str], None] | None = None
    lsn: int = 0
    handles: list[Any] = field(default_factory=list)
    outermost: FrameType | None = None
    depth: int = 0
    told: int = 0
    key: str = ""
    within: bool = False
    thread: int = 0
    failed: bool = False
    counts_failed: bool = False
    wait_for_others: Callable[[str], None] = lambda key: None
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, key: str, optimizer: Optimizer) -> None:
        """Counts and gates the updates of ``optimizer`` from now on."""
        before_hooks: Any = optimizer._optimizer_step_pre_hooks
        after_hooks: Any = optimizer._optimizer_step_post_hooks
        last: Any = None

        def before(*_: Any) -> None:
            caller = sys._getframe(1)
            if self.outermost is None or not _on_stack(self.outermost, caller):
                self._begin(key, caller)
            self.depth += 1
            self.within = self.within or key != self.key
            self.wait_for_others(key)  # behind the claim: whoever takes a base looks at that
            self.gate(key)

        def after(*_: Any) -> None:
            late = self.depth <= 1 and self.consumed is not None and not self.told
            if self.depth <= 1 and self.consumed is not None and self.applied is not None:
                if late:  # no hook could tell: they are looked at as they are now
                    self.consumed(key)
                self.applied(key)
            self._after(late=late)
            if last is not None:  # whatever the user registers meanwhile comes before it
                before_hooks.move_to_end(last.id)

        def consume() -> None:
            self.told += 1
            if self.consumed is not None:  # perhaps of a call within, which calls our closure
                self.consumed(key)

        def at_last(_: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if self.depth > 1:
                return None  # of a call within a call
            if not _is_last(before_hooks, last.id):
                return None  # what comes behind may change gradients, and what is updated
            if len(args) > 1 and callable(args[1]):
                return (args[0], _then(args[1], consume), *args[2:]), options
            if callable(options.get("closure")):
                return args, {**options, "closure": _then(options["closure"], consume)}
            consume()
            return None

        at_last.looks_on = True  # type: ignore[attr-defined]
        first = optimizer.register_step_pre_hook(before)
        # Before all other hooks of this optimizer: one of them may change parameters.
        before_hooks.move_to_end(first.id, last=False)
        final = optimizer.register_step_post_hook(after)
        # Likewise: one of them may free or zero gradients.
        after_hooks.move_to_end(final.id, last=False)
        self.handles += [first, final]
        if self.consumed is not None:
            last = optimizer.register_step_pre_hook(at_last)
            self.handles.append(last)

    def _begin(self, key: str, caller: FrameType) -> None:
        """An outermost call begins, when none is under way in another thread: what updates consume
        is recorded one after another, and so are they made."""
        me = threading.get_ident()
        since_s = time.monotonic()
        while True:
            with self._claim:
                others = self.outermost is not None and self.thread != me
                if not others or not in_thread(self.outermost, self.thread):
                    self.settle()
                    self.outermost = caller
                    self.depth = 0
                    self.told = 0
                    self.key = key
                    self.within = False
                    self.thread = me
                    return
            if time.monotonic() - since_s > _TURN_S:
                raise StateError(
                    f"{key} waits for the update of {self.key} in another thread, which has not "
                    f"ended for {_TURN_S:g} s",
                    hint="updates are made one after another; end one before the other begins",
                )
            time.sleep(_LOOK_AGAIN_S)

    def updated(self) -> None:
        """An update that went past every optimizer is over."""
        self.lsn += 1

    def restored(self, lsn: int) -> None:
        """The state is that behind an update of before, whatever has failed since."""
        self.outermost = None
        self.depth = 0
        self.failed = False
        self.lsn = lsn

    def settle(self) -> None:
        """One that has not ended, and is on no stack, has failed, perhaps half-way."""
        if self.outermost is None or _on_stack(self.outermost, sys._getframe(1)):
            return
        if self.thread != threading.get_ident() and in_thread(self.outermost, self.thread):
            return
        self.outermost = None
        self.depth = 0
        self.failed = True
        if self.lost is None and self.counts_failed:
            self.lsn += 1
        self._lose(f"an update of {self.key} has failed")

    def close(self) -> None:
        """Stops counting."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _after(self, *, late: bool) -> None:
        """
        Args:
            late: a hook that was registered since came last: what it has done nobody could tell.
        """
        self.depth -= 1
        if self.depth <= 0:
            self.depth = 0
            self.lsn += 1
            if self.within:
                self._lose(f"another optimizer was called within {self.key}")
            elif late:
                self._lose(f"a hook of {self.key} is new, and nobody could see what it did")
            self.outermost = None  # from now on another thread may begin one

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            self.lsn += 1
            self.lost(why)


def in_thread(wanted: FrameType | None, thread: int) -> bool:
    """Whether a call is under way in a thread, which may have ended. The stack of a thread that
    runs cannot be walked (``f_back`` may give what is no frame any more); that a frame is being
    executed Python says where it is asked to clear it, and one that is over has nothing to keep."""
    if wanted is None or thread not in sys._current_frames():  # as behind a fork
        return False
    try:
        wanted.clear()
    except RuntimeError:
        return True
    return False


def _is_last(hooks: Any, number: int) -> bool:
    """Whether behind this hook there are only those of other Checkpointers, which look on, too."""
    for other, hook in reversed(hooks.items()):
        if other == number:
            return True
        if not getattr(hook, "looks_on", False):
            return False
    return False


def _then(closure: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    """``closure``, and ``action`` behind it."""

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
