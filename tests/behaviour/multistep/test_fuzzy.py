"""Bases over several steps that whoever restores them makes whole (``rebuild="recovery"``): the
same bits as by the keeper, and as training had."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import OptionError, ReplayError
from everstep.restore.offline.rank_files import complete_live_base
from everstep.seams import Seams
from everstep.testing import inspect
from tests.support.following import Odd, opened, run_steps, steps_on_disk
from tests.support.log.late import LateLane
from tests.support.logged import document, invoke, rebuilder_of
from tests.support.matrix import CASES, LOOPS
from tests.support.multistep.fuzzy import heads_on_disk, left, lsns_on_disk
from tests.support.multistep.rows import ROWS, check, matrix, over, restored
from tests.support.multistep.world import World
from tests.support.serving import Bench, serving


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def digests(run: Path, step: int) -> dict[str, str]:
    """Of every entry of a base, made whole without the program."""
    with rebuilder_of(run) as rebuilder:
        rebuilt = rebuilder.state_at(step)
    assert rebuilt.exact, rebuilt.why
    return rebuilt.state.digests()


def check_fuzzy(bench: Bench, make: Any, method: everstep.Method, **options: Any) -> None:
    """Trains; every base is exact, in a process that goes on and without one, and has parts."""
    check(bench, make, method, **options)
    fuzzy = 0
    for step in steps_on_disk(bench.run):
        lsns = set(lsns_on_disk(bench.run, step).values())
        fuzzy += len(lsns) > 1
        sharp = bench.run.parent / f"sharp-{step}"
        result = invoke("restore", bench.run, "--step", step, "--out", sharp)
        assert result.exit_code == 0, result.output
        assert restored(sharp, make(seed=9)) == restored(bench.run, make(seed=8), step), step
    assert fuzzy, "this test cannot fail"


def some_slow(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test, of which only a few are run each time."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", some_slow(ROWS, ["AdamW-fused", "SGD-momentum-foreach"]))
def test_every_trap_at_once(case: str, served: Bench) -> None:
    overlap = ROWS.index(case) % 2 == 1
    check_fuzzy(served, matrix(case, "all"), left(3, overlap=overlap))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop", some_slow(LOOPS, ["accumulate", "scaler", "frozen"]))
def test_each_trap(loop: str, served: Bench) -> None:
    check_fuzzy(served, matrix("AdamW-foreach", loop), left(4, overlap=True), steps=7)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["gockpt", "gockpt_o"])
@pytest.mark.parametrize("case", CASES)
def test_every_row_of_the_matrix(case: str, overlap: bool, served: Bench) -> None:
    check_fuzzy(served, matrix(case, "all"), left(3, overlap=overlap), late=False)


def test_parameters_of_all_kinds_and_two_optimizers(served: Bench) -> None:
    """Updates that concern none of the parts have records, too: without content."""
    check_fuzzy(served, Odd, left(4))
    step = steps_on_disk(served.run)[0]
    heads = heads_on_disk(served.run, step)
    assert {there for kind, _, there in heads if kind == "update"} == {True, False}


@pytest.mark.parametrize(
    "case", ["AdamW-foreach", pytest.param("SGD-momentum-for-loop", marks=pytest.mark.slow)]
)
def test_keeper_and_recovery_give_the_same(case: str, run_folder: Path) -> None:
    """Every bit of every entry of every base, whoever has made it whole."""
    found = {}
    for name, method in (("keeper", over(3)), ("recovery", left(3))):
        run = run_folder.parent / name
        run.mkdir()
        with serving(run) as bench:
            world = matrix(case, "all")(seed=1)
            with opened(run, world, method=method, every=4, seams=Seams(lane=LateLane)) as ckpt:
                ckpt.resume()
                run_steps(ckpt, world, 10)
            found[name] = {step: digests(bench.run, step) for step in steps_on_disk(run)}
    assert len(found["keeper"]) == 2
    assert found["keeper"] == found["recovery"]


def test_what_a_base_consists_of(served: Bench) -> None:
    """Each part at its own update, and one record for every update since the first."""
    world = World()
    with opened(served.run, world, method=left(4), every=4) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 7)
    lsns = lsns_on_disk(served.run, 7)
    assert set(lsns.values()) == {4, 5, 6, 7}
    assert lsns["model/1.running_mean"] == 7, "no optimizer replays that"
    heads = heads_on_disk(served.run, 7)
    assert heads == [(*("update", lsn), True) for lsn in (5, 6, 7)] + [("mark", 7, True)]
    assert restored(served.run, World(seed=9), 7) == states[7]


def test_the_tools_know_such_a_base(served: Bench) -> None:
    world = World()
    with opened(served.run, world, method=left(3), every=3) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 8)
    assert steps_on_disk(served.run) == [5, 8]
    assert invoke("ls", served.run).exit_code == 0
    assert invoke("verify", served.run).exit_code == 0
    replayed = invoke("verify", "--replay", served.run)
    assert replayed.exit_code == 0, replayed.output
    found = document("inspect", served.run)
    assert [record["kind"] for record in found["records"]] == ["update", "update", "mark"]
    assert {entry["lsn"] for entry in found["entries"]} == {6, 7, 8}
    assert "seen update 6" in invoke("inspect", served.run).output


def test_a_resume_says_that_it_was_made_whole(served: Bench) -> None:
    world = World()
    with opened(served.run, world, method=left(3), every=3) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 5)
    with opened(served.run, World(seed=9), method=left(3), every=3) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.replayed, recovery.exact) == (5, 0, True)
    assert "completed by replaying 2 update(s)" in recovery.evidence


def test_a_log_goes_on_from_such_a_base(served: Bench) -> None:
    """Another method goes on, whose log is replayed behind the parts."""
    world = World()
    with opened(served.run, world, method=left(3), every=3) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 5)
    log = everstep.LogOptions(to="disk", batch_steps=1)
    other = World(seed=9)
    with opened(served.run, other, method="logged", log=log) as ckpt:
        assert ckpt.resume().step == 5
        states = run_steps(ckpt, other, 3)
    assert restored(served.run, World(seed=8), 7) == states[7]


def test_windows_end_early_and_begin_anew(served: Bench) -> None:
    """By save(), by close(), by a parameter that stops to learn."""
    world = World()
    ckpt = opened(served.run, world, method=left(5))
    states = run_steps(ckpt, world, 2)
    inspect(ckpt).take_due()
    for parameter in world.model[3].parameters():
        parameter.requires_grad_(False)
    states |= run_steps(ckpt, world, 2)
    assert ckpt.save().step == 4
    for parameter in world.model[3].parameters():
        parameter.requires_grad_(True)
    states |= run_steps(ckpt, world, 1)
    inspect(ckpt).take_due()
    states |= run_steps(ckpt, world, 2)
    ckpt.close()
    assert steps_on_disk(served.run) == [4, 7]
    for step in (4, 7):
        assert len(set(lsns_on_disk(served.run, step).values())) == 3
        assert restored(served.run, World(seed=9), step) == states[step]


def test_steps_without_an_update_between_two_bases(served: Bench) -> None:
    """Entries of several updates are compared with no other base: they differ."""
    world = World()
    ckpt = opened(served.run, world, method=left(3))
    run_steps(ckpt, world, 2)
    inspect(ckpt).take_due()
    run_steps(ckpt, world, 2)
    ckpt.step()  # nothing was updated in it
    assert ckpt.save().durable.result(30) > 0
    ckpt.close()
    assert steps_on_disk(served.run) == [4, 5]


class Tensors:
    """Learning rates that are tensors, and a schedule that writes to them behind the update."""

    def __init__(self, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self) -> None:
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def snapshot(self) -> dict[str, Any]:
        tensors = {k: v.tolist() for k, v in self.model.state_dict().items()}
        state = [{k: v.tolist() for k, v in s.items()} for s in self.optimizer.state.values()]
        rate = self.optimizer.param_groups[0]["lr"]
        return {
            **tensors,
            "state": state,
            "rate": rate.item(),
            "rng": torch.get_rng_state().tolist(),
        }


def test_options_that_are_tensors_end_as_the_last_mark_has_them(served: Bench) -> None:
    check_fuzzy(served, Tensors, left(3), steps=7)


def test_an_interval_and_a_number_of_parts_of_its_own_choice(served: Bench) -> None:
    world = World()
    with opened(served.run, world, method=left("auto"), every=3) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 9)
    for step in steps_on_disk(served.run):
        assert restored(served.run, World(seed=9), step) == states[step]


def test_the_option_is_of_bases_over_several_steps() -> None:
    assert everstep.Method(base="multistep").rebuild == "keeper"
    with pytest.raises(OptionError, match="rebuild need base='multistep', not base='lazy'"):
        everstep.Method(base="lazy", rebuild="recovery")
    with pytest.raises(OptionError, match="no rebuild 'recover'"):
        everstep.Method(base="multistep", rebuild="recover")


def test_no_base_is_made_whole_over_other_ties() -> None:
    """Updates of the one tensor would not reach the other; it is refused before any is read."""
    opened_base: Any = SimpleNamespace(marker=SimpleNamespace(step=4))
    loaded: Any = SimpleNamespace(mismatches=(), tied=("a, b were one tensor",))
    rest: list[Any] = [None, None, None]
    with pytest.raises(ReplayError, match=r"tied as they were: a, b.*\n.*same tied weights"):
        complete_live_base(opened_base, loaded, *rest)
