"""Comparison of a training that was killed with an undisturbed one: live states and losses.

The demo compares two checkpoints byte by byte. That would prove little if the code that wrote them
left something out of both; so each child also describes its live objects, without any of
everstep's own code, and those descriptions are compared too.

Progress reports of a child process: one JSON object per line, append-only.

Each line is one ``write`` to a file opened for appending: when the call returns, the line is in the
kernel, and a SIGKILL cannot take it back. A reader skips an incomplete last line.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.workloads import Training


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


_LONGEST_TEXT = 60


def fingerprint(training: Training) -> dict[str, str]:
    """Describes every tensor and number of the run, and the process's generators.

    Returns:
        By path, e.g. ``optimizer/state/3/exp_avg``: type, shape and digest of a tensor or
        array; the value itself of anything small.
    """
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "loader": training.loader.state_dict(),
        "progress": training.progress,
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch": torch.get_rng_state(),
        },
    }
    return dict(_leaves("", state))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}/{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)) and len(value) <= _LONGEST_TEXT:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}/{index}", item)
    else:
        yield path, _describe(value)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "to_local"):  # a DTensor: what this rank has of it
            return f"part of {list(value.shape)}: {_describe(value.to_local())}"
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(data)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    text = repr(value)
    if len(text) > _LONGEST_TEXT:
        return f"{type(value).__name__} {xxhash.xxh3_128_hexdigest(text.encode())}"
    return text
