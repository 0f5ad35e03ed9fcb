"""Reads a base into live objects, verifying every byte on the way.

Records, headers and objects are read and compared with the live state first; until then
nothing is touched. Then the tensors are streamed straight into live memory where the live
tensor has the saved dtype and shape. A damaged entry is noticed at its end: what has been
overwritten by then is made good by the next older base, or the caller is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.errors import DamageError, FormatError, MismatchError, RecoveryError
from everstep.format.digests import digest
from everstep.format.reader import read_body
from everstep.format.records import Marker
from everstep.format.writer import ChunkRing
from everstep.recover.opened import OpenBase
from everstep.recover.shape import shape_of_base
from everstep.seams.machine import memory_available_bytes
from everstep.seams.progress import ProgressSink
from everstep.state.entries import Entry
from everstep.state.image import OBJECT_BYTES_MAX, OBJECT_PREFIX, State
from everstep.state.layout import Placed, overlaps
from everstep.state.objects import decode
from everstep.state.providers import RestorePlan
from everstep.state.tensors import empty_like_entry, host_bytes
from everstep.state.tree import join, references

__all__ = ["LoadedBase", "contents", "load_base"]


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """What was restored.

    Attributes:
        mismatches: what was left out, with ``strict=False``.
        notes: what this machine could not take back, in words.
        shape: what it consists of (see :mod:`everstep.state.shapes`).
    """

    marker: Marker
    size_bytes: int
    entries: int
    mismatches: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    shape: str = ""


def contents(opened: OpenBase) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Object trees by section, and entries by every name, which fit each other.

    Raises:
        DamageError, FormatError: they do not, or cannot be read.
    """
    trees, entries = _objects(opened), opened.entries()
    for tree in trees.values():
        missing = [name for name in references(tree) if name not in entries]
        if missing:
            raise FormatError(f"entry {missing[0]!r} is referred to but not there")
    _refuse_unused(opened, trees, entries)
    return trees, entries


def load_base(
    opened: OpenBase,
    state: State,
    ring: ChunkRing,
    *,
    strict: bool,
    timeout_s: float,
    progress: ProgressSink,
    on_touch: Any = lambda: None,
) -> LoadedBase:
    """Restores ``state`` from an open base.

    Args:
        strict: refuse any difference in names, shapes or dtypes; otherwise the rest is loaded.
        on_touch: called once, just before the first byte of live state is overwritten.

    Raises:
        MismatchError: listing every difference; nothing has been touched.
        DamageError: naming file and entry; live state may be partly overwritten.
    """
    trees, entries = contents(opened)
    plans = state.plan_restore(trees, entries)
    mismatches = tuple(item for plan in plans.values() for item in plan.mismatches)
    if mismatches and strict:
        listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
        raise MismatchError(
            f"the checkpoint and the live state differ in {len(mismatches)} place(s):\n{listed}",
            mismatches=mismatches,
            step=opened.marker.step,
            hint="build the same model and optimizer, or resume(strict=False) to load the rest",
        )
    tensors, copies = _targets(plans, entries)
    targets = _by_entry(opened, tensors, copies)
    shared = _sharing_memory(opened, tensors)
    on_touch()
    for file, record, header, path in opened.shards:
        scatter = _Scatter(header.placed, targets)
        read_body(
            file,
            header,
            record,
            path,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            sink=scatter.write,
        )
    for source, live in copies:
        _write_into(live, source)
    for name, expected in shared.items():
        flat = tensors[name].resolve_conj().resolve_neg().contiguous().cpu()
        if digest(host_bytes(flat)) != expected:
            raise _untied(name)
    notes: list[str] = []
    for section in state.restore_order():
        plan = plans[section]
        if plan.tree is not None:
            tree = join(plan.tree, tensors)
            notes += state.providers[section].restore(tree, strict=strict)
    aliases = {k: v for _, _, header, _ in opened.shards for k, v in header.aliases.items()}
    shape = shape_of_base(opened.placed(), aliases, trees)
    placed = opened.placed()
    return LoadedBase(
        opened.marker, opened.size_bytes, len(placed), mismatches, tuple(notes), shape
    )


def _objects(opened: OpenBase) -> dict[str, Any]:
    """The decoded object trees by section, each verified against its digest.

    Raises:
        DamageError: naming the entry.
        FormatError: for bytes that are no objects.
    """
    trees: dict[str, Any] = {}
    for file, _, header, path in opened.shards:
        for place, expected in zip(header.placed, header.digests, strict=True):
            name = place.entry.name
            if not name.startswith(OBJECT_PREFIX):
                continue
            if place.end - place.begin > OBJECT_BYTES_MAX:
                raise FormatError(f"{path}: {name!r} is too large for an object", path=path)
            data = bytearray(place.end - place.begin)
            got = file.read_into(memoryview(data), header.room_bytes + place.begin)
            if got != len(data) or digest(memoryview(data)) != expected:
                raise DamageError(
                    f"{path}: entry {name!r} is damaged: its digest does not match",
                    entry=name,
                    path=path,
                    step=header.identity.step,
                    rank=header.identity.rank,
                )
            trees[name.removeprefix(OBJECT_PREFIX)] = decode(bytes(data))
    return trees


