"""One event of a run, and its line in the event log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

KINDS: Mapping[str, str] = {
    "started": "a Checkpointer was created; its method, ranks and process",
    "recovery": "resume() or rewind() has restored a state, or found none",
    "keeper": "a keeper has come into service; `lost` says why the one before it was lost",
    "base_begun": "the capture of a base has begun",
    "base_captured": "the state of a base is captured; training may change it",
    "base_durable": "a base is complete on a tier",
    "base_failed": "a base has failed",
    "log_durable": "the log on a tier, with a base there, leads to this step",
    "replica_stopped": "the keeper's replica of the state has stopped",
    "log_checked": 'method="auto" has found out if the updates of this loop can be logged',
    "notice": "a condition that is no failure, in words (budgets, dropped logs)",
    "failure": "a failure in the background, in words",
    "progress": "counters: seconds of a step, stalls by cause, newest recoverable steps, bytes",
    "closed": "close() has ended; nothing follows",
}
"""Kinds of events, with a description of each."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of one rank.

    Attributes:
        kind: one of :data:`KINDS`.
        unix_s: time of the event, in seconds since 1970.
        rank: rank of the process.
        timeline: timeline of the run; 0 before the first resume.
        step: step that the event is about.
        details: further fields by name, as in ``docs/EVENTS.md``.
    """

    kind: str
    unix_s: float
    rank: int
    timeline: int
    step: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """Return the event as one line of JSON."""
        head = {
            "event": self.kind,
            "unix_s": round(self.unix_s, 4),
            "rank": self.rank,
            "timeline": self.timeline,
            "step": self.step,
        }
        return _ENCODER.encode({**head, **self.details}) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Event | None:
        """Return the event of a line; None if it is none.

        The contents are not trusted: the last line of a killed process may be torn, and anybody who
        may write to the folder may have written it. Fields that everstep reads have their types.
        """
        if len(line) > _LINE_BYTES_MAX:
            return None
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            head = msgspec.convert(fields, _Head)
            msgspec.convert(fields, _Details)
        except (msgspec.DecodeError, RecursionError, OverflowError):
            return None
        details = {name: value for name, value in fields.items() if name not in _HEAD}
        if not all(map(_is_finite, details.values())):
            return None
        return cls(head.event, head.unix_s, head.rank, head.timeline, head.step, details)


_LINE_BYTES_MAX = 1 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
_Number = int | float


class _Head(msgspec.Struct):
    """Fields that every event has."""

    event: Annotated[str, msgspec.Meta(max_length=100)]
    unix_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=10**9)]
    timeline: Annotated[int, msgspec.Meta(ge=0, le=10**9)]
    step: _Count


class _Details(msgspec.Struct):
    """Fields that everstep itself reads, with the types that it relies on."""

    method: str = ""
    every: str = ""
    version: str = ""
    promise: str | None = None
    world: _Count = 1
    predicted_waste: _Number | None = None
    state_bytes: _Number = 0
    gradient_bytes: _Number = 0
    source: str = ""
    exact: bool = True
    evidence: str = ""
    base_step: _Count | None = None
    replayed: _Number = 0
    seconds: _Number = 0
    load_s: _Number = 0
    replay_s: _Number = 0
    size_bytes: _Number = 0
    tier: str = ""
    error: str = ""
    message: str = ""
    lost: str | None = None
    durable_step: _Count | None = None
    recoverable_step: _Count | None = None
    recoverable_from: dict[str, _Count] = {}
    stall_s: dict[str, _Number] = {}
    step_s: _Number | None = None
    saves: _Number = 0
    written_bytes: _Number = 0
    log_written_bytes: _Number = 0
    copied_bytes: _Number = 0
    peered_bytes: _Number = 0
    host_bytes: _Number = 0
    forecast_bytes_per_day: _Number | None = None


_HEAD = _Head.__struct_fields__


def _is_finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


_ENCODER = msgspec.json.Encoder(enc_hook=str)
