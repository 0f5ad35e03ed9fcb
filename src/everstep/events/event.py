"""One event of a run, and its line in the event log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    "notice": "a condition that is no failure, in words (budgets, dropped logs)",
    "failure": "a failure in the background, in words",
    "progress": "counters: seconds of a step, stalls by cause, newest recoverable steps, bytes",
    "closed": "close() has ended; nothing follows",
}
"""Kinds of events, with what each tells."""


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
        """Return the event of a line; None if it is none, as the last line of a killed process."""
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            kind = str(fields.pop("event"))
            unix_s = float(fields.pop("unix_s"))
            rank, timeline, step = (int(fields.pop(name)) for name in ("rank", "timeline", "step"))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return None
        return cls(kind, unix_s, rank, timeline, step, fields)


_ENCODER = msgspec.json.Encoder(enc_hook=str)
