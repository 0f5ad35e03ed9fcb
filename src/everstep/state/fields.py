"""What torch keeps of a tensor, read as memory: whether anything about it can have changed.

To ask hundreds of tensors one after the other where they lie and what their form is takes longer
behind a step of training than all else in a save: each answer waits for memory that training has
put out of the caches. One indexed read (:mod:`everstep.seams.gather`) of all that torch keeps of
them has many on their way at once.

Where it keeps what is no public interface, so that is looked for when this is loaded: on a tensor
that is changed in every way there is, by what moves in its memory. It is used only if each change
is noticed, and only to see that *nothing* has moved: whatever has, the tensors are asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everstep.seams.gather import Gather

__all__ = ["Fields", "counters_of"]

_WORD = 8  # bytes
_WORDS = 22  # of torch's object that are looked through; it has no fewer
_STORAGE_WORDS = 8
_INLINE_DIMS = 5  # sizes and strides of more lie elsewhere
_TYPE = 8  # of a Python object, in bytes

_Words = npt.NDArray[np.int64]


class _Places(NamedTuple):
    """Where something lies, in bytes from where its object begins.

    Attributes:
        inner: in a Python tensor: the address of torch's own object.
        kept: in that: all that says what a tensor is, its storage included.
        storage: in a storage: where its memory is, and how much.
        counter: in torch's object: the address of its version counter.
        version: in a version counter: the version, of 32 bits.
    """

    inner: int
    kept: tuple[int, ...]
    storage: tuple[int, ...]
    counter: int
    version: int


class Fields:
    """What is kept of some tensors, as it was when this was made.

    Args:
        tensors: which have memory, and that whoever makes this keeps, storages included.
        places: where torch keeps it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], places: _Places) -> None:
        with torch._C.DisableTorchFunction():
            inner = [tensor._cdata for tensor in tensors]
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        # In this order: where a tensor still has the same object, that can be read, and so on.
        reads = [
            _reading(list(map(id, tensors)), (_TYPE, places.inner)),
            _reading(inner, places.kept),
            _reading(storages, places.storage),
        ]
        self._then = [(read, read.take().tobytes()) for read in reads if tensors]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Fields | None:
        """Those of ``tensors``; None where they cannot be read."""
        if _places is None or any(tensor.dim() > _INLINE_DIMS for tensor in tensors):
            return None
        return cls(tensors, _places)

    def hold(self) -> bool:
        """Whether all is as it was: types, storages, where these lie, offsets, shapes, strides,
        dtypes, and whether elements are conjugated or negated. Not: values."""
        return all(read.take().tobytes() == then for read, then in self._then)


def counters_of(tensors: Sequence[torch.Tensor]) -> Gather | None:
    """Reads the version counters of tensors that nobody else has, as ``uint32``; None where they
    cannot be read."""
    return None if _places is None else _versions(tensors, _places.counter, _places.version)


def _versions(tensors: Sequence[torch.Tensor], counter: int, version: int) -> Gather:
    counters = _reading([tensor._cdata for tensor in tensors], (counter,)).take()
    return Gather.at(counters + version, np.dtype(np.uint32))


def _reading(begins: Sequence[int], offsets: Sequence[int]) -> Gather:
    addresses = np.array(begins, np.int64)[:, None] + np.array(offsets, np.int64)
    return Gather.at(addresses.ravel(), np.dtype(np.int64))


# --- Where it lies ----------------------------------------------------------------------


def _words(address: int, count: int) -> _Words:
    found: _Words = _reading([address], range(0, count * _WORD, _WORD)).take()
    return found


