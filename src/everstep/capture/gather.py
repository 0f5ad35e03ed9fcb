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

from everstep.seams.memory import memory_at

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
        kind = views[0].dtype if views else np.dtype(np.int8)
        width = kind.itemsize
        self._views: Sequence[npt.NDArray[Any]] = ()
        if (addresses % width).any():
            self._views = views  # elements that begin anywhere: NumPy would copy all between
            return
        first = int(addresses.min()) if addresses.size else 0
        last = int(addresses.max()) if addresses.size else -width
        self._where = (addresses - first) // width
        # Memory of whoever else lies in between; nothing of it is touched but the elements.
        self._between = np.frombuffer(memory_at(first, last + width - first), kind)

    def take(self) -> npt.NDArray[Any]:
        """The elements as they are now: of all views in order, each in row-major order."""
        if self._views:
            return np.concatenate([view.ravel() for view in self._views])
        # All are inside; to clip is the mode that does not check that before.
        return self._between.take(self._where, mode="clip")


def _addresses(view: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Of all elements of an array."""
    found = np.full(1, view.__array_interface__["data"][0], np.int64)
    for count, stride in zip(view.shape, view.strides, strict=True):
        found = (found[:, None] + stride * np.arange(count)).ravel()
    return found
