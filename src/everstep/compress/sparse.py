"""Sparse forms of a flat tensor: the elements of largest magnitude, and their positions.

:func:`topk` keeps an exact number of elements (LowDiff section II-C: sparsification);
:func:`sampled_threshold` an approximate number with one pass less (TierCheck section 3.2: a
threshold from a sample, then one pass that extracts all elements above it).

One scan over a tensor, on any device, finds the elements:

``HostScan``    host memory: numpy in blocks that stay in the processor's cache
``DeviceScan``  plain torch: every device, and the reference for the others
``kernels``     Triton, for CUDA (a separate module, imported where triton is installed)

All searches compare keys (:mod:`everstep.compress.floats`) and all positions ascend, so results are
functions of the tensor's bits alone, whatever the device and the number of threads: elements of
equal magnitude are taken from the lowest index on. NaN and infinity are always kept, even beyond
the requested number, because the optimizer must see them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everstep.compress.floats import (
    FORMATS,
    NUMEL_MAX,
    FloatFormat,
    checked_flat,
    kept_count,
    narrowed,
)
from everstep.errors import FormatError, OptionError
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


_MARGIN = 4.0  # standard deviations of the sample between the filter and the exact threshold
_SLACK = 4  # with more candidates than this factor the sample was misleading


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Some elements of a flat tensor; all others are zero.

    Attributes:
        numel: elements of the tensor.
        indices: positions of the kept elements, int32, ascending.
        values: kept elements, in the dtype of the tensor or a narrower one (:meth:`to`).
    """

    numel: int
    indices: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, numel: int, positions: torch.Tensor, values: torch.Tensor) -> Sparse:
        """Make a form of ``values`` at ``positions`` (int64, ascending, unique) of ``numel``
        elements.
        """
        return cls(numel, positions.to(torch.int32), values)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of indices and values."""
        return self.indices.nbytes + self.values.nbytes

    def positions(self) -> torch.Tensor:
        """Return the positions of the values, int64."""
        return self.indices.to(torch.int64)

    def dense(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the flat tensor: the values at their positions, zero elsewhere.

        Args:
            out: flat tensor of ``numel`` elements to write to and return; values are rounded to its
                dtype if that is narrower.

        Raises:
            OptionError: ``out`` has another size.
        """
        if out is None:
            out = torch.empty(self.numel, dtype=self.dtype, device=self.values.device)
        elif out.shape != (self.numel,):
            raise OptionError(f"out has shape {list(out.shape)}, not [{self.numel}]")
        out.zero_()
        return out.index_copy_(0, self.positions(), narrowed(self.values, out.dtype))

    def part(self, begin: int, end: int) -> Sparse:
        """Return elements ``[begin, end)``, counted from ``begin``; the values are views."""
        edges = torch.tensor([begin, end], dtype=torch.int32, device=self.indices.device)
        low, high = torch.searchsorted(self.indices, edges).tolist()
        return Sparse.of(end - begin, self.indices[low:high] - begin, self.values[low:high])

    def to(self, dtype: torch.dtype) -> Sparse:
        """Return the same form with values in ``dtype``, rounded to nearest.

        float16 halves the size of float32 values and is lossy: finite values beyond 65504 become
        65504, those below 2**-25 zero. NaN and infinity stay.
        """
        return replace(self, values=narrowed(self.values, dtype))

    def check(self) -> None:
        """Check every index of a form from an untrusted source.

        Raises:
            FormatError: :meth:`dense` would write out of bounds or twice to one position.
        """
        kept = self.indices.numel()
        shapes_fit = self.indices.shape == self.values.shape == (kept,)
        if self.indices.dtype != torch.int32 or self.dtype not in FORMATS or not shapes_fit:
            raise FormatError("indices and values of a sparse gradient differ in dtype or shape")
        positions = self.positions()
        # In int64: differences of forged int32 indices could wrap around.
        ascending = bool((positions.diff() > 0).all())
        inside = kept == 0 or bool(positions[0] >= 0 and positions[-1] < self.numel)
        if not (ascending and inside and self.numel <= NUMEL_MAX):
            raise FormatError(
                f"a sparse gradient has indices out of order, or outside its {self.numel} elements"
            )


def topk(flat: torch.Tensor, ratio: float) -> Sparse:
    """Return the ``k = max(1, ceil(ratio numel))`` elements of largest magnitude, exactly.

    A threshold slightly below the exact one, estimated from a sample, leaves few candidates; the
    exact choice is made among these. If the sample misleads (few distinct values, nearly all zero),
    the exact threshold is found among all elements.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        ratio: fraction of elements to keep, in (0, 1].

    Returns:
        ``k`` elements; all non-finite ones if there are more than ``k``.

    Raises:
        OptionError: the tensor cannot be compressed.
    """
    scan = scan_of(flat, checked_flat(flat))
    return _sparse(scan, _largest(scan, kept_count(flat.numel(), ratio)))


