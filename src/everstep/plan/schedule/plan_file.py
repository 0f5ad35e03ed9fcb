"""A plan in a file: written by ``everstep plan schedule --out``, executed by ``Method(plan=...)``.

A plan is made for the operators of a traced step. A running step has only *events*: a module
begins, a gradient exists, an optimizer is about to update. So a file names the event at which each
copy is issued, the last one before its operator. Deadlines are those of the running step, too:
torch calls no hook between the parameters of one ``optimizer.step()``, so all tensors of an
optimizer must be copied, or duplicated, before it begins. Buffers change in forward, and are copied
at the step mark.

The peak of memory is that of the execution: duplicates take memory from the event of their update
to the end of their copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from everstep.errors import FormatError
from everstep.plan.schedule.schedule import Chunk, Item, Placement, Problem, Schedule
from everstep.plan.schedule.steps import StepTrace, Traced
from everstep.plan.schedule.trace import MODEL

VERSION = 1


class PlannedCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copy of bytes ``[begin, end)`` of a tensor.

    Attributes:
        slot: number of the event at which it is issued.
        creation_s: time at which it is duplicated; None if it is copied from the tensor itself.
        start_s, end_s: times of the copy, in seconds after the step mark.
    """

    tensor: str
    begin: int
    end: int
    slot: int
    start_s: float
    end_s: float
    creation_s: float | None = None


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="everstep schedule"):
    """Schedule of the copies of a step.

    Attributes:
        about: command line of the plan: model, batch, device and so on.
        link_bytes_per_s: bandwidth of the link that was planned for.
        step_s: duration of the step.
        peak_bytes: predicted peak of device memory: ``"without"`` checkpoints, ``"planned"``, and
            ``"all_at_once"`` with a duplicate of the whole state.
        events: names of the events of a step, in order; the first is the step mark.
        times_s: their times, in seconds after the step mark.
        updates: event at which each optimizer updates first.
        tensors: sizes of the tensors that the plan copies, in bytes, by entry name.
        copies: in the order of the link.
    """

    about: dict[str, Any]
    link_bytes_per_s: float
    step_s: float
    peak_bytes: dict[str, int]
    events: list[str]
    times_s: list[float]
    updates: dict[str, int]
    tensors: dict[str, int]
    copies: list[PlannedCopy]
    version: int = VERSION

    def encode(self) -> bytes:
        """Return the bytes of the file: JSON with a line for each copy."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> PlanFile:
        """Read a file.

        Args:
            where: its path, for messages.

        Raises:
            FormatError: it is no plan, or one of a newer version.
        """
        try:
            found = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:  # the first of invalid fields, too
            raise FormatError(
                f"{where} is not a plan of a schedule: {error}",
                hint="everstep plan schedule --model FILE.py:factory --out plan.json",
                path=where,
            ) from error
        if found.version != VERSION:
            raise FormatError(
                f"{where} has version {found.version} of the format; this everstep reads {VERSION}",
                path=where,
            )
        events = len(found.events)
        wrong = [
            str(copy)
            for copy in found.copies
            if not 0 <= copy.slot < events
            or not 0 <= copy.begin <= copy.end <= found.tensors.get(copy.tensor, -1)
        ]
        if len(found.times_s) != events:
            wrong.append(f"{events} events, {len(found.times_s)} times")
        if wrong:
            raise FormatError(f"{where} contradicts itself: {wrong[0]}", path=where)
        return found


def entry_name(trace: StepTrace, tensor: Traced) -> str | None:
    """Return the name that a tensor has in a run with the state ``{"model": .., "optimizer": ..}``.

    None if a running step cannot copy it by a plan: buffers, and tensors of no optimizer.
    """
    if tensor.kind == "parameter":
        return f"{MODEL}/{tensor.name}"
    parameter, _, value = tensor.name.rpartition("/")
    if tensor.kind != "state" or parameter not in trace.owners:
        return None
    return f"{trace.owners[parameter]}/state/{MODEL}.{parameter}/{value}"


def executed_problem(
    trace: StepTrace, seconds: Sequence[float], link_bytes_per_s: float
) -> Problem:
    """Return the planning problem with the deadlines of a running step.

    Args:
        seconds: duration of each operator.
    """
    items = []
    for tensor in trace.state:
        name = entry_name(trace, tensor)
        if name is not None:
            items.append(Item(name, tensor.size_bytes, _deadline(trace, tensor)))
    return Problem(tuple(seconds), tuple(trace.live_bytes()), tuple(items), link_bytes_per_s)


def _deadline(trace: StepTrace, tensor: Traced) -> int:
    """Return the operator before which an optimizer's update begins."""
    parameter = tensor.name if tensor.kind == "parameter" else tensor.name.rpartition("/")[0]
    event = trace.updates.get(trace.owners.get(parameter, ""))
    if tensor.first_write is None or event is None:
        return len(trace.operators)
    return trace.events[event][1]


