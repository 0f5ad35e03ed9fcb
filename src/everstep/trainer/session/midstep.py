"""Whether a base is asked for in the middle of a step, where the state is that of no step mark.

A forward draws random numbers and counts batches, and a loader fetches data, long before an
optimizer updates anything: nothing in the state itself says that a step is under way. Where the
call comes from says it: what is below it on its stack.
"""

from __future__ import annotations

import functools
import signal
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["where_in_a_step"]

_FORWARD = frozenset((nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__))
_BACKWARD = frozenset((torch.autograd.backward.__code__, torch.autograd.grad.__code__))


def where_in_a_step(handled: int = id(None)) -> str:
    """Where the caller is, in words, if that is, or may be, in the middle of a step; else "". By
    its own stack: that of another thread cannot be walked while it runs.

    Args:
        handled: id of the error that was being dealt with at the end of the last step: a loop may
            go on within an ``except``.
    """
    error = sys.exc_info()[1]
    left = "" if id(error) == handled else _where_left(error)
    return _where(sys._getframe(1), _handlers()) or left


def _where(frame: FrameType | None, handlers: frozenset[CodeType]) -> str:
    while frame is not None:
        code = frame.f_code
        if code in _FORWARD:
            return "in a module's forward"
        if code in _BACKWARD:
            return "in a backward"
        if code in handlers and _is_given(frame):
            return "in a signal handler"
        frame = frame.f_back
    return ""


def _where_left(error: BaseException | None) -> str:
    """Where training was left by an error that is being dealt with."""
    if isinstance(error, KeyboardInterrupt):
        return "behind a KeyboardInterrupt"
    trace = None if error is None else error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in _FORWARD | _BACKWARD:
            return f"behind a forward or backward that has ended with {type(error).__name__}"
        trace = trace.tb_next
    return ""


def _is_given(frame: FrameType) -> bool:
    """Whether a call has got, as an argument, the frame that it was called from, as signal
    handlers do, and whoever calls the same function does not."""
    given = list(frame.f_locals.values())
    given += [one for some in given if isinstance(some, tuple) for one in some]
    return any(one is frame.f_back for one in given)


def _handlers() -> frozenset[CodeType]:
    """The code of this process's signal handlers."""
    found = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return frozenset(code for code in found if code is not None)


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler) or isinstance(handler, type):
        return None
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = getattr(type(handler).__call__, "__func__", type(handler).__call__)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