def _large(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A view whose sizes, strides and offset are all unusual."""
    flat = torch.ones(9000, dtype=dtype, device="cpu")
    return flat.as_strided((2, 3, 4, 5, 6), (1999, 701, 211, 53, 7), 13)


def _find() -> _Places | None:
    tensor = _large()
    python = _words(id(tensor), type(tensor).__basicsize__ // _WORD)
    inner = np.flatnonzero(python == tensor._cdata)
    before = _words(tensor._cdata, _WORDS)
    held = tensor.requires_grad_() * tensor  # refers to it
    counted = _words(tensor._cdata, _WORDS) != before
    del held
    tensor = tensor.detach()
    moved = np.zeros(_WORDS, bool)
    pairs = _large(torch.complex64)
    others = pairs, pairs.conj(), torch._neg_view(pairs), _large().permute(4, 0, 3, 1, 2)
    for other in (*others, torch.ones(1, device="cpu")):
        begun = _words(tensor._cdata, _WORDS)
        tensor.data = other
        moved |= _words(tensor._cdata, _WORDS) != begun
    kept = np.flatnonzero(moved & ~counted)
    storage = tensor.untyped_storage()
    begun = _words(storage._cdata, _STORAGE_WORDS)
    storage.resize_(1 << 20)
    sized = np.flatnonzero(_words(storage._cdata, _STORAGE_WORDS) != begun)
    # A view shares the counter; what .data gives is the same but for that.
    shared = _words(tensor._cdata, _WORDS) == _words(tensor.detach()._cdata, _WORDS)
    apart = _words(tensor._cdata, _WORDS) != _words(tensor.data._cdata, _WORDS)
    counters = np.flatnonzero(shared & apart & ~counted)
    if len(inner) != 1 or len(counters) != 1 or not len(sized):
        return None
    counter = int(counters[0]) * _WORD
    (address,) = _reading([tensor._cdata], (counter,)).take()
    versions = [int(n) * 4 for n in range(2, 6) if _counts(tensor, int(address) + 4 * int(n))]
    if len(versions) != 1:
        return None
    kept_at, sized_at = (tuple(int(n) * _WORD for n in words) for words in (kept, sized))
    return _Places(int(inner[0]) * _WORD, kept_at, sized_at, counter, versions[0])


def _counts(tensor: torch.Tensor, address: int) -> bool:
    """Whether the version of a tensor lies there."""
    read = Gather.at(np.array([address], np.int64), np.dtype(np.uint32))
    for _ in range(3):
        if read.take()[0] != tensor._version:
            return False
        tensor.zero_()
    return True


def _swap(tensor: torch.Tensor) -> None:
    swap: Any = torch.utils.swap_tensors
    swap(tensor, torch.ones(4, 6, device="cpu"))


class _Other(torch.Tensor):
    pass


_CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda t: setattr(t, "data", t.clone()),
    lambda t: setattr(t, "data", t.double()),
    lambda t: setattr(t, "data", t.bfloat16()),
    lambda t: setattr(t, "data", t.view(torch.int32)),
    lambda t: setattr(t, "data", t[1:]),
    lambda t: setattr(t, "data", t[:, :5]),
    lambda t: setattr(t, "data", t[None]),
    lambda t: setattr(t, "data", torch.ones(24, device="cpu").view(2, 3, 2, 2, 1)),
    lambda t: setattr(t, "data", torch.ones(6, 4, device="cpu").t()),
    lambda t: setattr(t, "__class__", _Other),
    lambda t: t.set_(torch.ones(24, device="cpu").untyped_storage(), 0, (4, 6), (6, 1)),
    lambda t: t.set_(t.untyped_storage(), 1, (4, 5), (5, 1)),
    lambda t: t.resize_(2, 3),
    lambda t: t.resize_(40, 60),
    lambda t: t.untyped_storage().resize_(0),
    lambda t: t.untyped_storage().resize_(1 << 20),
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(1),
    lambda t: t.as_strided_((4, 6), (1, 4)),
    lambda t: t.as_strided_((4, 6), (0, 1)),
    _swap,
)
"""Of a float32 tensor of shape (4, 6)."""

_CHANGES_OF_PAIRS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda t: setattr(t, "data", t.conj()),
    lambda t: setattr(t, "data", torch._neg_view(t)),
)
"""Of a complex one."""


def _notices(places: _Places) -> bool:
    """Whether each change shows, and training does not."""
    changes = [(change, torch.float32) for change in _CHANGES]
    changes += [(change, torch.complex64) for change in _CHANGES_OF_PAIRS]
    for change, dtype in changes:
        tensors = [torch.ones(4, 6, dtype=dtype, device="cpu") for _ in range(3)]
        views = [tensor.detach() for tensor in tensors]
        fields = Fields(tensors, places)
        counters = _versions(views, places.counter, places.version)
        parameter = tensors[1].requires_grad_()
        loss: Any = (parameter * parameter).abs().sum()
        loss.backward()
        with torch.no_grad():
            parameter.sub_(0.5).mul_(2)
        if not fields.hold() or counters.take().tolist() != [t._version for t in tensors]:
            return False
        del loss  # which refers to it
        parameter.requires_grad_(False).grad = None
        change(tensors[1])
        if fields.hold():
            return False
    return True


def _load() -> _Places | None:
    if sys.implementation.name != "cpython":
        return None
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunction():
            places = _find()
            usable = places is not None and _notices(places)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return places if usable else None


_places = _load()
