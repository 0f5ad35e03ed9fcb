"""An arm: one way to save or load the state."""

from __future__ import annotations

from typing import Literal

from everstep_bench.harness.figures import Role
from everstep_bench.harness.gauges import Sample

Column = Literal["fresh", "recycled", "read"]
"""``fresh``: into files that are new. ``recycled``: over files that have their blocks
already. ``read``: from disk, past or without the page cache."""


class Arm:
    """One way to save or load the state. What is not overridden does nothing."""

    role: Role = "peer"
    column: Column = "fresh"
    name: str
    detail: str

    def open(self) -> None:
        """Before the first run; not timed. The live state is what it was made as."""

    def prepare(self) -> None:
        """Before each run; not timed. Everything is synced between it and the run."""

    def run(self) -> Sample:
        """Save or load once."""
        raise NotImplementedError

    def clean(self) -> None:
        """After each run, even one that failed; not timed."""

    def close(self) -> None:
        """After the last run, and after an ``open`` that failed."""
