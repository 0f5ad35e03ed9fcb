"""Fast reads of scattered elements in host memory.

The spot check samples a few elements of each tensor, and none of them is in a cache. A loop over
the tensors waits for one memory access after the other. One indexed read over the whole address
range keeps many accesses in flight and takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_NO_ADDRESSES = np.empty(0, np.int64)


class Gather:
    """Read the same elements repeatedly.

    Args:
        views: arrays of one integer dtype of at most 8 bytes. The caller keeps their memory mapped
            and in place while this object is used.
    """

    def __init__(self, views: Sequence[npt.NDArray[Any]]) -> None:
        addresses = np.concatenate([_NO_ADDRESSES, *map(_addresses, views)])
        self._place(addresses, views[0].dtype if views else np.dtype(np.int8))

    @classmethod
    def at(cls, addresses: npt.NDArray[np.int64], kind: np.dtype[Any]) -> Gather:
        """Return a reader of one element at each address, under the same conditions."""
        gather = cls.__new__(cls)
        gather._place(addresses, kind)
        return gather

    def _place(self, addresses: npt.NDArray[np.int64], kind: np.dtype[Any]) -> None:
        self._kind = kind
        width = kind.itemsize
        if width > 1 and (addresses % width).any():
            # Unaligned elements are read byte by byte: NumPy would copy the whole range.
            addresses = (addresses[:, None] + np.arange(width)).ravel()
            kind = np.dtype(np.uint8)
            width = 1
        first = int(addresses.min()) if addresses.size else 0
        last = int(addresses.max()) if addresses.size else -width
        # Without a remainder: all addresses are multiples of the width here.
        self._where = (addresses - first) // width
        # The range spans memory of other owners, too: only the selected elements are read.
        self._between = _array_at(first, (last - first) // width + 1, kind)

    def take(self) -> npt.NDArray[Any]:
        """Return the current elements of all views in order, each view in row-major order."""
        # All positions are valid; mode="clip" skips NumPy's bounds check pass.
        found: npt.NDArray[Any] = self._between.take(self._where, mode="clip").view(self._kind)
        return found


class _Memory:
    """Range of this process's memory as a NumPy array interface. (A ctypes array would create a
    type for each length, ten times slower.)
    """

    def __init__(self, address: int, count: int, kind: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (count,),
            "typestr": kind.str,
        }


def _array_at(address: int, count: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.asarray(_Memory(address, count, kind)) if count else np.empty(0, kind)


def _addresses(view: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the addresses of all elements of an array."""
    found = np.full(1, view.__array_interface__["data"][0], np.int64)
    for count, stride in zip(view.shape, view.strides, strict=True):
        found = (found[:, None] + stride * np.arange(count)).ravel()
    return found
