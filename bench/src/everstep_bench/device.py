"""Raw figures of a CUDA device that decide how captures are made there: ``scripts/gpu_check.sh``.

Each section is one function that yields rows. It uses torch alone, and of everstep only the parts
whose time it measures; the engine itself is measured by ``bench stall`` and ``bench step``.

``--device cpu`` runs the same code on small tensors without a device, to see that it runs. Its
times mean nothing, and every row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.state.training_state import State

_cuda: Any = torch.cuda  # some of its calls have no annotations

Row = dict[str, Any]
"""A figure: ``what`` was done, ``ms`` or another unit at the end of the key."""

_REPEATS = 7
_PIECE_BYTES = 32 << 20
_SMALL_SHARE = 4096
"""On a CPU everything is smaller by this factor."""


class Device:
    """A CUDA device, or host memory in its place.

    Attributes:
        is_cuda: False: nothing here is asynchronous.
    """

    def __init__(self, kind: str) -> None:
        self.is_cuda = kind == "cuda"
        self.name = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        self._side = _cuda.Stream() if self.is_cuda else None

    def size(self, size_bytes: int) -> int:
        """Return a size for this device."""
        return size_bytes if self.is_cuda else size_bytes // _SMALL_SHARE

    def tensor(self, size_bytes: int) -> torch.Tensor:
        """Return flat bytes on the device."""
        return torch.ones(self.size(size_bytes), dtype=torch.uint8, device=self.name)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return flat bytes in pinned memory."""
        return torch.ones(self.size(size_bytes), dtype=torch.uint8, pin_memory=self.is_cuda)

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context of the side stream, which waits for the current one first."""
        if self._side is None:
            return contextlib.nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def wait(self) -> None:
        """Wait until nothing is under way."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def event(self) -> None:
        """Record an event on the current stream."""
        if self.is_cuda:
            _cuda.Event().record()

    def time_ms(self, work: Callable[[], object]) -> float:
        """Return the median time of ``work``, until the device is done with it."""
        return _median_ms(work, self.wait)

    def enqueue_ms(self, work: Callable[[], object]) -> float:
        """Return the median time of the calling thread in ``work``."""
        taken: list[float] = []
        for _ in range(_REPEATS):
            self.wait()
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
        self.wait()
        return statistics.median(taken) * 1e3


def _median_ms(work: Callable[[], object], wait: Callable[[], None]) -> float:
    taken: list[float] = []
    work()
    for _ in range(_REPEATS):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e3


# --- (a) The copy engine ----------------------------------------------------------------


def copy_engine(device: Device) -> Iterator[Row]:
    """Copies to the host in one, in pieces, and in pieces with something between them; and how long
    ``loss.item()`` takes meanwhile."""
    total = 2 << 30
    source = device.tensor(total)
    target = device.pinned(total)
    one = torch.ones(1, device=device.name)
    step = device.size(_PIECE_BYTES)
    pieces = [(at, min(at + step, source.numel())) for at in range(0, source.numel(), step)]

    def whole() -> None:
        with device.beside():
            target.copy_(source, non_blocking=True)

    def in_pieces(between: Callable[[], object]) -> Callable[[], None]:
        def copy() -> None:
            with device.beside():
                for begin, end in pieces:
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
                    between()

        return copy

    ways: dict[str, Callable[[], None]] = {
        "one copy": whole,
        "pieces of 32 MiB": in_pieces(lambda: None),
        "pieces, an event after each": in_pieces(device.event),
        "pieces, a kernel of one element after each": in_pieces(lambda: one.add_(0)),
    }
    quiet = _items_ms(device, lambda: None)
    yield {"what": "item() of a quiet device", "p50_ms": quiet[0], "max_ms": quiet[1]}
    for name, copy in ways.items():
        copied_ms = device.time_ms(copy)
        p50, most = _items_ms(device, copy)
        speed = source.numel() / copied_ms / 1e6
        yield {
            "what": name,
            "copied_ms": copied_ms,
            "speed_gb_per_s": speed,
            "item_p50_ms": p50,
            "item_max_ms": most,
        }


def _items_ms(device: Device, copy: Callable[[], None]) -> tuple[float, float]:
    """Return the median and the longest time of ``item()`` in steps of small kernels, while copies
    are made."""
    loss = torch.ones(256, 256, device=device.name)
    taken: list[float] = []
    for _ in range(3):
        device.wait()
        copy()
        for _ in range(40):
            loss = (loss @ loss).clamp(-1, 1)
            begin = time.perf_counter()
            loss.sum().item()
            taken.append(time.perf_counter() - begin)
    device.wait()
    return statistics.median(taken) * 1e3, max(taken) * 1e3


# --- (b) Enqueuing many copies ----------------------------------------------------------


def enqueuing(device: Device) -> Iterator[Row]:
    """Thread time of many small copies to the host and into a stage, and what a loop that is bound
    by its launches loses meanwhile."""
    for count in (108, 468, 2000):
        sources = [device.tensor(1 << 20) for _ in range(count)]
        size = sources[0].numel()
        host: Any = device.pinned(count << 20)
        stage: Any = device.tensor(count << 20)
        ways = _ways(sources, list(host.split(size)), list(stage.split(size)))
        if device.is_cuda:
            ways["into the stage, graph replay"] = _graph(ways["into the stage, foreach of int64"])
        for name, copy in ways.items():
            beside = _beside(device, copy)
            yield {
                "what": f"{count} tensors of 1 MiB {name}",
                "thread_ms": device.enqueue_ms(beside),
                "device_ms": device.time_ms(beside),
                "loop_loses_ms": _loop_loses_ms(device, beside),
            }


