"""Version counters: who has written to a tensor in place, at least as far as torch tells.

They are hints and no proof: they do not move for ``.data`` writes, NumPy, fused kernels and
collectives. But where one has moved between two updates, something was written (I8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

import torch

__all__ = ["Versions", "storage_of"]

_VERSION = attrgetter("_version")


class Versions:
    """The counters of some tensors.

    Args:
        tensors: by name. Those that share their storage with anything else are left out, because
            they may share the counter as well; so are inference tensors, which have none.
        beside: all else that might share it, where that is known: a storage of which a part is
            nobody's (a slice of a larger table) is counted, too. None: anything might.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], beside: Iterable[torch.Tensor] | None = None
    ) -> None:
        counted = _counted(tensors, beside)
        self._names = tuple(counted)
        self._tensors = tuple(counted.values())

    def now(self) -> list[int]:
        """The counters."""
        return list(map(_VERSION, self._tensors))

    def moved(self, since: list[int], but: Collection[str] = ()) -> str | None:
        """The name of a tensor that was written to since they were so; None if there is none.

        Args:
            but: names that are of no interest.
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
    """Those in whose storage nothing lies but tensors that are among them; or, where it is known
    what else there is, nothing of that."""
    able = {name: tensor for name, tensor in tensors.items() if _has_counter(tensor)}
    storages = {name: tensor.untyped_storage() for name, tensor in able.items()}
    runs: dict[int, list[tuple[int, int]]] = {}  # of bytes
    for name, tensor in able.items():
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        runs.setdefault(storages[name]._cdata, []).append((begin, end))
    ends = {storage: _end_of(found) for storage, found in runs.items()}
    others = None if beside is None else {storage_of(tensor) for tensor in beside}

    def is_counted(storage: torch.UntypedStorage) -> bool:
        if ends[storage._cdata] == storage.nbytes():
            return True
        return others is not None and storage._cdata not in others

    return {name: tensor for name, tensor in able.items() if is_counted(storages[name])}


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in, the same for all that do; 0: it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _end_of(runs: list[tuple[int, int]]) -> int:
    """How far these bytes go from the first one without a gap."""
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
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return alone or tensor.is_contiguous()
