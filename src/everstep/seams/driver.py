"""What only the driver of a device can be asked for, and torch does not pass on."""

from __future__ import annotations

import ctypes

__all__ = ["leave_out_of_captures"]

_DRIVER = "libcuda.so.1"
_THREAD_LOCAL = 1  # of CUstreamCaptureMode: what other threads capture is no concern of this one


def leave_out_of_captures() -> bool:
    """Tells CUDA that this thread has nothing to do with graphs that other threads capture
    (``cuThreadExchangeStreamCaptureMode``); whether there is such a call."""
    try:
        exchange = ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
    return True
