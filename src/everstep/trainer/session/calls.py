"""Allow one call at a time: a step mark, base or resume never begins in the middle of
another one.

Checks before a call of a Checkpointer does anything: platform, process, arguments.

Arguments of a Checkpointer from a configuration: a dict, YAML, OmegaConf or Hydra.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

from everstep.capture.update_hooks import in_thread
from everstep.config import Every, KeeperOptions, is_int, is_number
from everstep.config.given import is_sequence, refuse_unknown
from everstep.config.keep import policy_of
from everstep.config.method import Method
from everstep.config.options import Budget, LogOptions, Preemption
from everstep.errors import OptionError, StateError, UnavailableError
from everstep.tiers import PeerOptions, TierOptions

_POLL_S = 1e-3
# A call that hangs in a daemon thread must not keep the interpreter from ending.
_LAST_CALL_S = 10.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


class CallGuard:
    """Call in progress, of a training thread, a signal handler or another thread.

    A call lasts while its frame is on the stack of its thread, so an interrupt at any moment cannot
    leave a call that never ends.

    Args:
        timeout_s: timeout of a call that waits for one in another thread, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._now: tuple[str, int, FrameType] | None = None
        self._lock = threading.RLock()  # reentrant: a signal handler may begin a call, too
        self._ends_in: int | None = None

    def begin(self, name: str, frame: FrameType) -> None:
        """Begin a call.

        Raises:
            StateError: another call is in progress, in this thread or for too long in another one;
                or the interpreter is shutting down.
        """
        me = threading.get_ident()
        since_s = time.monotonic()
        while True:
            with self._lock:
                now = self._now
                if now is None or not in_thread(now[2], now[1]):
                    self._now = (name, me, frame)
                    break
            if now[1] == me:
                raise _within(name, now[0])
            if time.monotonic() - since_s > self._timeout_s:
                raise self._waited(f"{name}()", now[0])
            # Polled: a call that was ended by an exception in its thread might never notify a
            # waiter.
            time.sleep(_POLL_S)
        # Checked last: the thread that shuts down sets the flag first, then waits for calls.
        if self.over:
            self._now = None
            raise _over(name)

    def refuse_within(self, name: str) -> None:
        """Refuse a call that waits for the result of another one from inside that one.

        Raises:
            StateError: the call below it on the stack would be waited for for ever; or the
                interpreter is shutting down.
        """
        if self.over:
            raise _over(name)
        now = self._now
        if now is not None and now[1] == threading.get_ident() and in_thread(now[2], now[1]):
            raise _within(name, now[0])

    def end(self) -> None:
        """End the call."""
        self._now = None

    @property
    def over(self) -> bool:
        """Return True if the interpreter is shutting down, in another thread."""
        return self._ends_in is not None and self._ends_in != threading.get_ident()

    def last(self) -> None:
        """Refuse further calls from other threads: the interpreter is shutting down in this one.
        Wait shortly for the call in progress."""
        self._ends_in = threading.get_ident()
        with contextlib.suppress(StateError):
            self.wait_for_others("the end of the interpreter", min(self._timeout_s, _LAST_CALL_S))

    def wait_for_others(self, who: str, timeout_s: float | None = None) -> None:
        """Wait until no other thread is in a call.

        Args:
            who: the waiting call, for messages.
            timeout_s: timeout in seconds; None for the default.

        Raises:
            StateError: timeout.
        """
        timeout_s = timeout_s or self._timeout_s
        since_s = time.monotonic()
        while (now := self._now) is not None and now[1] != threading.get_ident():
            if not in_thread(now[2], now[1]):
                return
            if time.monotonic() - since_s > timeout_s:
                raise self._waited(who, now[0])
            time.sleep(_POLL_S)

    def _waited(self, who: str, other: str) -> StateError:
        return StateError(
            f"{who} waited {self._timeout_s:g} s for {other}() in another thread",
            hint="that call hangs or takes long: save from the training loop, or with async",
        )


def _within(name: str, outer: str) -> StateError:
    return StateError(
        f"{name}() was called inside {outer}(), perhaps in a signal handler or in on_failure=",
        hint="set a flag there and call it from the training loop, or use preempt=",
    )


def _over(name: str) -> StateError:
    return StateError(
        f"{name}() was called while the interpreter is shutting down, which waits for earlier "
        "bases only",
        hint="let the main thread join() the training thread, or call close() before it ends",
    )


