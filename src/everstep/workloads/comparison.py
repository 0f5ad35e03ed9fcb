"""Comparison of a training that was killed with an undisturbed one: live states and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
