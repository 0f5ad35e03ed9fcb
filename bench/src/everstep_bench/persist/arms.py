"""Protocol of an arm: prepare, measure, clean up."""

from __future__ import annotations

from typing import Literal, Protocol

from everstep_bench.persist.meter import Sample

__all__ = ["Arm", "Column", "Role"]

Column = Literal["fresh", "recycled", "read"]
"""``fresh``: into files that are new. ``recycled``: over files that have their blocks
already. ``read``: from disk, past or without the page cache."""

Role = Literal["limit", "ours", "peer"]


class Arm(Protocol):
    """One way to save or load the state."""

    @property
    def name(self) -> str: ...

    @property
    def column(self) -> Column: ...

    @property
    def role(self) -> Role: ...

    @property
    def detail(self) -> str:
        """Describe the arm in a few words."""
        ...

    def open(self) -> None:
        """Before the first run; not timed. The live state is what it was made as."""
        ...

    def prepare(self) -> None:
        """Before each run; not timed. Everything is synced between it and the run."""
        ...

    def run(self) -> Sample:
        """Saves or loads once."""
        ...

    def clean(self) -> None:
        """After each run, even one that failed; not timed."""
        ...

    def close(self) -> None:
        """After the last run, and after an ``open`` that failed."""
        ...
