"""CUDA graphs of the user's: captures of them do not see what is copied beside, and none may have
an update in it.

While a graph is captured in torch's default mode, CUDA refuses calls of any other thread that might
be unsafe (to pin memory, to wait for an event), and the capture fails with them. Ours are not: they
touch no stream but the engine's. A thread can say so of itself
(``cuThreadExchangeStreamCaptureMode``), as torch does in the threads of its own that wait for NCCL.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from everstep.errors import StateError
from everstep.seams.machine import use_thread_local_captures

__all__ = ["ignore_graph_captures", "refuse_graph_capture"]

_cuda: Any = torch.cuda
_said = threading.local()


def ignore_graph_captures() -> None:
    """Call in a thread of the engine, before it waits for events or pins memory: once in each, it
    tells CUDA to leave it out of what other threads capture. Where there is no such call captures
    fail beside it, as before."""
    if getattr(_said, "it", False) or not _cuda.is_initialized():
        return
    _said.it = True
    use_thread_local_captures()


def refuse_graph_capture() -> None:
    """Call where an update or a save begins, on whatever machine.

    Raises:
        StateError: the current stream is being captured into a CUDA graph.
    """
    if _cuda.is_initialized() and _cuda.is_current_stream_capturing():
        raise StateError(
            "optimizer.step(), save() or ckpt.step() is being captured into a CUDA graph: its "
            "replays would change the state without anybody being told",
            hint="capture forward and backward only, and call optimizer.step() and ckpt.step() "
            "outside of the graph",
        )
