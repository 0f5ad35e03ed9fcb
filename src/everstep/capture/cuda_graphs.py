"""Coexistence with CUDA graphs that the user captures; none of them may contain an update.

While a graph is captured in torch's default mode, CUDA refuses potentially unsafe calls of any
other thread (pinning memory, waiting for an event), and the capture fails. everstep's calls are
safe: they use only streams of their own. A thread can declare this for itself
(``cuThreadExchangeStreamCaptureMode``), as torch does in its threads that wait for NCCL.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from everstep.errors import StateError
from everstep.seams.machine import use_thread_local_captures

_cuda: Any = torch.cuda
_said = threading.local()


def ignore_graph_captures() -> None:
    """Exclude the calling thread from graph captures of other threads.

    Call it in a thread of a lane before it waits for events or pins memory; it acts once per
    thread. If the driver has no such call, captures fail while copies are made.
    """
    if getattr(_said, "it", False) or not _cuda.is_initialized():
        return
    _said.it = True
    use_thread_local_captures()


def refuse_graph_capture() -> None:
    """Refuse an update or a save inside the capture of a graph; call it on any machine.

    Raises:
        StateError: the current stream is being captured into a CUDA graph.
    """
    # Only once CUDA is in use: without tensors on CUDA devices everstep calls no CUDA function.
    if _cuda.is_initialized() and _cuda.is_current_stream_capturing():
        raise StateError(
            "optimizer.step(), save() or ckpt.step() is being captured into a CUDA graph: its "
            "replays would change the state unnoticed",
            hint="capture forward and backward only, and call optimizer.step() and ckpt.step() "
            "outside of the graph",
        )