def exclusive(name: str) -> Callable[[_Function], _Function]:
    """Decorate a method that must not run during another call; the object has a :class:`CallGuard`
    in ``_calls``."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            calls: CallGuard = self._calls
            # The frame of this wrapper: it is on the stack exactly as long as the call lasts.
            calls.begin(name, sys._getframe())
            try:
                return function(self, *args, **options)
            finally:
                calls.end()

        return cast("_Function", call)

    return decorate


def check_platform() -> None:
    """Check that this version runs on the platform.

    Raises:
        UnavailableError: It does not.
    """
    if sys.platform == "win32":
        raise UnavailableError(
            "everstep does not run on Windows", hint="Linux, WSL 2, or macOS on the CPU"
        )


def check_usable(is_open: bool, pid: int, run: PurePath, replaced: bool) -> None:
    """Check that a Checkpointer is open and belongs to this process.

    Args:
        pid: process that made the Checkpointer.
        replaced: True if a later Checkpointer of this process has the run.

    Raises:
        StateError: It is closed, or belongs to another process.
    """
    if not is_open and replaced:
        raise StateError(
            "this Checkpointer is closed: a later one in this process has replaced it",
            path=run,
            hint="use the later one; two Checkpointers at the same time need a run folder each",
        )
    if not is_open:
        raise StateError(
            "this Checkpointer is closed",
            path=run,
            hint="to continue, make a new one for the same run and call its resume()",
        )
    if os.getpid() != pid:
        raise StateError(
            "this Checkpointer belongs to the parent process, from which this one was forked",
            path=run,
            hint="make a Checkpointer with a run folder of its own in this process",
        )


def refuse_pickling(checkpointer: object) -> NoReturn:
    """Refuse to pickle or copy a Checkpointer, which is bound to its process.

    Raises:
        StateError: Always.
    """
    raise StateError(
        "a Checkpointer cannot be pickled or copied: it belongs to the process that made it",
        hint="do not pass it to another process; if that process trains, too, make a Checkpointer "
        "with a run folder of its own there",
    )


def check_resume(step: int | None) -> None:
    """Check the argument of :meth:`Checkpointer.resume`.

    Raises:
        OptionError: It is not a step number.
    """
    if step is not None and (not is_int(step) or step < 0):
        raise OptionError(f"resume(step={step!r}): step must be an integer >= 0, or None")


def check_timeout(timeout_s: float | None) -> None:
    """Check the argument of :meth:`Checkpointer.wait`.

    Raises:
        OptionError: It is not a number of seconds.
    """
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s >= 0):
        raise OptionError(
            f"wait(timeout_s={timeout_s!r}): timeout_s must be a number >= 0, or None"
        )


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as finite numbers by name; others, such as NaN, are left out.

    Raises:
        OptionError: They are not a mapping of names to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise OptionError(f"metrics must be a mapping of names to numbers, not {metrics!r}")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= _METRIC_CHARS_MAX:
            raise OptionError(
                f"metrics: {name!r} is not a name of 1 to {_METRIC_CHARS_MAX} letters"
            )
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"metrics[{name!r}] must be a number, not {value!r}") from error
        if math.isfinite(number):
            found[name] = number
    return found


def checked_note(note: str | None) -> str:
    """Return a note; empty for None.

    Raises:
        OptionError: It is not a text, or too long.
    """
    if note is not None and (not isinstance(note, str) or len(note) > _NOTE_CHARS_MAX):
        raise OptionError(f"note must be a text of at most {_NOTE_CHARS_MAX} letters")
    return note or ""


_METRIC_CHARS_MAX = 256
_NOTE_CHARS_MAX = 4096

_KINDS: Mapping[str, Any] = {
    "budget": Budget,
    "every": Every,
    "keeper": KeeperOptions,
    "log": LogOptions,
    "method": Method,
    "preempt": Preemption,
}
"""Arguments that may be mappings, with the class of their fields."""

_PLAIN = ("declared", "keep", "on_failure", "path", "progress_timeout_s", "static", "tiers")
_PEER = "peer"

_VARIABLES = {
    "EVERSTEP_DIR": "path",
    "EVERSTEP_EVERY": "every",
    "EVERSTEP_KEEP": "keep",
    "EVERSTEP_METHOD": "method",
}
"""Variables of the environment, each with the argument that it sets."""


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Checkpointer, but for its state.

    Args:
        config: arguments by name. Those that are options of their own may be mappings of their
            fields; of ``tiers`` each item may be one, ``{"where": ...}`` or ``{"peer": {...}}``,
            and of ``keep``, too (:func:`~everstep.config.keep.policy_of`).

    Raises:
        OptionError: an unknown or invalid option, or no path.
    """
    if not isinstance(config, Mapping):
        raise OptionError(f"a configuration must be a mapping, not a {type(config).__name__}")
    given = {str(name): value for name, value in config.items()}
    given |= _from_environment()
    refuse_unknown("a configuration", given, sorted([*_KINDS, *_PLAIN]))
    if not given.get("path"):
        raise OptionError(
            "the configuration has no path", hint="set path, or EVERSTEP_DIR in the environment"
        )
    for name, kind in _KINDS.items():
        if isinstance(given.get(name), Mapping):
            given[name] = kind(**given[name])
    if "keep" in given:
        given["keep"] = policy_of(given["keep"])
    if is_sequence(given.get("tiers")):
        given["tiers"] = [_tier(one) for one in given["tiers"]]
    return given


def _from_environment() -> dict[str, Any]:
    found = {}
    for variable, name in _VARIABLES.items():
        if variable in os.environ and (text := os.environ[variable]):
            found[name] = int(text) if text.isdecimal() and name != "path" else text
    return found


def _tier(one: Any) -> Any:
    if not isinstance(one, Mapping):
        return one
    if _PEER in one:
        refuse_unknown("an item of tiers", one, [_PEER])
        return PeerOptions(**(one[_PEER] or {}))
    return TierOptions(**one)
