"""Random generators as parts of the state: each draws on from where it was, the same object."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import FormatError, MismatchError, UnavailableError
from everstep.state.layout.entries import OBJECT_PREFIX
from everstep.state.training_state import State
from everstep.state.values import generators
from everstep.state.values.generators import GeneratorState, is_generator, new_generator
from everstep.state.values.objects import decode, encode
from everstep.state.values.tree import join
from tests.support.trainers import run_trainer
from tests.support.world import opened

BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
KINDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "legacy": lambda: np.random.RandomState(3),
    **{
        bits: lambda bits=bits: np.random.Generator(getattr(np.random, bits)(3))  # type: ignore[misc]
        for bits in BITS
    },
}


def drawn(generator: Any) -> list[float]:
    """Numbers of which the generator keeps some for its next call."""
    if isinstance(generator, torch.Generator):
        return [*torch.randn(3, generator=generator), *torch.rand(2, generator=generator)]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random(), generator.gauss(0, 1)]
    if isinstance(generator, np.random.RandomState):
        return [generator.randn(), generator.randint(9), generator.random_sample()]
    return [generator.standard_normal(), generator.integers(9, dtype=np.int32), generator.random()]


@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_on_from_where_it_was(run_folder: Path, kind: str) -> None:
    saved, live = KINDS[kind](), KINDS[kind]()
    within: dict[str, Any] = {"deep": [KINDS[kind](), (KINDS[kind](), 1)]}
    drawn(saved)
    drawn(within["deep"][1][0])
    with opened(run_folder, {"generator": saved, "within": within}) as ckpt:
        ckpt.save()
        wanted = drawn(saved), drawn(within["deep"][0]), drawn(within["deep"][1][0])
    there: dict[str, Any] = {"deep": [KINDS[kind](), (KINDS[kind](), 2)]}
    held = live, there["deep"][0], there["deep"][1][0]
    state = {"generator": live, "within": there}
    with opened(run_folder, state) as ckpt:
        assert ckpt.resume().exact
        assert state["generator"] is live
        assert (there["deep"][0], there["deep"][1][0]) == held[1:]
        assert there["deep"][1][1] == 1
        assert tuple(map(drawn, held)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_has_the_state_of_its_moment(kind: str) -> None:
    generator = KINDS[kind]()
    state = State({"a": [generator]})
    drawn(generator)
    survey = state.survey()
    wanted = drawn(generator)
    tree: Any = decode(survey.objects()[f"{OBJECT_PREFIX}a"])
    joined: Any = join(tree, {})
    found = joined[0]
    assert found is not generator
    assert drawn(found) == wanted


def test_where_there_is_none_one_is_made(run_folder: Path) -> None:
    saved = {"list": [KINDS["PCG64"]()]}
    with opened(run_folder, saved) as ckpt:
        ckpt.save()
    live: dict[str, Any] = {"list": []}
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    assert drawn(live["list"][0]) == drawn(saved["list"][0])


@pytest.mark.parametrize(
    ("saved", "live", "words"),
    [
        ("PCG64", "Philox", "saved numpy.random.Generator PCG64, live numpy.random.Gen.* Philox"),
        ("python", "torch", "saved random.Random, live torch.Generator cpu"),
        (None, "torch", "saved no random generator, live torch.Generator cpu"),
    ],
)
def test_another_kind_is_refused_by_name(
    run_folder: Path, saved: str | None, live: str, words: str
) -> None:
    with opened(run_folder, {"a": {"b": saved and KINDS[saved]()}}) as ckpt:
        ckpt.save()
    mine = KINDS[live]()
    with opened(run_folder, {"a": {"b": mine}}) as ckpt:
        with pytest.raises(MismatchError, match=f"a/b: {words}"):
            ckpt.resume()
        assert drawn(mine) == drawn(KINDS[live]()), "nothing has been touched"


def test_an_object_may_have_one_in_its_state_dict(run_folder: Path) -> None:
    class Sampler:
        def __init__(self) -> None:
            self.generator = KINDS["torch"]()

        def state_dict(self) -> dict[str, Any]:
            return {"generator": self.generator}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.generator.set_state(state["generator"].get_state())

    saved, live = Sampler(), Sampler()
    drawn(saved.generator)
    with opened(run_folder, {"sampler": saved}) as ckpt:
        ckpt.save()
    with opened(run_folder, {"sampler": live}) as ckpt:
        assert ckpt.resume().exact
    assert drawn(live.generator) == drawn(saved.generator)


def test_subclasses_and_others_are_no_generators() -> None:
    class Own(random.Random):
        pass

    assert not any(map(is_generator, (Own(), random.SystemRandom(), np.random.PCG64(), None)))


def test_bytes_that_claim_to_be_a_state() -> None:
    for kind, data, error in (
        ("random.Random", encode({"version": 3}), FormatError),
        ("torch.Generator cpu", encode(np.zeros(3, np.uint8)), FormatError),
        ("numpy.random.Generator PCG64", encode({"bit_generator": "MT19937"}), FormatError),
        ("numpy.random.Generator os", encode(None), UnavailableError),
        ("torch.Generator nowhere", encode(None), UnavailableError),
        ("other", encode(None), UnavailableError),
    ):
        with pytest.raises(error):
            join(GeneratorState(kind, data), {})


def test_one_of_a_device_that_is_not_here_is_refused(run_folder: Path) -> None:
    """Made up in the base: this machine may have the device."""
    there = GeneratorState("torch.Generator nowhere", encode(None))
    with opened(run_folder, {"a": {"b": there}}) as ckpt:
        ckpt.save()
    words = r"a/b: no torch\.Generator nowhere can be made"
    with opened(run_folder, {"a": {}}) as ckpt, pytest.raises(MismatchError, match=words):
        ckpt.resume()


@pytest.mark.parametrize("kind", KINDS)
def test_new_ones_are_of_their_kind(kind: str) -> None:
    name = generators.kind_of(KINDS[kind]())
    assert generators.kind_of(new_generator(name)) == name


def test_rewind_sets_it_back(run_folder: Path) -> None:
    generator, weight = KINDS["PCG64"](), torch.zeros(1)
    found: list[list[float]] = []
    state = {"generator": generator, "weight": weight}
    with opened(run_folder, state, every=1, keep=5) as ckpt:
        ckpt.resume()
        for _ in range(3):
            found.append(drawn(generator))
            ckpt.step()
        ckpt.wait()
        ckpt.rewind(1)
        assert [drawn(generator), drawn(generator)] == found[1:]


LOGGED = """
import os, random, signal, sys
import numpy as np, torch, everstep
path, die = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
others = [np.random.default_rng(1), random.Random(1)]
noise = {"torch": torch.Generator().manual_seed(1), "others": others}
state = {"model": model, "optimizer": optimizer, "noise": noise, "numpy": np.random.default_rng(7)}
with everstep.Checkpointer(path, state, every=4, method="logged") as ckpt:
    recovery = ckpt.resume()
    print("from", recovery.step, recovery.exact)
    for step in range(recovery.step, 11):
        x = torch.randn(2, 3, generator=noise["torch"]) + noise["others"][0].random()
        loss = model(x).square().mean() * noise["others"][1].random() + state["numpy"].random()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        print(step, loss.item(), flush=True)
        if step + 1 == die:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_log_brings_them_to_its_last_step(run_folder: Path, tmp_path: Path) -> None:
    def losses(path: Path, die: int) -> list[str]:
        status, out, err = run_trainer(LOGGED, str(path), str(die), timeout_s=60)
        assert status == (-signal.SIGKILL if die else 0), err
        return out.splitlines()

    whole = losses(tmp_path / "whole", 0)
    first, second = losses(run_folder, 6), losses(run_folder, 0)
    assert second[0] == "from 6 True"
    assert first[1:] + second[1:] == whole[1:]