def _ways(
    sources: list[torch.Tensor], on_host: list[torch.Tensor], staged: list[torch.Tensor]
) -> dict[str, Callable[[], object]]:
    wide_sources = [one.view(torch.int64) for one in sources]
    wide_staged = [one.view(torch.int64) for one in staged]

    def loop() -> None:
        for target, source in zip(on_host, sources, strict=True):
            target.copy_(source, non_blocking=True)

    return {
        "to the host, a loop": loop,
        "to the host, foreach": partial(torch._foreach_copy_, on_host, sources, non_blocking=True),
        "into the stage, foreach of bytes": partial(torch._foreach_copy_, staged, sources),
        "into the stage, foreach of int64": partial(
            torch._foreach_copy_, wide_staged, wide_sources
        ),
    }


def _beside(device: Device, copy: Callable[[], object]) -> Callable[[], None]:
    def work() -> None:
        with device.beside():
            copy()

    return work


def _graph(work: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _loop_loses_ms(device: Device, copy: Callable[[], object]) -> float:
    """Return how much longer 400 small launches take while another thread enqueues the copies."""
    one = torch.ones(16, device=device.name)

    def loop() -> None:
        for _ in range(400):
            one.mul_(1.0)

    def both() -> None:
        thread = threading.Thread(target=copy)
        thread.start()
        loop()
        thread.join()

    return device.time_ms(both) - device.time_ms(loop)


# --- (c) The stage beside training ------------------------------------------------------


def stage_beside_gemm(device: Device) -> Iterator[Row]:
    """A copy within the device beside matrix products."""
    side = 8192 if device.is_cuda else 64
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    a = torch.ones(side, side, dtype=dtype, device=device.name)
    source = device.tensor(2 << 30).view(torch.int64)
    stage = torch.empty_like(source)
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(8):
            torch.mm(a, a, out=out)

    def copy() -> None:
        with device.beside():
            stage.copy_(source)

    def both() -> None:
        copy()
        products()

    alone = device.time_ms(products)
    copied = device.time_ms(copy)
    together = device.time_ms(both)
    yield {"what": "8 matrix products", "ms": alone}
    yield {"what": "2 GiB into the stage", "ms": copied, "gb_per_s": source.nbytes / copied / 1e6}
    yield {"what": "both at once", "ms": together, "longer_ms": together - alone}


# --- (d) Looking at a state -------------------------------------------------------------


def survey(device: Device) -> Iterator[Row]:
    """Time of the training thread for a look at a state of 468 tensors."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(78))).to(device.name)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(1, 64, device=device.name)).sum().backward()
    optimizer.step()
    state = State({"model": model, "optimizer": optimizer})
    tensors = len(state.layout)
    yield {"what": f"survey of {tensors} tensors", "thread_ms": device.enqueue_ms(state.survey)}
    yield {"what": "model.state_dict()", "thread_ms": device.enqueue_ms(model.state_dict)}
    scaler = torch.amp.GradScaler(device.name.type, enabled=device.is_cuda)
    yield {"what": "GradScaler.get_scale()", "thread_ms": device.enqueue_ms(scaler.get_scale)}


# --- (e) Pages --------------------------------------------------------------------------


def pages(device: Device) -> Iterator[Row]:
    """Fresh host memory: taking its pages, and pinning them, whole and in slices."""
    size = device.size(4 << 30)
    for name, slice_bytes in (("whole", size), ("in slices of 32 MiB", device.size(32 << 20))):
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        begin = time.perf_counter()
        ctypes.memset(address, 0, size)
        taken = time.perf_counter() - begin
        longest = pinned = 0.0
        for at in range(0, size, slice_bytes) if device.is_cuda else ():
            began = time.perf_counter()
            _cuda.check_error(
                _cuda.cudart().cudaHostRegister(address + at, min(slice_bytes, size - at), 1)
            )
            longest = max(longest, time.perf_counter() - began)
            pinned += time.perf_counter() - began
        yield {
            "what": f"{size >> 20} MiB, {name}",
            "touched_ms": taken * 1e3,
            "pinned_ms": pinned * 1e3,
            "longest_call_ms": longest * 1e3,
        }
        for at in range(0, size, slice_bytes) if device.is_cuda else ():
            _cuda.cudart().cudaHostUnregister(address + at)


SECTIONS: Sequence[Callable[[Device], Iterator[Row]]] = (
    copy_engine,
    enqueuing,
    stage_beside_gemm,
    survey,
    pages,
)


def machine(device: Device) -> Row:
    """Describe the device and the versions."""
    found: Row = {"torch": torch.__version__, "python": platform.python_version()}
    if not device.is_cuda:
        return found | {"device": "host memory: the times mean nothing"}
    driver = torch.cuda.get_device_properties(0)
    return found | {"device": driver.name, "cuda": torch.version.cuda}


def run(kind: str, out: Path | None) -> list[Row]:
    """Measure all sections, print each row, and write them to ``out`` as JSON lines."""
    device = Device(kind)
    rows: list[Row] = [{"section": "machine", **machine(device)}]
    for section in SECTIONS:
        try:
            rows += [{"section": section.__name__, **row} for row in section(device)]
        # A figure that cannot be taken must not cost the others.
        except (RuntimeError, OSError) as error:
            rows.append({"section": section.__name__, "failed": repr(error)})
        device.wait()
    text = "".join(json.dumps(_rounded(row)) + "\n" for row in rows)
    print(text, end="", flush=True)
    if out is not None:
        out.write_text(text)
    return rows


def _rounded(row: Row) -> Row:
    return {key: round(one, 4) if isinstance(one, float) else one for key, one in row.items()}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args()
    run(options.device, options.out)


if __name__ == "__main__":
    main()