def plan_file(
    trace: StepTrace, problem: Problem, schedule: Schedule, about: Mapping[str, Any]
) -> PlanFile:
    """Return the file of a plan.

    Args:
        problem: :func:`executed_problem` of the trace.
        schedule: its solution, in the mode ``"direct"``.
    """
    ends_s = list(accumulate(problem.seconds, initial=0.0))
    firsts = [first for _, first in trace.events]
    times_s = [ends_s[first] for first in firsts]
    copies: list[PlannedCopy] = []
    free_s = 0.0
    for place in sorted(schedule.placements, key=lambda place: place.offload):
        slot = bisect_right(firsts, place.offload) - 1
        item = problem.items[place.chunk.item]
        creation_s = None if place.snapshot is None else ends_s[place.snapshot + 1]
        start_s = max(free_s, ends_s[place.offload])
        free_s = start_s + place.chunk.size_bytes / problem.link_bytes_per_s
        copy = PlannedCopy(
            item.name, place.chunk.begin, place.chunk.end, slot, start_s, free_s, creation_s
        )
        copies[-1:] = [*_joined(copies[-1], copy)] if copies else [copy]
    return PlanFile(
        about=dict(about),
        link_bytes_per_s=problem.link_bytes_per_s,
        step_s=problem.step_s,
        peak_bytes={
            "without": problem.peak_bytes,
            "planned": schedule.peak_bytes,
            "all_at_once": problem.peak_bytes + problem.size_bytes,
        },
        events=[name for name, _ in trace.events],
        times_s=times_s,
        updates=dict(trace.updates),
        tensors={item.name: item.size_bytes for item in problem.items},
        copies=copies,
    )


def _joined(one: PlannedCopy, other: PlannedCopy) -> list[PlannedCopy]:
    """Return both copies, or one if they follow each other in tensor and slot."""
    same = (one.tensor, one.slot, one.creation_s) == (other.tensor, other.slot, other.creation_s)
    if not same or one.end != other.begin:
        return [one, other]
    return [
        PlannedCopy(
            one.tensor, one.begin, other.end, one.slot, one.start_s, other.end_s, one.creation_s
        )
    ]


def placements_of(
    plan: PlanFile,
    places: Mapping[str, tuple[int, int]],
    gated: Collection[str],
    sources: Sequence[tuple[int, int]],
    updates: Sequence[int],
) -> list[Placement] | str:
    """Return a plan's copies as slices of the copies that a run can make.

    Args:
        places: byte range in the block of memory, by entry name.
        gated: entries that are copied after the step mark; the others are copied at it.
        sources: byte range in the block of each copy that can be made.
        updates: event before which each of them has to be made or duplicated.

    Returns:
        The slices in the order of the link; or the reason why the plan does not fit.
    """
    for name in gated:
        begin, end = places[name]
        planned = plan.tensors.get(name, 0)  # a trace leaves out empty tensors
        if planned != end - begin:
            there = "not in the plan" if not planned else f"{planned} bytes in the plan"
            return f"{name} of {end - begin} bytes: {there}"
    lacking = plan.tensors.keys() - places.keys()
    if lacking:
        return f"{min(lacking)} of the plan is not in the state"
    begins = [begin for begin, _ in sources]
    order = sorted(range(len(sources)), key=begins.__getitem__)
    sorted_begins = [begins[number] for number in order]
    found: list[Placement] = []
    for copy in plan.copies:
        first = places[copy.tensor][0]
        begin = first + copy.begin
        end = first + copy.end
        at = max(0, bisect_right(sorted_begins, begin) - 1)
        while begin < end and at < len(order):
            number = order[at]
            low, high = sources[number]
            cut = max(low, begin), min(high, end)
            if cut[0] < cut[1]:
                chunk = Chunk(number, cut[0] - low, cut[1] - low)
                late = copy.slot >= updates[number]
                found.append(Placement(chunk, updates[number] - 1 if late else None, copy.slot))
            begin = max(begin, high)
            at += 1
    return _uncovered(found, sources) or found


def _uncovered(placements: Sequence[Placement], sources: Sequence[tuple[int, int]]) -> str | None:
    """Return a description of bytes that are copied never, or twice; None if there are none."""
    cuts: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(sources))}
    for placement in placements:
        chunk = placement.chunk
        cuts[chunk.item].append((chunk.begin, chunk.end))
    for number, (low, high) in enumerate(sources):
        at = 0
        for begin, end in [*sorted(cuts[number]), (high - low, high - low)]:
            if begin == at:
                at = end
                continue
            return f"the plan does not copy byte {low + min(begin, at)} of the state once"
    return None
