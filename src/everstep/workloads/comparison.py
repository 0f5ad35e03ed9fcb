"""Comparison of a training that was killed with an undisturbed one: live states and losses.

Progress reports of a child process: one JSON object per line, append-only.

Each line is one ``write`` to a file opened for appending: when the call returns, the line is in the
kernel, and a SIGKILL cannot take it back. A reader skips an incomplete last line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        witness: ``"checkpoint"``, ``"live state"``, ``"loss"`` or ``"recovery"``.
        name: entry, path, step or kill.
        detail: value of the undisturbed run against value of the killed run.
    """

    witness: str
    name: str
    detail: str


def compare_fingerprints(expected: Mapping[str, str], found: Mapping[str, str]) -> list[Difference]:
    """Compare the live states of two processes, as they described them."""
    return [
        Difference("live state", path, f"{expected.get(path)} != {found.get(path)}")
        for path in sorted({*expected, *found})
        if expected.get(path) != found.get(path)
    ]


def compare_losses(
    steps: int,
    expected: Sequence[tuple[int, str]],
    found: Sequence[Sequence[tuple[int, str]]],
) -> list[Difference]:
    """Compare every loss of a run with every time that the other run computed it.

    Args:
        steps: both runs must have computed every step in ``1 .. steps``, ends included.
        expected: ``(step, loss in hexadecimal)`` of the undisturbed run.
        found: the same of each process of the other run; a step may occur twice.
    """
    reference = dict(expected)
    differences = []
    if [step for step, _ in expected] != list(range(1, steps + 1)):
        detail = f"{len(expected)} losses for {steps} steps, or not in order"
        differences.append(Difference("loss", "uninterrupted run", detail))
    for start, losses in enumerate(found, 1):
        for step, loss in losses:
            if reference.get(step) != loss:
                detail = f"{_readable(reference.get(step))} != {_readable(loss)} (start {start})"
                differences.append(Difference("loss", f"step {step}", detail))
    missing = sorted(set(range(1, steps + 1)) - {step for losses in found for step, _ in losses})
    if missing:
        detail = f"{len(missing)} steps were never computed, the first is {missing[0]}"
        differences.append(Difference("loss", "killed run", detail))
    return differences


def _readable(loss: str | None) -> str:
    return "none" if loss is None else f"{float.fromhex(loss):.9g} [{loss}]"


Event = dict[str, Any]
"""One line: ``event`` names its kind, ``at_s`` is the machine's monotonic clock."""


class JournalWriter:
    """Append events to the new file ``path``."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; it survives a SIGKILL of this process once the call has returned."""
        line = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
        data = memoryview(line.encode() + b"\n")
        # A signal or a full disk may cut a write short; the reader waits for the end of the line.
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class JournalReader:
    """Follow a journal that may not exist yet and is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Event]:
        """Return the complete lines appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
