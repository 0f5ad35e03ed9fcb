"""Elements that lie here and there in host memory, read in one go.

Each tensor is looked at in a few places, and none of these is in a cache: a loop over the
tensors waits for one place after the other. One indexed read of all memory between the first
element and the last has many on their way at once, and takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Gather"]

_NO_ADDRESSES = np.empty(0, np.int64)


class Gather:
    """Reads the same elements again and again.

    Args:
        views: arrays over memory that stays where it is as long as this is used; whoever makes
            them sees to that. All of one integer dtype, of up to 8 bytes.
    """

    def __init__(self, views: Sequence[npt.NDArray[Any]]) -> None:
        addresses = np.concatenate([_NO_ADDRESSES, *map(_addresses, views)])
        self._place(addresses, views[0].dtype if views else np.dtype(np.int8))

    @classmethod
    def at(cls, addresses: npt.NDArray[np.int64], kind: np.dtype[Any]) -> Gather:
        """Reads one element at each of these addresses, under the same conditions."""
        gather = cls.__new__(cls)
        gather._place(addresses, kind)
        return gather

    def _place(self, addresses: npt.NDArray[np.int64], kind: np.dtype[Any]) -> None:
        self._kind = kind
        width = kind.itemsize
        if width > 1 and (addresses % width).any():
            # Elements that begin anywhere, byte by byte: NumPy would copy all between.
            addresses = (addresses[:, None] + np.arange(width)).ravel()
            kind = np.dtype(np.uint8)
            width = 1
        first = int(addresses.min()) if addresses.size else 0
        last = int(addresses.max()) if addresses.size else -width
        self._where = (addresses - first) // width
        # Memory of whoever else lies in between; nothing of it is touched but the elements.
        self._between = _array_at(first, (last - first) // width + 1, kind)

    def take(self) -> npt.NDArray[Any]:
        """The elements as they are now: of all views in order, each in row-major order."""
        # All are inside; to clip is the mode that does not check that before.
        found: npt.NDArray[Any] = self._between.take(self._where, mode="clip").view(self._kind)
        return found


class _Memory:
    """Elements of this process's memory, as NumPy asks for them. (A ctypes array would take a new
    type for each length: ten times as long.)"""

    def __init__(self, address: int, count: int, kind: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # not to be written to
            "shape": (count,),
            "typestr": kind.str,
        }


def _array_at(address: int, count: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.asarray(_Memory(address, count, kind)) if count else np.empty(0, kind)


def _addresses(view: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Of all elements of an array."""
    found = np.full(1, view.__array_interface__["data"][0], np.int64)
    for count, stride in zip(view.shape, view.strides, strict=True):
        found = (found[:, None] + stride * np.arange(count)).ravel()
    return found
