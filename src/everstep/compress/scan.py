"""Search for the elements of largest magnitude: one scan over a tensor, on any device.

All searches compare keys (:mod:`everstep.compress.floats`) and all positions ascend, so results do
not depend on the device, the number of threads or the order of execution.

``HostScan``    host memory: numpy in blocks that stay in the processor's cache
``DeviceScan``  plain torch: every device, and the reference for the others
``kernels``     Triton, for CUDA (a separate module, imported where triton is installed)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everstep.compress.floats import FORMATS, FloatFormat
from everstep.state.values.tensors import host_bytes

SAMPLE_NUMEL: Final = 2**16
"""Elements in a sample. At a ratio of 1 % the threshold is estimated from 655 of them, and the
number of kept elements has a standard deviation of 4 %."""

_log = logging.getLogger("everstep")

_BLOCK_BYTES = 2**18  # fits a second-level cache with its temporaries


class Hits(NamedTuple):
    """Elements found by a scan.

    Attributes:
        positions: positions, int64, ascending.
        patterns: bits of the elements, in the signed integer of the same width.
    """

    positions: torch.Tensor
    patterns: torch.Tensor

    @property
    def found(self) -> int:
        """Number of elements."""
        return self.positions.numel()

    def where(self, keep: torch.Tensor) -> Hits:
        """Return the elements selected by ``keep``: a mask (bool), or their order (int64)."""
        if keep.device.type == "cpu":  # numpy is four times as fast
            chosen = keep.numpy()
            picked = (part.numpy()[chosen] for part in self)
            return Hits(*(torch.from_numpy(part) for part in picked))
        return Hits(self.positions[keep], self.patterns[keep])


class DeviceScan:
    """Scan of one flat tensor by plain torch operators.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        form: its format.
    """

    def __init__(self, flat: torch.Tensor, form: FloatFormat) -> None:
        self.flat = flat
        self.form = form

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def keys(self, patterns: torch.Tensor) -> torch.Tensor:
        """Return the keys of elements with these bits, in the same integer dtype."""
        return patterns & self.form.mask

    def at(self, positions: torch.Tensor) -> Hits:
        """Return the elements at ``positions``."""
        return Hits(positions, self.flat.view(self.form.signed)[positions])

    def at_least(self, key: int, most: int) -> Hits | None:
        """Return all elements with at least this key; None if there are more than ``most``."""
        found = torch.nonzero(self._all_keys() >= key).view(-1)
        return self.at(found) if found.numel() <= most else None

    def equal(self, key: int, count: int) -> Hits:
        """Return the first ``count`` elements with exactly this key."""
        return self.at(torch.nonzero(self._all_keys() == key).view(-1)[:count])

    def kth(self, count: int) -> int:
        """Return the ``count``-th greatest key of the tensor."""
        return self.kth_of(self._all_keys(), count)

    def kth_of(self, keys: torch.Tensor, count: int) -> int:
        """Return the ``count``-th greatest of ``keys``."""
        return int(torch.topk(keys, count, sorted=False).values.min().item())

    def _all_keys(self) -> torch.Tensor:
        return self.keys(self.flat.view(self.form.signed))


class HostScan(DeviceScan):
    """Scan of host memory: numpy over blocks, without temporaries as large as the tensor."""

    def __init__(self, flat: torch.Tensor, form: FloatFormat) -> None:
        super().__init__(flat, form)
        # The array does not own the memory; self.flat keeps it alive.
        self._bits: npt.NDArray[Any] = np.frombuffer(host_bytes(flat), dtype=form.unsigned)
        self._block = _BLOCK_BYTES // self._bits.itemsize

    def at_least(self, key: int, most: int) -> Hits | None:
        # Twice the pattern is twice the key: the sign is shifted out by the overflow.
        low = self.form.unsigned(2 * key)
        twice = np.empty(min(self._block, self.numel), dtype=self.form.unsigned)
        hits = np.empty(twice.shape, dtype=np.bool_)
        found = _Found(self.form)
        for begin, block in self._blocks():
            doubled = twice[: block.size]
            hit = hits[: block.size]
            np.add(block, block, out=doubled)
            np.greater_equal(doubled, low, out=hit)
            found.add(begin, block, np.flatnonzero(hit))
            if found.count > most:
                return None
        return found.hits()

    def equal(self, key: int, count: int) -> Hits:
        found = _Found(self.form)
        for begin, block in self._blocks():
            if found.count == count:
                break
            hit = (block & self.form.unsigned(self.form.mask)) == key
            found.add(begin, block, np.flatnonzero(hit)[: count - found.count])
        return found.hits()

    def kth_of(self, keys: torch.Tensor, count: int) -> int:
        place = keys.numel() - count
        return int(np.partition(keys.numpy(), place)[place])

    def _blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for begin in range(0, self._bits.size, self._block):
            yield begin, self._bits[begin : begin + self._block]


class _Found:
    """Collected hits of all blocks; bits are copied while the block is in the cache."""

    def __init__(self, form: FloatFormat) -> None:
        self.count = 0
        self._form = form
        self._positions: list[npt.NDArray[np.intp]] = [np.empty(0, dtype=np.intp)]
        self._patterns: list[npt.NDArray[Any]] = [np.empty(0, dtype=form.unsigned)]

    def add(self, begin: int, block: npt.NDArray[Any], where: npt.NDArray[np.intp]) -> None:
        self._patterns.append(block[where])
        where += begin
        self._positions.append(where)
        self.count += where.size

    def hits(self) -> Hits:
        patterns = np.concatenate(self._patterns).view(f"i{self._form.unsigned().itemsize}")
        positions = np.concatenate(self._positions)
        return Hits(torch.from_numpy(positions), torch.from_numpy(patterns))


def scan_of(flat: torch.Tensor, form: FloatFormat) -> DeviceScan:
    """Return the fastest scan for the device of ``flat``."""
    if flat.device.type == "cpu":
        return HostScan(flat, form)
    kernels = kernels_for(flat)
    if kernels is not None:
        scan: DeviceScan = kernels.TritonScan(flat, form)
        return scan
    return DeviceScan(flat, form)


def sample_positions(numel: int, device: torch.device) -> torch.Tensor:
    """Return up to ``SAMPLE_NUMEL`` positions (int64, ascending), one per stride. Read-only: it may
    be cached.

    The position within a stride is a function of its number. A fixed offset would sample the same
    column of every row if the stride is a multiple of the row.
    """
    if numel <= SAMPLE_NUMEL:
        return torch.arange(numel, device=device)
    # Cached in host memory only: a stream of a device would have to wait for the one that computed
    # them.
    strides = _strides if device.type == "cpu" else _strides.__wrapped__
    return strides(numel // SAMPLE_NUMEL, SAMPLE_NUMEL, device)


# Models have few distinct sizes, and each takes a while to compute.
@functools.lru_cache(maxsize=32)
def _strides(stride: int, count: int, device: torch.device) -> torch.Tensor:
    number = torch.arange(count, device=device)
    mixed = ((number + 1) * 0x9E3779B1) & 0xFFFFFFFF  # golden ratio
    # The product may exceed int64 and wraps around; its low 32 bits are right all the same.
    mixed = (((mixed >> 15) ^ mixed) * 0x85EBCA6B) & 0xFFFFFFFF  # as in MurmurHash3
    return number * stride + (mixed >> 8) % stride


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """Return the module of Triton kernels if they can run on ``tensor``."""
    return _kernels_on(tensor.device) if tensor.is_cuda else None


@functools.cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    """Return the module if triton is installed and its compiled kernels work: that takes a C
    compiler, which many containers lack, and a GPU that this triton supports.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        # The kernel is run and compared here, once: compilers and drivers fail at the first launch.
        module = importlib.import_module("everstep.compress.kernels")
        sample = torch.arange(-8.0, 9.0, dtype=torch.float32, device=device)
        form = FORMATS[torch.float32]
        reference = DeviceScan(sample, form)
        key = reference.kth(4)
        wanted = reference.at_least(key, 4)
        found = module.TritonScan(sample, form).at_least(key, 4)
        if wanted is not None and found is not None and all(map(torch.equal, wanted, found)):
            return module
        why = "their result differs from torch's"
    except Exception as error:  # of the compiler or the driver
        why = repr(error)
    _log.warning("everstep: Triton kernels do not work on %s, using plain torch: %s", device, why)
    return None
