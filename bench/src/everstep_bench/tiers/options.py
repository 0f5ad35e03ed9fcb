"""Options of the benchmark, and the order for a training process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.errors import OptionError
from everstep.tiers.urls import is_url
from everstep_bench.stall.options import check_training

__all__ = ["Order", "TiersOptions"]

_RANKS_MAX = 16
_STEPS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """Options of ``bench tiers``.

    Attributes:
        ranks: that train together, each on an emulated node; with one there is no peer.
        every: steps from base to base.
        keep: bases, and copies.
        place: URL or absolute path of a folder, which must be empty of runs; None: a folder of the
            benchmark's own.
        folder: a folder is made in it, and removed at the end.
    """

    steps: int = 200
    ranks: int = 2
    every: int = 10
    keep: int = 2
    params: int = 500_000
    batch: int = 4
    seed: int = 1234
    place: str | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_training(self.params, 1, self.seed)
        if not 1 <= self.ranks <= _RANKS_MAX:
            raise OptionError(f"ranks={self.ranks}: between 1 and {_RANKS_MAX}")
        if min(self.every, self.batch) < 1 or self.keep < 2:
            raise OptionError("every and batch must be at least 1, keep 2")
        if not (self.keep + 2) * self.every <= self.steps <= _STEPS_MAX:
            raise OptionError(
                f"steps={self.steps}: nothing is deleted before base {self.keep + 1}",
                hint=f"at least {(self.keep + 2) * self.every}, at most {_STEPS_MAX:,}",
            )
        if self.place is not None and not is_url(self.place) and not os.path.isabs(self.place):
            raise OptionError(
                f"{self.place!r} is no place for copies",
                hint="a URL like s3://bucket/prefix, or the absolute path of a directory",
            )


@dataclass(frozen=True, slots=True)
class Order:
    """Order for one rank.

    Attributes:
        run: its run folder.
        meet: file over which the ranks find each other.
        place: where copies go; None: no tiers.
        parent: process to live and die with.
    """

    options: TiersOptions
    rank: int
    run: str
    meet: str
    place: str | None
    parent: int

    def encode(self) -> str:
        """As an argument."""
        found = asdict(self)
        found["options"] |= {"folder": None, "place": None}
        return json.dumps(found)

    @classmethod
    def decode(cls, text: str) -> Order:
        """From an argument."""
        fields = json.loads(text)
        return cls(**fields | {"options": TiersOptions(**fields["options"])})

    @property
    def is_orphaned(self) -> bool:
        """Return True if the process that gave the order has ended."""
        return os.getppid() != self.parent
