"""Version counters of tensors: detect writes in place, as far as torch counts them.

They are hints and no proof: ``.data`` writes, NumPy, fused kernels and collectives do not increase
them. But if one has increased between two updates, something was written (I8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

import torch

_VERSION = attrgetter("_version")


class Versions:
    """Version counters of some tensors.

    Args:
        tensors: tensors by name. Tensors that share their storage with anything else are left out,
            because they may share the counter; so are inference tensors, which have none.
        beside: all other tensors that might share a counter, if they are known. Then a storage is
            counted even if a part of it belongs to no tensor (a slice of a larger table). None if
            anything might.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], beside: Iterable[torch.Tensor] | None = None
    ) -> None:
        counted = _counted(tensors, beside)
        self._names = tuple(counted)
        self._tensors = tuple(counted.values())

    def now(self) -> list[int]:
        """Return the counters."""
        return list(map(_VERSION, self._tensors))

    def moved(self, since: list[int], but: Collection[str] = ()) -> str | None:
        """Return the name of a tensor written to since the counters were ``since``; None if there
        is none.

        Args:
            but: names to ignore.
        """
        now = self.now()
        if now == since:
            return None
        pairs = zip(self._names, now, since, strict=True)
        found = (name for name, version, seen in pairs if version != seen)
        return next((name for name in found if name not in but), None)


def _counted(
    tensors: Mapping[str, torch.Tensor], beside: Iterable[torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return tensors whose storage holds no tensors but these, or none of the known others."""
    able = {name: tensor for name, tensor in tensors.items() if _has_counter(tensor)}
    storages = {name: tensor.untyped_storage() for name, tensor in able.items()}
    runs: dict[int, list[tuple[int, int]]] = {}  # of bytes
    for name, tensor in able.items():
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        # By the address of the C++ storage: two tensors on one storage may have different Python
        # wrappers of it.
        runs.setdefault(storages[name]._cdata, []).append((begin, end))
    ends = {storage: _end_of(found) for storage, found in runs.items()}
    others = None if beside is None else {storage_of(tensor) for tensor in beside}

    def is_counted(storage: torch.UntypedStorage) -> bool:
        # Filled without a gap: no other tensor has memory of its own there.
        if ends[storage._cdata] == storage.nbytes():
            return True
        return others is not None and storage._cdata not in others

    return {name: tensor for name, tensor in able.items() if is_counted(storages[name])}


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of the storage that a tensor lies in; 0 if it has no storage of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _end_of(runs: list[tuple[int, int]]) -> int:
    """Return the end of the contiguous bytes from the first one."""
    runs.sort()
    end = 0
    for begin, to in runs:
        if begin > end:
            break
        end = max(end, to)
    return end


def _has_counter(tensor: torch.Tensor) -> bool:
    if tensor.is_inference() or not tensor.numel():
        return False
    fills_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    # The byte range in _counted() assumes that the elements are adjacent in memory.
    return fills_storage or tensor.is_contiguous()
