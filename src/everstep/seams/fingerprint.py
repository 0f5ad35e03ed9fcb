"""Fingerprint of the versions, hardware and settings that bit-exact results depend on."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch.optim import Optimizer

from everstep.seams.machine import processor_model

_computed_on: ContextVar[tuple[str, ...]] = ContextVar("computed_on", default=())
# A denormal float32 as bits: as a value it would be flushed before torch fills with it.
_DENORMAL_BITS = 1 << 16
# Grain size of at::parallel_for: with this many elements per thread, all threads work.
_GRAIN_ELEMENTS = 32768
_MIXED = "mixed"
_forked = False
# Variables, because Python would multiply literals once, at compile time.
_SMALLEST_NORMAL = sys.float_info.min
_HALF = 0.5


def cuda_in_use() -> bool:
    """Return True if this process uses CUDA devices; never initialises CUDA."""
    # In this order: is_available() is slow.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


def device_types(optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
    """Return the device types of the parameters, where updates are computed, e.g. ``("cpu",)``."""
    parameters = (p for one in optimizers for group in one.param_groups for p in group["params"])
    return tuple(sorted({parameter.device.type for parameter in parameters}))


@contextlib.contextmanager
def computed_on(types: tuple[str, ...]) -> Iterator[None]:
    """Include ``types``, the devices that compute updates, in :func:`fingerprint` within the block.
    A process with a GPU in use may train on the CPU.
    """
    token = _computed_on.set(types)
    try:
        yield
    finally:
        _computed_on.reset(token)


def fingerprint() -> dict[str, str]:
    """Return versions and hardware that bit-exact results can depend on."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "processor": f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}",
        "system": platform.system(),
        "threads": describe_threads(torch.get_num_threads()),
    }
    if (denormals := _denormals()) != "kept":
        found["denormals"] = denormals
    if cuda_in_use():
        found["cuda"] = str(torch.version.cuda)
        found["device"] = torch.cuda.get_device_name()
    if (types := _computed_on.get()) not in ((), ("cpu",)):
        found["parameters"] = ", ".join(types)
    return found


def process_name() -> str:
    """Return a name of this process for people: its number and host."""
    return f"process {os.getpid()} on {platform.node() or 'a host without a name'}"


def volatile_settings() -> tuple[int, bool, bool]:
    """Return the settings that a program may change during training: torch's threads, whether CUDA
    is in use, whether this thread flushes denormals (some libraries enable that at import). Read
    with each record, so it neither calls the driver nor creates a tensor.
    """
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.get_num_threads(), in_use, _SMALLEST_NORMAL * _HALF == 0.0


class FingerprintWatch:
    """Detect settings that changed since the record of the current timeline was written.

    The record holds :func:`fingerprint` as of the moment when the timeline was opened.

    Args:
        optimizers: optimizers of the training, by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._timeline = 0
        self._then = volatile_settings()
        self._on: tuple[str, ...] = ()

    def began(self, timeline: int) -> None:
        """Note that ``timeline`` is open. A later keeper of the same timeline writes no new record,
        so the settings to compare with stay.
        """
        if timeline != self._timeline:
            self._timeline = timeline
            self._then = volatile_settings()
            self._on = device_types(self._optimizers.values())

    @property
    def holds(self) -> bool:
        """Return True if the settings still are those of the record."""
        now = volatile_settings()
        if now != self._then:
            return False
        # Without a GPU in use parameters cannot have moved.
        in_use = now[1]
        return not in_use or device_types(self._optimizers.values()) == self._on


def merge_fingerprints(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Merge the fingerprints of several processes. A differing value becomes a list of all values,
    which equals the value of no process, so no replay counts as exact (I9).

    Args:
        found: one fingerprint per process.
    """
    keys = sorted({key for one in found for key in one})
    values = {key: sorted({one.get(key, "none") for one in found}) for key in keys}
    return {key: ", ".join(each) for key, each in values.items()}


def describe_threads(asked: int) -> str:
    """Return the number of threads that torch uses if it requests ``asked``. OpenMP may provide
    fewer, and its environment variables may have been changed after it read them; then the text
    says so and is not a plain number.
    """
    if asked > 1 and os.environ.get("OMP_DYNAMIC", "").strip().lower() not in ("", "false", "0"):
        return f"{asked} or fewer, as OMP_DYNAMIC allows"
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    if limit.isdigit() and int(limit) < asked:
        return f"{asked} within OMP_THREAD_LIMIT={int(limit)}"
    return str(asked)


def thread_count_fixed(found: Mapping[str, str]) -> bool:
    """Return True if every operator uses the same number of threads. Otherwise even the same
    process may compute other bits when it repeats an operation.
    """
    return "OMP_DYNAMIC" not in found.get("threads", "")


def threads_disagree(found: Mapping[str, str]) -> bool:
    """Return True if some of torch's threads flush denormals and others do not: results then depend
    on the thread that computes an element.
    """
    return _MIXED in found.get("denormals", "").split(", ")


def _denormals() -> str:
    """Return the effect of ``torch.set_flush_denormal(True)``: "flushed", "kept", or "mixed" if
    some of torch's threads were started before the call.

    Flushing is a setting of each thread, inherited by new ones, so an operator that uses all
    threads is run. This happens only if this thread flushes: once a process has started torch's
    threads, a forked child can no longer compute with several. (Threads started while denormals
    were flushed keep flushing after this thread stops; they are not detected.)
    """
    if not volatile_settings()[2]:
        return "kept"
    threads = torch.get_num_threads()
    # The parent may have started torch's threads: the child has none and would wait forever.
    if _forked and threads > 1:
        return _MIXED
    count = _GRAIN_ELEMENTS * threads
    bits = torch.full((count,), _DENORMAL_BITS, dtype=torch.int32, device="cpu")
    bits.view(torch.float32).mul_(0.5)
    # Count as integers: a comparison of floats would flush again.
    kept = int(bits.count_nonzero())
    return "flushed" if kept == 0 else _MIXED


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)
