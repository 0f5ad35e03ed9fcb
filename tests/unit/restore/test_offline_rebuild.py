"""States built from files alone: bit for bit those of training, or refused, or said to be other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.errors import FormatError, OptionError, UnavailableError, UnsupportedStateError
from everstep.format.log import LogRecord
from everstep.format.records import TimelineRecord
from everstep.restore.offline import rank_files
from everstep.restore.offline.audit import audit, pairs
from everstep.restore.redo.driver import replay_conditions
from everstep.run.chain import Chain
from everstep.run.tensors import with_strides
from everstep.seams.fingerprint import fingerprint
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.values.objects import decode, encode
from tests.support.inside.declared import declared
from tests.support.logged import (
    World,
    edit_base,
    opened,
    rebuilder_of,
    record,
    rewrite_segment,
    segments_of,
    train,
)
from tests.support.world import base_folder, forget


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World, dict[int, Any]]:
    """Timeline 1: steps 1 to 10, bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("offline") / "run"
    world = World()
    return run, world, train(run, world, 10)


@pytest.fixture
def run(template: tuple[Path, World, dict[int, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[0], tmp_path / "run"))


def keep_only(run: Path, *steps: int) -> None:
    """Deletes all other bases of timeline 1."""
    for folder in (run / "timeline-00001" / "base").iterdir():
        if int(folder.name) not in steps:
            shutil.rmtree(folder)


def assert_all_equal(run: Path) -> int:
    """Each base is what the one before it and the log give; returns how many were compared."""
    with rebuilder_of(run) as rebuilder:
        found = [audit(rebuilder, pair) for pair in pairs(rebuilder)]
    assert [one for one in found if one.verdict != "equal" or one.reason] == []
    return len(found)


# --- Bit for bit ------------------------------------------------------------------------


def test_every_logged_step_from_the_first_base(
    run: Path, template: tuple[Path, World, dict[int, Any]]
) -> None:
    _, world, states = template
    keep_only(run, 1)
    names = {
        key: f"model/{key}" for key in world.model.state_dict() if not key.startswith("3.weight")
    }
    with rebuilder_of(run) as rebuilder:
        for step, wanted in states.items():
            rebuilt = rebuilder.state_at(step)
            assert (rebuilt.step, rebuilt.replayed) == (step, step - 1)
            assert (rebuilt.exact, rebuilt.why) == (True, "")
            state = rebuilt.state
            for key, name in names.items():
                entry = state.aliases.get(name, name)
                assert bytes(state.bytes_of(entry)) == wanted[key], (step, key)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "groups": lambda p: _two_groups(p),
}


def _two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, run_folder: Path) -> None:
    train(run_folder, World(OPTIMIZERS[name]), 6, every=2)
    assert assert_all_equal(run_folder) == 3