def _targets(
    plans: Mapping[str, RestorePlan], entries: Mapping[str, Entry]
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tensors by the name by which trees refer to them, and copies to make at the end.

    A live tensor that can be read into as it lies is its own target. One that cannot (on a
    device, not contiguous) gets a fresh contiguous one first and a copy at the end.
    """
    tensors: dict[str, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    fresh: list[str] = []
    for plan in plans.values():
        if plan.tree is None:
            continue
        for name in references(plan.tree):
            live = plan.in_place.get(name)
            if live is not None:
                tensors[name] = live
                if not _readable_in_place(live):
                    copies.append((empty_like_entry(entries[name]), live))
            else:
                fresh.append(name)
    # Tensors that were one when they were saved become one again.
    distinct = {entries[name].name: entries[name] for name in fresh}
    claimed = sum(entry.size_bytes for entry in distinct.values())
    if claimed > memory_available_bytes():  # before any of it is taken
        raise FormatError(
            f"the checkpoint claims {claimed} bytes of state that is not here yet; this machine "
            f"has {memory_available_bytes()} bytes of memory left"
        )
    made = {name: empty_like_entry(entry) for name, entry in distinct.items()}
    tensors.update({name: made[entries[name].name] for name in fresh})
    return tensors, copies


def _refuse_unused(
    opened: OpenBase, trees: Mapping[str, Any], entries: Mapping[str, Entry]
) -> None:
    """An entry that nothing refers to is none of ours; a hostile one could be of any size."""
    used = {entries[name].name for tree in trees.values() for name in references(tree)}
    for place in opened.placed():
        name = place.entry.name
        if name not in used and not name.startswith(OBJECT_PREFIX):
            raise FormatError(f"entry {name!r} is there, but nothing refers to it")


def _readable_in_place(tensor: torch.Tensor) -> bool:
    plain = not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and plain


def _by_entry(
    opened: OpenBase,
    tensors: Mapping[str, torch.Tensor],
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, list[memoryview]]:
    """Memory to fill, by entry; an alias that is not tied here adds a second one."""
    canonical = _canonical(opened)
    staged = {id(live): source for source, live in copies}
    targets: dict[str, list[memoryview]] = {}
    for name, tensor in tensors.items():
        target = staged.get(id(tensor), tensor)
        targets.setdefault(canonical.get(name, name), []).append(host_bytes(target))
    return targets


def _canonical(opened: OpenBase) -> dict[str, str]:
    """``other name -> entry`` of all shards."""
    return {
        other: name for _, _, header, _ in opened.shards for other, name in header.aliases.items()
    }


def _sharing_memory(opened: OpenBase, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """``name -> digest`` of tensors that overlap in memory here, but are different entries:
    only what they hold in the end tells whether all of them got what was saved for them.

    Raises:
        RecoveryError: where two of them are the same memory and cannot both get their values.
    """
    canonical = _canonical(opened)
    digests = {
        place.entry.name: hex_
        for _, _, header, _ in opened.shards
        for place, hex_ in zip(header.placed, header.digests, strict=True)
    }
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + _extent_bytes(t), name)
        for name, t in tensors.items()
        if t.numel()
    )
    found: dict[str, str] = {}
    cluster: list[str] = []
    same: dict[tuple[Any, ...], str] = {}
    on, reach = "", 0
    for device, begin, end, name in [*spans, ("end", 0, 0, "")]:
        if device != on or begin >= reach:
            if len({canonical.get(other, other) for other in cluster}) > 1:
                found.update({other: digests[canonical.get(other, other)] for other in cluster})
            on, reach, cluster, same = device, end, [], {}
        if not name:
            break
        cluster.append(name)
        reach = max(reach, end)
        tensor, mine = tensors[name], digests[canonical.get(name, name)]
        if same.setdefault((begin, tensor.shape, tensor.stride(), tensor.dtype), mine) != mine:
            raise _untied(name)
    return found


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element, gaps included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()


def _untied(name: str) -> RecoveryError:
    return RecoveryError(
        f"{name!r} shares its memory with another tensor here, but different values are saved "
        "for the two",
        hint="build the model with the same tied weights and views as when it was saved",
    )


class _Scatter:
    """Puts the bytes of a body where they belong."""

    def __init__(
        self, placed: Sequence[Placed], targets: Mapping[str, Sequence[memoryview]]
    ) -> None:
        self._placed = [place for place in placed if place.end > place.begin]
        self._ends = [place.end for place in self._placed]
        self._targets = targets

    def write(self, begin: int, piece: memoryview) -> None:
        for place, start, stop in overlaps(self._placed, self._ends, begin, piece.nbytes):
            for target in self._targets.get(place.entry.name, ()):
                target[start - place.begin : stop - place.begin] = piece[
                    start - begin : stop - begin
                ]


def _write_into(live: torch.Tensor, source: torch.Tensor) -> None:
    """Copies into a live tensor; of an expanded dimension only the one element there is."""
    with torch.no_grad():
        for dim, stride in enumerate(live.stride()):
            if stride == 0 and live.shape[dim] > 1:
                live, source = live.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        live.copy_(source)
