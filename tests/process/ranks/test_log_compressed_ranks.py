"""Two real ranks whose training consumes compressed gradients, killed and brought back by a log of
these: bit for bit, each with the residuals that it had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

from tests.support.ranks.logged import CASES, DIES, QUICK, RELAID, STEPS, WORLD
from tests.support.trainers import finish_trainer, start_trainer

TIMEOUT_S = 200.0
SMALL = ("model.conv.bias", "model.side.bias", "model.wide.bias")
LARGE = ("model.conv.weight", "model.side.weight", "model.wide.weight")


LOSSY = ("lossy", "shards, lossy", "ZeRO, lossy")
CODE = """
import sys
from tests.support.ranks import logged as logged_ranks
logged_ranks.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
"""
Said = list[dict[str, Any]]


def play(folder: Path, world: int, cases: Sequence[str]) -> Said:
    """What each rank of a job sees."""
    about = str(world), str(folder), json.dumps(cases)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                start_trainer(
                    CODE, str(folder / f"store {world}"), str(rank), *about, GLOO_SOCKET_IFNAME="lo"
                )
            )
            for rank in range(world)
        ]
        said = [finish_trainer(process, TIMEOUT_S) for process in processes]
    for status, _, err in said:
        assert status == 0, err
    return [json.loads(out) for _, out, _ in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def played(folder: Path) -> Said:
    """What each rank saw in each case."""
    return play(folder, WORLD, QUICK)


@pytest.fixture(scope="module")
def played_rarely(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The other cases."""
    return play(tmp_path_factory.mktemp("rarely"), WORLD, [c for c in CASES if c not in QUICK])


@pytest.fixture
def said(request: pytest.FixtureRequest, case: str) -> Said:
    """What each rank saw in a case, and in others."""
    found: Said = request.getfixturevalue("played" if case in QUICK else "played_rarely")
    return found


def of(cases: Iterable[str]) -> list[Any]:
    """For a parameter: those that are not quick are slow."""
    return [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in cases]


@pytest.mark.thinned(9)
@pytest.mark.parametrize("case", of(name for name in CASES if name not in LOSSY))
def test_every_rank_goes_on_as_if_nothing_had_been(said: Said, case: str) -> None:
    for rank, found in enumerate(one[case] for one in said):
        wanted = {"step": DIES, "replayed": DIES - 1, "exact": True, "holes": 0}
        assert {key: found[key] for key in wanted} == wanted, rank
        assert found["same"], f"rank {rank} has what training had"
        assert found["goes on"], f"rank {rank}"
    assert said[0][case]["shared"] == said[1][case]["shared"]


@pytest.mark.parametrize("case", of(LOSSY))
def test_a_lossy_log_is_never_exact_and_ranks_do_not_part(said: Said, case: str) -> None:
    for found in (one[case] for one in said):
        assert (found["step"], found["replayed"], found["exact"]) == (DIES, DIES - 1, False)
        assert not found["same"]
    assert said[0][case]["shared"] == said[1][case]["shared"]


@pytest.mark.parametrize("case", of(CASES))
def test_each_gradient_is_recorded_once_and_small_where_it_is_what_was_exchanged(
    said: Said, case: str
) -> None:
    logged = [one[case]["logged"] for one in said]
    if case.startswith("shards"):  # each rank its part of each
        assert logged[0] == logged[1]
        logged = logged[:1]
    compressed = sorted(name for one in logged for name in one["compressed"])
    dense = sorted(name for one in logged for name in one["dense"])
    wanted = {*SMALL, *LARGE}
    wanted -= {"model.side.weight", "model.side.bias"} if case == "unused" else set()
    wanted -= {"model.conv.weight"} if case == "frozen" else set()
    assert sorted([*compressed, *dense]) == sorted(wanted), "each once"
    small = set(LARGE) & wanted
    if case == "a dense log":
        small = set()
    elif case in ("changed behind the exchange", "a zero with a sign behind the exchange"):
        small -= {"model.wide.weight"}
    elif case in LOSSY:
        small = wanted
    assert set(compressed) == small


@pytest.mark.parametrize("case", of(["plain", "bfloat16", "scaler", "a dense log"]))
def test_ranks_have_residuals_of_their_own(said: Said, case: str) -> None:
    """So what a rank had is told from what another one had."""
    assert said[0][case]["residuals"] != said[1][case]["residuals"]


@pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.slow)])
def taken_over(
    request: pytest.FixtureRequest, played: Said, folder: Path, tmp_path_factory: Any
) -> Said:
    """What a job of another number of ranks sees, behind the same one."""
    other: Path = tmp_path_factory.mktemp("others") / "runs"
    shutil.copytree(folder, other)
    return play(other, request.param, RELAID)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("case", RELAID)
def test_another_number_of_ranks_takes_what_ranks_had_in_common(
    played: Said, taken_over: Said, case: str
) -> None:
    assert all(one[case]["shared"] == taken_over[0][case]["shared"] for one in taken_over)
    for rank, found in enumerate(one[case] for one in taken_over):
        assert (found["step"], found["replayed"]) == (STEPS, 1), found
        if case in LOSSY:
            assert not found["exact"]
            continue
        assert found["shared"][0] == played[0][case]["shared"][1]
        if rank < WORLD:
            assert found["residuals"] == played[rank][case]["residuals"], "its own"
        elif case in ("behind the mean", "shards"):
            assert found["residuals"] == played[0][case]["residuals"], "the same on all"
        else:
            assert found["names"] == ["exchange scale"], "a new rank begins without"


@pytest.mark.parametrize("case", ["plain", "scaler"])
def test_residuals_that_are_gone_are_said_and_nothing_is_called_exact(
    taken_over: Said, case: str
) -> None:
    found = [one[case] for one in taken_over]
    notes = [note for one in found for note in one["notes"] if note.startswith("exchange: ")]
    if len(found) < WORLD:
        assert any("per-rank state of rank(s) 1 is left out" in note for note in notes)
    else:
        assert any("rank 2 is new and starts with the state its program made" in n for n in notes)
    assert not any(one["exact"] for one in found)
