"""Jobs of rank processes, one for each way to spread a training: run, killed, compared."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.link.registry import KeeperInfo, kill_keeper, list_keepers
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.keepers import end_keepers
from tests.support.ranks.parallel import LAYOUTS
from tests.support.trainers import Trainer, finish_trainer, start_trainer, whole_lines

PROGRAM = "from tests.support.ranks.parallel import main; main()"


STEPS = 8


_HANGS_S = 300.0


Said = list[list[dict[str, Any]]]


class Run:
    """Jobs on one run folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self._folder, self._starts = folder, 0

    def start(
        self, layout: str, world: int, last: int, options: Any, *environments: dict[str, str]
    ) -> list[Trainer]:
        self._starts += 1
        meet = str(self._folder / f"meet-{self._starts}")
        found = environments or ({},) * world
        return [
            start_trainer(
                PROGRAM,
                *(str(self.path), meet, layout, str(rank), str(world), str(last)),
                json.dumps(options),
                **found[rank],
            )
            for rank in range(world)
        ]

    def to_the_end(
        self, layout: str, options: Any, *, world: int = 0, last: int = STEPS, whole: bool = False
    ) -> Said:
        """What each rank says."""
        environments = [{"WHOLE": "1"} if whole else {}] * (world or LAYOUTS[layout].ranks)
        return self.ended(layout, options, last, *environments)

    def ended(self, layout: str, options: Any, last: int, *environments: dict[str, str]) -> Said:
        """What each rank says, to its end."""
        ranks = self.start(layout, len(environments), last, options, *environments)
        ended = [finish_trainer(one, _HANGS_S) for one in ranks]
        assert [status for status, _, _ in ended] == [0] * len(ranks), ended
        return [_decoded(out) for _, out, _ in ended]

    def until_killed(
        self, layout: str, options: Any, victim: int, env: dict[str, str], *, world: int = 0
    ) -> Said:
        """When one rank has died all are killed, as a launcher does."""
        ranks = range(world or LAYOUTS[layout].ranks)
        environments = [env if rank == victim else {} for rank in ranks]
        return self.killed(layout, options, victim, STEPS, *environments)

    def killed(
        self, layout: str, options: Any, victim: int, last: int, *environments: dict[str, str]
    ) -> Said:
        """Likewise, each rank with its own environment."""
        ranks = self.start(layout, len(environments), last, options, *environments)
        status, out, err = finish_trainer(ranks[victim], _HANGS_S)
        for one in ranks:
            one.kill()
        others = [finish_trainer(one, _HANGS_S) for one in ranks if one is not ranks[victim]]
        assert status == -signal.SIGKILL, [err, *(theirs for _, _, theirs in others)]
        said = [out for _, out, _ in others]
        return [_decoded(each) for each in [*said[:victim], out, *said[victim:]]]

    def kill_keepers(self) -> None:
        for info in self.keepers():
            kill_keeper(info)

    def keepers(self) -> list[KeeperInfo]:
        return [info for info in list_keepers() if info.run == str(self.path)]

    def committed(self) -> set[int]:
        """Steps of the bases that have a manifest."""
        bases = scan_run(PosixFileSystem(), self.path).bases
        return {base.id.step for base in bases if base.status == "committed"}


def _decoded(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(out)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    end_keepers(tmp_path)


def steps_of(said: Said) -> list[dict[int, Any]]:
    """By rank: digests of everything after each step."""
    return [{one["step"]: one["digests"] for one in lines if "step" in one} for lines in said]


def compare(said: Said, wanted: list[dict[int, Any]]) -> int:
    """All ranks have resumed the same step and gone on as if nothing had been; returns it."""
    resumed = {(lines[0]["resumed"], lines[0]["timeline"]) for lines in said}
    assert len(resumed) == 1, resumed
    step: int = resumed.pop()[0]
    for rank, (lines, steps) in enumerate(zip(said, steps_of(said), strict=True)):
        if step:
            assert lines[0]["digests"] == wanted[rank][step], f"rank {rank} resumed from {step}"
        assert lines[0]["exact"]
        assert list(steps) == [*range(step + 1, step + 1 + len(steps))]
        for at, digests in steps.items():
            assert digests == wanted[rank][at], f"rank {rank} at step {at}"
    return step


def at(said: Said, step: int) -> dict[str, str]:
    """Digests of tensors as torch puts them together, at a step, of all ranks."""
    found: dict[str, str] = {}
    for lines in said:
        whole = next(one["whole"] for one in lines if one.get("at") == step)
        assert all(found.setdefault(name, digest) == digest for name, digest in whole.items())
    return found
