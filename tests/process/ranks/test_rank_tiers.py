"""Ranks and keepers that are processes, with copies in a place that all of them see: hosts lose
their disks, and the job ends with the same bits as one that nobody disturbed."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.keeper.ship.courier import ROOT
from everstep.link.registry import kill_keeper, list_keepers
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.tiers.files import TierFileSystem
from everstep.tiers.options import open_tier
from tests.support.keepers import end_keepers
from tests.support.ranks.processes import TRAINING, check, undisturbed
from tests.support.ranks.processes import Job as Together
from tests.support.ranks.tier_processes import wait_for
from tests.support.stores import KINDS, serve, skip_reason
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S


class Hosts:
    """A job whose hosts have disks of their own, and a directory that all of them see.

    Args:
        hosts: by rank: the number of its host.
    """

    def __init__(
        self, folder: Path, *hosts: int, shared: bool = False, store: str = "", **options: Any
    ) -> None:
        self._folder, self._hosts = folder, hosts
        self._shared = shared
        self.store = store or str(folder / "store")
        self._options = {"method": "lazy", "tiers": [self.store], **options}

    @property
    def world(self) -> int:
        return len(self._hosts)

    def run(self, rank: int) -> Path:
        return self._folder / ("run" if self._shared else f"host{self._hosts[rank]}/run")

    def start(
        self, world: int | None = None, only: int | None = None, **environment: str
    ) -> list[Trainer]:
        """Starts all ranks.

        Args:
            only: the rank whose environment is changed; None: all.
        """
        world = world or self.world
        meet = str(self._folder / f"meet-{uuid.uuid4().hex}")
        for rank in range(world):
            self.run(rank).parent.mkdir(exist_ok=True)
        options = json.dumps(self._options)
        return [
            start_trainer(
                TRAINING,
                str(self.run(rank)),
                options,
                str(rank),
                meet,
                str(world),
                ENDS=environment.get("DIES", ""),
                **(environment if only in (None, rank) else {}),
            )
            for rank in range(world)
        ]

    def to_the_end(self, world: int | None = None) -> list[list[dict[str, Any]]]:
        """What each rank says in a start that nobody disturbs."""
        said = []
        for one in self.start(world):
            status, out, err = finish_trainer(one, 2 * TIMEOUT_S)
            assert status == 0, err
            said.append([json.loads(line) for line in out.splitlines()])
        return said

    def until_killed(
        self, rank: int, step: int, only: int | None = None, **environment: str
    ) -> None:
        """All ranks are killed when one has died; their keepers finish what they have."""
        ranks = self.start(None, only, DIES=f"{rank} {step}", **environment)
        finish_trainer(ranks[rank], 2 * TIMEOUT_S)
        for one in ranks:
            one.kill()
            finish_trainer(one, TIMEOUT_S)

    def keepers(self) -> list[Any]:
        runs = {str(self.run(rank)) for rank in range(self.world)}
        return [info for info in list_keepers() if info.run in runs]

    def lose(self, *hosts: int) -> None:
        """Hosts with all that is on them."""
        for info in self.keepers():
            if any(info.run == str(self._folder / f"host{host}/run") for host in hosts):
                kill_keeper(info)
        for host in hosts:
            shutil.rmtree(self._folder / f"host{host}")

    def copied(self) -> list[int]:
        """Steps of the copies that are committed."""
        files = TierFileSystem(open_tier(self.store, PosixFileSystem()), ROOT)
        bases = scan_run(files, ROOT).bases
        return sorted(base.id.step for base in bases if base.status == "committed")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_keepers(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def expected_of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    said = Together(tmp_path_factory.mktemp("four"), world=4, method="sync").to_the_end()
    return [{one["step"]: one["digest"] for one in lines if "step" in one} for lines in said]


@pytest.mark.slow
def test_a_host_without_its_disk_takes_its_part_from_the_copy(
    folder: Path, expected: list[dict[int, str]]
) -> None:
    job = Hosts(folder, 0, 1)
    job.until_killed(1, 5)
    wait_for(lambda: 4 in job.copied(), "the copy of step 4")
    job.lose(1)
    said = job.to_the_end()
    assert check(said, expected) == (4, 2)
    assert [lines[0]["source"] for lines in said] == ["memory", "copy"]
    wait_for(lambda: not job.keepers(), "the end of all keepers")
    assert job.copied()[-1] == 6, "keepers end behind the last copy"


@pytest.mark.slow
def test_all_disks_are_lost(folder: Path, expected: list[dict[int, str]]) -> None:
    job = Hosts(folder, 0, 1)
    job.until_killed(0, 5)
    wait_for(lambda: 4 in job.copied(), "the copy of step 4")
    job.lose(0, 1)
    said = job.to_the_end()
    assert check(said, expected) == (4, 2)
    assert [lines[0]["source"] for lines in said] == ["copy", "copy"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(1,), (0, 1)], ids=["one host", "all hosts"])
def test_four_ranks_on_two_hosts(
    folder: Path, lost: tuple[int, ...], expected_of_four: list[dict[int, str]]
) -> None:
    job = Hosts(folder, 0, 0, 1, 1, method="async")
    job.until_killed(3, 5)
    wait_for(lambda: 4 in job.copied(), "the copy of step 4")
    job.lose(*lost)
    assert check(job.to_the_end(), expected_of_four) == (4, 2)


@pytest.mark.slow
def test_the_shared_folder_is_lost(folder: Path, expected: list[dict[int, str]]) -> None:
    job = Hosts(folder, 0, 0, shared=True)
    job.until_killed(1, 5)
    wait_for(lambda: 4 in job.copied(), "the copy of step 4")
    for info in job.keepers():
        kill_keeper(info)
    shutil.rmtree(job.run(0))
    assert check(job.to_the_end(), expected) == (4, 2)


@pytest.mark.slow
def test_hosts_are_others_than_before(folder: Path, expected_of_four: list[dict[int, str]]) -> None:
    """What the ranks of a host had in common was written once to each disk: now that each rank has
    a host of its own, it takes from the copy what its neighbour wrote."""
    before = Hosts(folder, 0, 0, 1, 1)
    before.until_killed(0, 5)
    wait_for(lambda: 4 in before.copied(), "the copy of step 4")
    before.lose(0, 1)
    after = Hosts(folder, 2, 3, 4, 5)
    assert check(after.to_the_end(), expected_of_four) == (4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_reads_the_copy(folder: Path, world: int) -> None:
    """Each takes from the parts of all what it needs, whoever wrote it."""
    job = Hosts(folder, 0, 1, 2)
    job.to_the_end(2)
    wait_for(lambda: not job.keepers(), "the end of all keepers")
    assert job.copied()[-1] == 6
    job.lose(0, 1)
    said = job.to_the_end(world)
    assert [lines[0]["resumed"] for lines in said] == [6] * world
    assert {lines[0]["source"] for lines in said} == {"copy"}
    assert len({lines[0]["shared"] for lines in said}) == 1
    assert len({lines[-2]["shared"] for lines in said}) == 1, "they train on together"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_keeper_that_dies_while_it_copies(
    folder: Path, rank: int, expected: list[dict[int, str]]
) -> None:
    """Between its shard and its marker, or between the last marker and the manifest: what there is
    of that copy is made whole by the next start, or is nothing."""
    point = "copy.before_manifest" if rank == 0 else "copy.before_marker"
    job = Hosts(folder, 0, 1)
    environment = {"EVERSTEP_FAILPOINTS": f"{point}=kill:2"}
    job.until_killed(rank, 5, rank, **environment)
    wait_for(lambda: bool(job.copied()), "a copy")
    for info in job.keepers():  # the one that took its place is going to die, too
        kill_keeper(info)
    job.lose(1 - rank)
    step, _ = check(job.to_the_end(), expected)
    assert step in (2, 4)
    wait_for(lambda: not job.keepers(), "the end of all keepers")
    assert job.copied()[-1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_disks_are_lost_and_the_copies_are_in_an_object_store(
    kind: str, folder: Path, expected: list[dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := skip_reason(kind):
        pytest.skip(reason)
    with serve(kind, folder / "served") as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        job = Hosts(folder, 0, 1, store=f"{store.url}/ranks/run")
        job.until_killed(1, 5)
        wait_for(lambda: 4 in job.copied(), "the copy of step 4")
        job.lose(0, 1)
        said = job.to_the_end()
        assert check(said, expected) == (4, 2)
        assert [lines[0]["source"] for lines in said] == ["object", "object"]
        wait_for(lambda: not job.keepers(), "the end of all keepers")
        assert job.copied()[-1] == 6
