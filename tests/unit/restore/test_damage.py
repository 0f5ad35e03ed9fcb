"""No damage to a run folder, however small, goes unnoticed or brings back wrong bits."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.errors import EverstepError
from tests.conftest import RUN_ID, SEED
from tests.support.leftovers import SHARED_MEMORY
from tests.support.oracle import snapshot
from tests.support.world import (
    base_folder,
    flip,
    inventory_of,
    opened,
    seed_everything,
    verdict_of,
)

STEPS = (1, 2)


class Template:
    """A run with two bases, and all that each of them holds."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.wanted: dict[int, Any] = {}
        state = self.build(1)
        with opened(self.run, state) as ckpt:
            ckpt.resume()
            for step in STEPS:
                state["model"](torch.randn(4, 3)).sum().backward()
                state["optimizer"].step()
                state["data"]["step"] = step
                ckpt.step()
                ckpt.save()
                self.wanted[step] = snapshot(state)
        self.files = sorted(path for path in self.run.rglob("*") if path.is_file())
        self.names = [str(path.relative_to(self.run)) for path in self.files]

    @staticmethod
    def build(seed: int) -> dict[str, Any]:
        seed_everything(seed)
        model = nn.Linear(3, 2).to(torch.float64)
        model.register_buffer("empty", torch.empty(0))
        model.double()
        optimizer = torch.optim.Adam(model.parameters())
        torch.set_default_dtype(torch.float32)
        wrapped = nn.Sequential(Cast(), model)
        return {"model": wrapped, "optimizer": optimizer, "data": {"step": 0, "t": torch.ones(3)}}


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """In memory where that is possible: hundreds of copies are made and resumed."""
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f"everstep-test-{RUN_ID}-", dir=place) as folder:
        yield Path(folder)


def noticed(run: Path) -> list[str]:
    """What scanning and verifying complain about."""
    inventory = inventory_of(run)
    found = [f"{path}: {problem}" for path, problem in inventory.problems]
    for base in inventory.bases:
        if base.manifest is None:
            found.append(base.problem or "no manifest")
        else:
            found += [str(damage) for damage in verdict_of(base).damages]
    assert len(inventory.bases) == len(STEPS)
    return found


def check(template: Template, run: Path, name: str) -> None:
    """``name``: the file that was damaged, in the copy ``run`` of the template."""
    assert noticed(run), f"damage to {name} goes unnoticed"
    state = template.build(2)
    with opened(run, state) as ckpt:
        recovery = ckpt.resume()
    in_newest_shard = name.endswith("000000000002/rank-00000.safetensors")
    assert recovery.step == (1 if in_newest_shard else 2)
    assert snapshot(state) == template.wanted[recovery.step]


def copy_of(template: Template, scratch: Path) -> Path:
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(template.run, run)
    return run


def test_the_undamaged_run_is_fine(template: Template, scratch: Path) -> None:
    run = copy_of(template, scratch)
    assert noticed(run) == []
    assert {Path(name).name for name in template.names} == {
        "run.json",
        "timeline.json",
        "manifest.json",
        "rank-00000.done",
        "rank-00000.safetensors",
    }


@st.composite
def places(draw: Any) -> tuple[float, float, int]:
    """``(which file, where in it, which bit)``; small files as often as large ones."""
    share = st.floats(0, 1, exclude_max=True)
    return draw(share), draw(share), draw(st.integers(0, 7))


def flip_somewhere(template: Template, scratch: Path, place: tuple[float, float, int]) -> None:
    which, where, bit = place
    name = template.names[int(which * len(template.names))]
    run = copy_of(template, scratch)
    size = (run / name).stat().st_size
    flip(run / name, int(where * size), bit)
    check(template, run, name)


@settings(max_examples=120)
@given(place=places())
def test_any_flipped_bit(
    template: Template, scratch: Path, place: tuple[float, float, int]
) -> None:
    flip_somewhere(template, scratch, place)


@pytest.mark.slow
@settings(max_examples=4000)
@given(place=places())
def test_any_flipped_bit_of_many(
    template: Template, scratch: Path, place: tuple[float, float, int]
) -> None:
    flip_somewhere(template, scratch, place)


@pytest.mark.slow
def test_every_byte_of_every_file(template: Template, scratch: Path) -> None:
    rng = random.Random(SEED)
    for name in template.names:
        run = copy_of(template, scratch)
        path = run / name
        data = path.read_bytes()
        for offset in range(len(data)):
            bad = bytearray(data)
            bad[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            assert noticed(run), f"{name}: byte {offset} of {len(data)}"


@pytest.mark.slow
@settings(max_examples=60)
@given(place=places(), junk=st.binary(min_size=1, max_size=9), cut=st.booleans())
def test_any_other_length(
    template: Template,
    scratch: Path,
    place: tuple[float, float, int],
    junk: bytes,
    cut: bool,
) -> None:
    """Cut off anywhere, or something appended."""
    which, where, _ = place
    name = template.names[int(which * len(template.names))]
    run = copy_of(template, scratch)
    data = (run / name).read_bytes()
    (run / name).write_bytes(data[: int(where * len(data))] if cut else data + junk)
    check(template, run, name)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_any_few_bytes_written_anywhere(template: Template, scratch: Path, data: Any) -> None:
    """More than one file: whatever comes back is one of the two bases, or an error is."""
    run = copy_of(template, scratch)
    changed = False
    for name in data.draw(st.lists(st.sampled_from(template.names), min_size=1, max_size=4)):
        old = (run / name).read_bytes()
        offset = data.draw(st.integers(0, len(old) - 1))
        new = data.draw(st.binary(min_size=1, max_size=16))
        bad = old[:offset] + new + old[offset + len(new) :]
        changed = changed or bad != old
        (run / name).write_bytes(bad)
    if changed:
        assert noticed(run)
    state = template.build(2)
    before = snapshot(state)
    try:
        with opened(run, state) as ckpt:
            step = ckpt.resume().step
    except EverstepError:
        return
    assert step in STEPS
    assert snapshot(state) == template.wanted[step] != before


@pytest.mark.parametrize("name", ["rank-00000.done", "rank-00000.safetensors"])
def test_a_missing_file_is_noticed(name: str, template: Template, scratch: Path) -> None:
    """(Without its manifest alone a base is simply not committed yet.)"""
    run = copy_of(template, scratch)
    (base_folder(run, 2) / name).unlink()
    check(template, run, f"000000000002/{name}")


def test_damage_is_told_by_file_and_entry(template: Template, scratch: Path) -> None:
    run = copy_of(template, scratch)
    path = base_folder(run, 2) / "rank-00000.safetensors"
    flip(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 1)
    flip(path, path.stat().st_size - 1)
    flip(base_folder(run, 1) / "rank-00000.done", 40)
    first, second = inventory_of(run).bases
    assert [damage.path for damage in verdict_of(first).damages] == [
        str(base_folder(run, 1) / "rank-00000.done")
    ]
    damages = verdict_of(second).damages
    entries = [damage.entry for damage in damages if damage.entry]
    assert entries[0] == "model/1.weight"
    assert entries[-1] == "everstep/objects/everstep/rng"
    assert {damage.path for damage in damages} == {str(path)}