class WithGaps(World):
    """Half-precision parameters, one of which is every other column of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()  # type: ignore[assignment]
        wide = torch.randn(40, 130).bfloat16()
        self.model.part = nn.Parameter(wide[:, ::2])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.state |= {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape).bfloat16()
        self.optimizer.step()


def test_half_precision_with_gaps(run_folder: Path) -> None:
    """torch takes its scalar loop through them, which rounds otherwise than the one for vectors."""
    train(run_folder, WithGaps(), 6, every=2)
    assert assert_all_equal(run_folder) == 3


def test_strides_that_claim_more_memory_than_there_is() -> None:
    with pytest.raises(FormatError, match="claim"):
        with_strides(torch.zeros(2, 2), (1 << 60, 1))


def test_a_learning_rate_that_is_a_tensor(run_folder: Path) -> None:
    """A scheduler changes it behind the update: it is in the marks, or exactness is not claimed."""
    make = lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False)  # noqa: E731
    train(run_folder, World(make), 6, every=2)
    with rebuilder_of(run_folder) as rebuilder:
        for pair in pairs(rebuilder):
            found = audit(rebuilder, pair)
            if found.verdict != "equal":
                assert found.verdict == "unchecked"
                assert "a hyperparameter that is a tensor" in found.reason
                assert found.differing == ("optimizer/param_groups/0/lr",)


class Mixed:
    """Parameters of many kinds in two modules, two optimizers that share one of them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.image = nn.Conv2d(3, 4, 3)
        self.image.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.odd = nn.Module()
        self.odd.small = nn.Parameter(torch.randn(5).bfloat16())
        self.odd.turned = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.odd.wide = nn.Parameter(torch.randn(2, dtype=torch.complex128))
        self.odd.scalar = nn.Parameter(torch.tensor(0.5))
        self.odd.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.odd.empty = nn.Parameter(torch.ones(0, 2))
        self.first = torch.optim.AdamW([*self.image.parameters(), *self.odd.parameters()], lr=0.1)
        shared = {"params": [self.odd.scalar], "weight_decay": 0.1}
        self.second = torch.optim.SGD([shared], lr=0.1, momentum=0.5)
        self.state: dict[str, Any] = {
            "a.b": self.odd,
            "image": self.image,
            "first": self.first,
            "second": self.second,
            "kept": {"weight": self.image.weight, 3: torch.arange(3)},
        }
        self.count = 0

    def train(self) -> None:
        self.count += 1
        loss = self.image(torch.randn(1, 3, 5, 5)).square().mean() * self.odd.scalar
        loss = loss + (self.odd.turned.abs().sum() + self.odd.wide.abs().sum()).float()
        if self.count % 2:  # otherwise it has no gradient at all
            loss = loss + self.odd.small.float().square().sum()
        loss.backward()
        self.first.step()
        self.second.step()
        if self.count % 3 == 0:
            self.first.step()  # three updates in one step
        with torch.no_grad():  # nobody's update: what two share is logged in full
            self.odd.scalar.mul_(0.75)
        self.first.zero_grad()
        self.second.zero_grad()
        self.state["kept"][3] += 1

    def snapshot(self) -> None:
        return None


def test_tensors_of_all_kinds_and_optimizers_that_share_a_parameter(run_folder: Path) -> None:
    train(run_folder, Mixed(), 9, every=3)
    assert assert_all_equal(run_folder) >= 3
    with rebuilder_of(run_folder) as rebuilder:
        rebuilt = rebuilder.state_at(5)
    state = rebuilt.state
    assert rebuilt.replayed == 2
    for name in ("image/weight", "first/state/image.weight/exp_avg"):  # kernels go by strides
        assert tuple(state.tensors[name].stride()) == state.entries[name].stride == (27, 1, 9, 3)