def sampled_threshold(flat: torch.Tensor, ratio: float) -> Sparse:
    """Return about ``k = max(1, ceil(ratio numel))`` elements: all above an estimated threshold.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        ratio: fraction of elements to keep, in (0, 1].

    Returns:
        At least ``k / 2`` elements, or all nonzero ones if there are fewer; at most ``2 k``, or all
            non-finite ones if there are more. If the sample was not representative and the result
            is outside these bounds, the result of :func:`topk`.

    Raises:
        OptionError: the tensor cannot be compressed.
    """
    scan = scan_of(flat, checked_flat(flat))
    count = kept_count(flat.numel(), ratio)
    rank = max(1, round(count / flat.numel() * min(flat.numel(), SAMPLE_NUMEL)))
    low = _threshold(scan, rank)
    found = scan.at_least(low, 2 * count)
    # At a threshold of 1 these are all nonzero elements, however few.
    if found is None or (2 * found.found < count and low > 1):
        found = _largest(scan, count)
    return _sparse(scan, found)


def nonzero_count(flat: torch.Tensor) -> int:
    """Return the number of elements that are not +0.0."""
    form = FORMATS[flat.dtype]
    # numpy counts at memory speed, two to three times as fast as torch.
    if flat.device.type == "cpu":
        flat = flat.contiguous()
        return int(np.count_nonzero(np.frombuffer(host_bytes(flat), form.unsigned)))
    return int(torch.count_nonzero(flat.view(form.signed)))


def _sparse(scan: DeviceScan, hits: Hits) -> Sparse:
    return Sparse.of(scan.numel, hits.positions, hits.patterns.view(scan.flat.dtype))


def _largest(scan: DeviceScan, count: int) -> Hits:
    """Return the elements of the ``count`` greatest keys, and all non-finite elements."""
    candidates = _candidates(scan, count)
    if candidates is None:
        return _by_exact_threshold(scan, count)
    # Fewer candidates are all nonzero elements: fill up with zeros.
    if candidates.found < count:
        return _merged(candidates, scan.equal(0, count - candidates.found))
    keys = scan.keys(candidates.patterns)
    threshold = scan.kth_of(keys, count)
    # At least `count` elements are not finite, and all of these are kept.
    if threshold >= scan.form.infinity:
        return candidates.where(keys >= scan.form.infinity)
    keep = keys > threshold
    # Candidates are in ascending order of position, so the first ties have the lowest indices.
    ties = torch.nonzero(keys == threshold).view(-1)
    keep[ties[: count - int(keep.sum())]] = True
    return candidates.where(keep)


def _candidates(scan: DeviceScan, count: int) -> Hits | None:
    """Return slightly more than ``count`` elements, with all of the greatest among them.

    Fewer than ``count`` only if these are all nonzero elements. None if the sample misled.
    """
    rank = count
    if scan.numel > SAMPLE_NUMEL:
        expected = count / scan.numel * SAMPLE_NUMEL
        # The number of sampled elements above the exact threshold varies by about sqrt(expected). A
        # rank beyond that gives a filter below the exact threshold; the constant is for small
        # samples.
        rank = math.ceil(expected + _MARGIN * math.sqrt(expected) + _MARGIN)
        if rank > SAMPLE_NUMEL // 2:
            return None
    low = _threshold(scan, rank)
    found = scan.at_least(low, _SLACK * count + SAMPLE_NUMEL)
    return found if found is not None and (found.found >= count or low == 1) else None


def _threshold(scan: DeviceScan, rank: int) -> int:
    """Return the ``rank``-th greatest key of a sample.

    At least 1: zeros are only ever taken from the lowest index on. At most infinity's key, because
    NaN has greater ones.
    """
    sample = scan.at(sample_positions(scan.numel, scan.flat.device))
    key = scan.kth_of(scan.keys(sample.patterns), rank)
    return min(max(1, key), scan.form.infinity)


def _by_exact_threshold(scan: DeviceScan, count: int) -> Hits:
    # Below infinity, so that all non-finite elements count as above the threshold.
    threshold = min(scan.kth(count), scan.form.infinity - 1)
    above = scan.at_least(threshold + 1, scan.numel)
    assert above is not None
    return _merged(above, scan.equal(threshold, max(0, count - above.found)))


def _merged(one: Hits, other: Hits) -> Hits:
    both = Hits(*(torch.cat(pair) for pair in zip(one, other, strict=True)))
    # Sparse needs ascending positions.
    return both.where(both.positions.argsort())
