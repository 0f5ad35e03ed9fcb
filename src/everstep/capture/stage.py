"""Memory on a device that takes a copy of captured state, so that updates need not wait for the
link (``Budget(device_bytes=)``).

A copy within a device takes a small part of the time of one to the host. The last batches of a
capture, in file order, are staged if they fit; those before them are copied to the host from the
state itself. An update then waits for the copies within the device, and for the link only as long
as the rest of the state takes.

All copies into the stage and out of it run on one side stream, in order: no part of it is
overwritten before it was copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.capture.batches import Batch

_CARRY_BYTES = 32 << 20  # of one copy from the stage to the host
_ALIGN_BYTES = 16  # of a staged batch
_WIDE = torch.int64  # each thread of a kernel copies four elements at a time


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """Copies of one device into its stage.

    Attributes:
        device: the device.
        begin: begin of the first staged batch in the file; all later ones are staged, too.
        batches: what is staged.
        groups: sources and targets of the copies, by dtype: one call for each group.
        rearranged: batches to be packed first, and their targets.
    """

    device: torch.device
    begin: int
    batches: Sequence[Batch]
    groups: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    rearranged: Sequence[tuple[Batch, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Division of a capture.

    Attributes:
        copies: copies into stages, one for each device with a stage.
        carried: all batches to copy to the host, in file order; staged ones are read from the
            stage, adjacent ones together.
        is_whole: every batch is staged.
        generation: of the stage's memory.
    """

    copies: Sequence[StagedCopy]
    carried: Sequence[Batch]
    is_whole: bool
    generation: int


class DeviceStage:
    """Stages of all devices of a lane. Used by the thread that enqueues copies.

    Args:
        bytes_max: memory on each device; None: as much as ``free`` returns.
        device_of: returns the device of a tensor.
        allocate: returns flat ``uint8`` memory on a device; None if it has none left.
        free: returns the bytes of a device that a stage may take.

    Attributes:
        generation: another number after memory was taken, or was refused; plans of others are void.
    """

    def __init__(
        self,
        bytes_max: int | None,
        device_of: Callable[[torch.Tensor], torch.device],
        allocate: Callable[[int, torch.device], torch.Tensor | None],
        free: Callable[[torch.device], int],
    ) -> None:
        self._bytes_max = bytes_max
        self._device_of = device_of
        self._allocate = allocate
        self._free = free
        self._memory: dict[torch.device, torch.Tensor] = {}
        self.generation = 0

    def plan(self, batches: Sequence[Batch]) -> StagePlan:
        """Divide a capture. Takes memory when it is first needed, and more when more is needed."""
        needed: dict[torch.device, int] = {}
        for batch in batches:
            device = self._device_of(batch.first)
            needed[device] = needed.get(device, 0) + _aligned(batch.size_bytes)
        left = {device: self._room(device, size) for device, size in needed.items()}
        staged: dict[torch.device, list[Batch]] = {device: [] for device in needed}
        full: set[torch.device] = set()
        for batch in reversed(batches):
            device = self._device_of(batch.first)
            size = _aligned(batch.size_bytes)
            if device in full or size > left[device]:
                full.add(device)
                continue
            left[device] -= size
            staged[device].append(batch)
        targets: dict[int, torch.Tensor] = {}  # by the begin of the batch in the file
        copies = [self._into(one, found[::-1], targets) for one, found in staged.items() if found]
        carried = list(_carried(batches, targets))
        return StagePlan(copies, carried, len(targets) == len(batches), self.generation)

    def close(self) -> None:
        """Give the memory back, in the order of the stream that it was allocated on."""
        self._memory = {}

    def _room(self, device: torch.device, needed_bytes: int) -> int:
        """Return the size of a device's stage, which is made larger if that helps."""
        size_bytes = self._memory[device].numel() if device in self._memory else 0
        if size_bytes >= needed_bytes or size_bytes == self._bytes_max:
            return size_bytes
        bytes_max = self._bytes_max
        if bytes_max is None:
            bytes_max = size_bytes + self._free(device)
        wanted = min(needed_bytes, bytes_max)
        if wanted > size_bytes:
            self.generation += 1
            # First: the device may not have the memory for both.
            self._memory.pop(device, None)
            for size in filter(None, (wanted, size_bytes)):
                if (memory := self._allocate(size, device)) is not None:
                    self._memory[device] = memory
                    break
        return self._memory[device].numel() if device in self._memory else 0

    def _into(
        self, device: torch.device, batches: Sequence[Batch], targets: dict[int, torch.Tensor]
    ) -> StagedCopy:
        """Return the copies of the batches into the stage, and add their targets."""
        memory = self._memory[device]
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        rearranged: list[tuple[Batch, torch.Tensor]] = []
        at = 0
        for batch in batches:
            target = memory[at : at + batch.size_bytes]
            targets[batch.begin] = target
            at += _aligned(batch.size_bytes)
            if batch.rearranged is not None:
                rearranged.append((batch, target))
            begin = 0
            for source in batch.sources:
                one, part = _widened(source, target[begin : begin + source.numel()])
                begin += source.numel()
                sources, parts = groups.setdefault(one.dtype, ([], []))
                sources.append(one)
                parts.append(part)
        return StagedCopy(device, batches[0].begin, batches, list(groups.values()), rearranged)


def _carried(batches: Sequence[Batch], targets: Mapping[int, torch.Tensor]) -> Iterator[Batch]:
    """Yield the batches, staged ones from the stage, adjacent ones of these as one."""
    run: list[torch.Tensor] = []
    begin = end = 0
    for batch in batches:
        target = targets.get(batch.begin)
        if run and not (
            target is not None
            and batch.begin == end
            and batch.end - begin <= _CARRY_BYTES
            and target.data_ptr() == run[-1].data_ptr() + run[-1].numel()
        ):
            yield Batch(begin, end, (_joined(run),))
            run = []
        if target is None:
            yield batch
            continue
        begin = begin if run else batch.begin
        end = batch.end
        run.append(target)
    if run:
        yield Batch(begin, end, (_joined(run),))


def _widened(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as wider elements, if their addresses and sizes allow it."""
    addresses = source.data_ptr() | target.data_ptr()
    # Imported memory may begin anywhere.
    offsets = int(source.storage_offset()) | int(target.storage_offset())
    if (addresses | offsets | source.numel()) % _WIDE.itemsize:
        return source, target
    return source.view(_WIDE), target.view(_WIDE)


def _joined(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one view of adjacent memory."""
    return views[0].as_strided((sum(view.numel() for view in views),), (1,))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