@settings(max_examples=8)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 2))), min_size=2, max_size=8)
)
def test_any_course_of_training(
    steps: list[tuple[int, set[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Steps without an update, with several, parameters without gradients: each step's state,
    from base 1, has the bits of training."""
    run = tmp_path_factory.mktemp("course") / "run"
    model = nn.ParameterList([torch.full((n + 1,), 0.5) for n in range(3)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    world = type("W", (), {"state": {"model": model, "optimizer": optimizer}})
    states: dict[int, list[bytes]] = {}
    with opened(run, world, every=1000) as ckpt:
        ckpt.resume()
        for number, (updates, without) in enumerate([(1, set()), *steps], start=1):
            for _ in range(updates):
                for position, parameter in enumerate(model):
                    gone = position in without
                    parameter.grad = None if gone else torch.randn(position + 1)
                optimizer.step()
            ckpt.step()
            states[number] = [p.detach().numpy().tobytes() for p in model]
    forget(run)
    with rebuilder_of(run) as rebuilder:
        for step, wanted in states.items():
            rebuilt = rebuilder.state_at(step)
            assert rebuilt.exact, rebuilt.why
            assert [bytes(rebuilt.state.bytes_of(f"model/{n}")) for n in range(3)] == wanted


def test_over_the_fork_of_a_timeline(run: Path) -> None:
    other = World(seed=9)
    states = train(run, other, 4, at=6, every=1000)
    with rebuilder_of(run) as rebuilder:
        assert {base.timeline for base in rebuilder.log.usable} == {1, 2}
        for step in (8, 9):
            new = rebuilder.state_at(step)
            assert (new.timeline, new.exact) == (2, True)
            assert bytes(new.state.bytes_of("model/0.weight")) == states[step]["0.weight"]
            old = rebuilder.state_at(step, timeline=1)
            assert old.timeline == 1
            assert old.state.lsn == new.state.lsn
        with pytest.raises(OptionError, match="has step 3 of timeline 2"):
            rebuilder.state_at(3, timeline=2)


# --- What is not exact, or not possible -------------------------------------------------


def test_steps_that_nobody_has(run: Path) -> None:
    with rebuilder_of(run) as rebuilder, pytest.raises(OptionError) as caught:
        rebuilder.state_at(11)
    assert "neither a base nor the log on disk has step 11" in caught.value.message
    assert caught.value.hint == "existing steps: 1 to 10"


def edit_objects(record: LogRecord, change: Callable[[Any], None]) -> LogRecord:
    from everstep.format.log import record_digest

    about = decode(record.objects[UPDATE_OBJECT])
    change(about)
    objects = {UPDATE_OBJECT: encode(about)}
    return replace(record, objects=objects, digest=record_digest(record.data, objects))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda about: about.pop("kind"), "does not name the class of the optimizer"),
        (
            lambda about: about.update(kind="mine.Lion"),
            "'optimizer' is a mine.Lion: without the program that declares it",
        ),
        (
            lambda about: about.update(kind="os.system"),
            "'optimizer' is a os.system: without the program",
        ),
    ],
)
def test_classes_that_are_not_known(run: Path, change: Any, told: str) -> None:
    (segment,) = [one for one in segments_of(run) if one.last == 6]
    rewrite_segment(
        run,
        segment,
        lambda records: [
            edit_objects(one, change) if one.head.kind == "update" else one for one in records
        ],
    )
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.state_at(4).exact
        with pytest.raises(UnsupportedStateError, match="optimizer") as caught:
            rebuilder.state_at(5)
    assert told in caught.value.message
    assert caught.value.hint is not None
    assert "resume(step=...)" in caught.value.hint


def test_a_class_that_changes_in_mid_run(run: Path) -> None:
    keep_only(run, 4)
    (segment,) = [one for one in segments_of(run) if one.last == 6]
    change = lambda about: about.update(kind="torch.optim.adam.Adam")  # noqa: E731
    rewrite_segment(
        run, segment, lambda records: [*records[:2], edit_objects(records[2], change), records[3]]
    )
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.state_at(5).exact
        with pytest.raises(Exception, match=r"changes from torch\.optim\.adamw\.AdamW to"):
            rebuilder.state_at(6)


def test_a_parameter_outside_of_every_module(run_folder: Path) -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    class Loose:
        def __init__(self) -> None:
            self.state = {"weight": weight, "optimizer": optimizer}

        def train(self) -> None:
            weight.grad = torch.ones(3)
            optimizer.step()

        def snapshot(self) -> None:
            return None

    train(run_folder, Loose(), 3, every=1000)
    with rebuilder_of(run_folder) as rebuilder:
        with pytest.raises(UnsupportedStateError, match=r"'group0\[0\]' of 'optimizer'"):
            rebuilder.state_at(2)
        assert rebuilder.state_at(1).exact


def test_names_that_two_entries_could_have(run_folder: Path) -> None:
    """Section "a" with key "b.w", and section "a.b" with key "w"."""
    inner, outer = nn.Module(), nn.Module()
    inner.w = nn.Parameter(torch.ones(2))
    outer.b = nn.Module()
    outer.b.w = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([inner.w, outer.b.w], lr=0.1)

    class Twins:
        def __init__(self) -> None:
            self.state = {"a": outer, "a.b": inner, "optimizer": optimizer}

        def train(self) -> None:
            for parameter in (inner.w, outer.b.w):
                parameter.grad = torch.ones(2)
            optimizer.step()

        def snapshot(self) -> None:
            return None

    train(run_folder, Twins(), 2, every=1000)
    # The last step has a base of its own, which needs no replay.
    shutil.rmtree(base_folder(run_folder, 2))
    with (
        rebuilder_of(run_folder) as rebuilder,
        pytest.raises(UnsupportedStateError, match=r"'a\.b\.w' of 'optimizer': two entries"),
    ):
        rebuilder.state_at(2)


def test_adafactor_is_replayed_but_not_exact(run_folder: Path) -> None:
    train(run_folder, World(lambda p: torch.optim.Adafactor(p, lr=0.01)), 3, every=1000)
    with rebuilder_of(run_folder) as rebuilder:
        rebuilt = rebuilder.state_at(2)
    assert not rebuilt.exact
    assert "Adafactor" in rebuilt.why


def timeline_record(**changed: str) -> TimelineRecord:
    return TimelineRecord("r", 1, None, 0, True, 1, {**fingerprint(), **changed}, 0.0)


@pytest.mark.parametrize(
    ("records", "threads", "why"),
    [
        ([timeline_record(threads="3")], 3, ""),
        ([timeline_record(threads="3"), timeline_record(threads="4")], None, ""),
        ([timeline_record(threads="")], None, ""),
        ([timeline_record(torch="1.0")], None, "trained with torch 1.0, replayed with"),
        ([timeline_record(machine="z80")], None, "trained with machine z80"),
        ([timeline_record(device="NVIDIA H100")], None, "trained on NVIDIA H100, replayed on the"),
        ([None], None, "the timeline record, which names the machine of training, is damaged"),
        ([], None, ""),
    ],
)
def test_where_it_was_trained(records: Any, threads: int | None, why: str) -> None:
    found = replay_conditions(records)
    assert found[0] == threads
    assert found[1].startswith(why)
    assert bool(found[1]) == bool(why)


def test_another_torch_is_said(run: Path) -> None:
    path = run / "timeline-00001" / "timeline.json"
    record = TimelineRecord.decode(path.read_bytes(), PurePath(path))
    changed = replace(record, fingerprint={**record.fingerprint, "torch": "2.0"})
    path.write_bytes(changed.encode())
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.state_at(4).exact  # nothing is replayed
        rebuilt = rebuilder.state_at(5)
    assert (rebuilt.exact, rebuilt.why[:25]) == (False, "trained with torch 2.0, r"[:25])


def test_an_inexact_base_stays_so(run: Path) -> None:
    keep_only(run, 4)
    edit_base(run, 4, lambda state: setattr(state, "marker", replace(state.marker, exact=False)))
    with rebuilder_of(run) as rebuilder:
        for step in (4, 6):
            rebuilt = rebuilder.state_at(step)
            assert (rebuilt.exact, rebuilt.why) == (False, "the base is not exact")


def test_a_log_of_a_state_that_was_not_exact(run: Path) -> None:
    (segment,) = [one for one in segments_of(run) if one.last == 6]
    rewrite_segment(run, segment, lambda records: [*records[:3], record(records[3], exact=False)])
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.state_at(5).exact
        for step in (6, 7):
            rebuilt = rebuilder.state_at(step)
            assert (rebuilt.exact, rebuilt.why[:10]) == (False, "the state ")
        (found,) = [audit(rebuilder, pair) for pair in pairs(rebuilder) if pair.after.id.step == 8]
    assert found.verdict == "equal"  # bit for bit what it was, exact or not


def test_too_little_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "memory_available_bytes", lambda: 100)
    with (
        rebuilder_of(run) as rebuilder,
        pytest.raises(UnavailableError, match="bytes of memory; 100 are available"),
    ):
        rebuilder.state_at(4)


def test_a_base_of_another_run(run: Path) -> None:
    with rebuilder_of(run) as rebuilder:
        base = rebuilder.log.usable[min(rebuilder.log.usable)]
        rebuilder.log.inventory = replace(rebuilder.log.inventory, run="another")
        with pytest.raises(FormatError, match="belongs to another run"):
            rebuilder.load(base, Chain(base.id, (), ""))


def test_declared_classes_of_this_program_are_replayed(run_folder: Path) -> None:
    class Twice(torch.optim.Optimizer):
        """Its count of steps is no tensor."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        state["count"] = state.get("count", 0) + 1
                        parameter -= 2 * group["lr"] / state["count"] * parameter.grad

    with declared(Twice):
        train(run_folder, World(Twice), 6, every=5)
        with rebuilder_of(run_folder) as rebuilder:
            assert "declared by its user" in rebuilder.state_at(4).why
            rebuilt = rebuilder.state_at(6)
            (found,) = [audit(rebuilder, pair) for pair in pairs(rebuilder)][:1]
    state: Any = decode(rebuilt.state.objects["everstep/objects/optimizer"])
    assert state["state"]["model.0.weight"]["count"] == 6
    assert (found.verdict, found.reason[:30]) == ("equal", "replay is not exact here: test")
