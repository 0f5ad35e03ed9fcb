"""What bit-for-bit results can depend on, besides the program."""

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

__all__ = [
    "FingerprintWatch",
    "computed_on",
    "cuda_in_use",
    "describe_threads",
    "device_types",
    "fingerprint",
    "merge_fingerprints",
    "process_name",
    "thread_count_fixed",
    "threads_disagree",
    "volatile_settings",
]

_computed_on: ContextVar[tuple[str, ...]] = ContextVar("computed_on", default=())
_DENORMAL_BITS = 1 << 16  # of a float32; the value itself is flushed before torch fills with it
_GRAIN_ELEMENTS = 32768  # of at::parallel_for: for so many of each, all of torch's threads work
_MIXED = "mixed"
_forked = False
_SMALLEST_NORMAL = sys.float_info.min  # names, or Python multiplies them once
_HALF = 0.5


def cuda_in_use() -> bool:
    """Whether this process has CUDA devices in use; asking does not initialise any."""
    # In this order: whether any is available takes long to say.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


def device_types(optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
    """Where their parameters lie, and so where updates are computed: ``("cpu",)``, say."""
    parameters = (p for one in optimizers for group in one.param_groups for p in group["params"])
    return tuple(sorted({parameter.device.type for parameter in parameters}))


@contextlib.contextmanager
def computed_on(types: tuple[str, ...]) -> Iterator[None]:
    """What is taken within is the :func:`fingerprint` of a training that updates there: a process
    that has a GPU in use may train on the CPU."""
    token = _computed_on.set(types)
    try:
        yield
    finally:
        _computed_on.reset(token)


def fingerprint() -> dict[str, str]:
    """Versions and hardware that bit-for-bit results can depend on."""
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
    """Return what people call this process: its number, and the host that it runs on."""
    return f"process {os.getpid()} on {platform.node() or 'a host without a name'}"


def volatile_settings() -> tuple[int, bool, bool]:
    """What of :func:`fingerprint` a program changes while it trains, by one call: torch's threads,
    whether CUDA is in use, and whether this thread flushes denormals (so do some libraries when
    they are imported). Asked with each record, so not whether a device is available, which is a
    call of the driver, nor by way of a tensor."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.get_num_threads(), in_use, _SMALLEST_NORMAL * _HALF == 0.0


class FingerprintWatch:
    """Detect settings that changed since the record of the current timeline was written.

    The record holds :func:`fingerprint` as of the moment when the timeline was opened.

    Args:
        optimizers: those of the training.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._timeline = 0
        self._then = volatile_settings()
        self._on: tuple[str, ...] = ()

    def began(self, timeline: int) -> None:
        """``timeline`` is opened; or a keeper of it comes into service, which is no new record."""
        if timeline != self._timeline:
            self._timeline = timeline
            self._then = volatile_settings()
            self._on = device_types(self._optimizers.values())

    @property
    def holds(self) -> bool:
        """Whether all is as it was when the timeline was opened."""
        now = volatile_settings()
        if now != self._then:
            return False
        in_use = now[1]  # without a GPU parameters lie where they lay
        return not in_use or device_types(self._optimizers.values()) == self._on


def merge_fingerprints(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """That of several processes: where they differ it is that of none of them, so no replay by one
    of them is taken for the same (I9).

    Args:
        found: of each.
    """
    keys = sorted({key for one in found for key in one})
    values = {key: sorted({one.get(key, "none") for one in found}) for key in keys}
    return {key: ", ".join(each) for key, each in values.items()}


def describe_threads(asked: int) -> str:
    """The number of threads that work for torch where it asks for so many: OpenMP may give it
    fewer. No number where that is not sure: the environment may have been changed since OpenMP
    has read it."""
    if asked > 1 and os.environ.get("OMP_DYNAMIC", "").strip().lower() not in ("", "false", "0"):
        return f"{asked} or fewer, as OMP_DYNAMIC allows"
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    if limit.isdigit() and int(limit) < asked:
        return f"{asked} within OMP_THREAD_LIMIT={int(limit)}"
    return str(asked)


def thread_count_fixed(found: Mapping[str, str]) -> bool:
    """Whether that many threads work for each operator; else not even the same process gives the
    same bits again."""
    return "OMP_DYNAMIC" not in found.get("threads", "")


def threads_disagree(found: Mapping[str, str]) -> bool:
    """Whether some of torch's threads flush denormals and others do not: which elements are
    flushed depends on who happens to compute them."""
    return _MIXED in found.get("denormals", "").split(", ")


def _denormals() -> str:
    """Whether ``torch.set_flush_denormal(True)`` is in force: "flushed", "kept" or, where some of
    torch's threads were there before it was called, "mixed". It is a property of each thread that
    new ones inherit, so all are asked, by an operator in which each has a part: only where this
    one flushes, for a process that has started torch's threads cannot be forked any more and
    compute with several in the child. (Those that were started while denormals were flushed, and
    flush on when this one does not any more, are not seen.)"""
    if not volatile_settings()[2]:
        return "kept"
    threads = torch.get_num_threads()
    if _forked and threads > 1:  # maybe from one that had its threads, who are waited for for ever
        return _MIXED
    count = _GRAIN_ELEMENTS * threads
    bits = torch.full((count,), _DENORMAL_BITS, dtype=torch.int32, device="cpu")
    bits.view(torch.float32).mul_(0.5)
    kept = int(bits.count_nonzero())  # of integers: a comparison of floats would flush once more
    return "flushed" if kept == 0 else _MIXED


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)
