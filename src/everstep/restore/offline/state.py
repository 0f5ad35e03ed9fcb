"""State of one rank in host memory, without the program that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from everstep.format.digests import digest
from everstep.format.records import Marker
from everstep.state.layout.entries import Entry
from everstep.state.values.tensors import host_bytes


@dataclass(slots=True, eq=False)
class OfflineState:
    """Entries of a state as CPU tensors, and its objects.

    Of a base of several ranks it is the share that one of them writes, or the state that one
    process would restore.

    Attributes:
        marker: marker of the base.
        entries: entries of tensors by name, in the order of the base's files.
        tensors: values by name, contiguous.
        aliases: ``other name -> entry name``.
        objects: encoded objects by entry name.
        shape: shape of the state (see :mod:`everstep.state.layout.entries`).
        step, lsn: of the state; those of the base before anything was replayed.
    """

    marker: Marker
    entries: dict[str, Entry]
    tensors: dict[str, torch.Tensor]
    aliases: Mapping[str, str]
    objects: dict[str, bytes]
    shape: str
    step: int = field(init=False)
    lsn: int = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.marker.step
        self.lsn = self.marker.lsn

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors and objects."""
        tensors = sum(entry.size_bytes for entry in self.entries.values())
        return tensors + sum(map(len, self.objects.values()))

    def canonical(self, name: str) -> str:
        """Return the name of the entry that any name of a tensor stands for."""
        return self.aliases.get(name, name)

    def digests(self) -> dict[str, str]:
        """Return the digest of every entry, objects included, as a base of this state has them."""
        found = {name: self.digest_of(name) for name in self.entries}
        return found | {name: digest(data) for name, data in self.objects.items()}

    def digest_of(self, name: str) -> str:
        """Return the digest of a tensor's entry."""
        flat = self.tensors[name].contiguous()  # must live until its bytes are digested
        return digest(host_bytes(flat))

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of a tensor's entry in row-major order, valid while the tensor
        exists."""
        tensor = self.tensors[name]
        if not tensor.is_contiguous():
            flat = tensor.contiguous()  # must live until its bytes are copied
            return memoryview(bytes(host_bytes(flat)))
        return host_bytes(tensor)
