"""``resume(initial=...)`` and ``everstep import``: states that other programs have written."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import everstep
from everstep.errors import MismatchError, OptionError
from tests.support.logged import World, document, invoke, opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained() -> World:
    """A model and an optimizer after three steps of a program without everstep."""
    world = World(seed=5)
    for _ in range(3):
        world.train()
    return world


def parts_of(world: World) -> dict[str, Any]:
    names = ("model", "optimizer", "scheduler")
    return {name: world.state[name].state_dict() for name in names}


def write_hugging_face(world: World, path: Path) -> None:
    """Two files and an index; of the tied weights only one name."""
    path.mkdir()
    tensors = {k: v.clone() for k, v in world.model.state_dict().items() if k != "tied"}
    names = list(tensors)
    weight_map = dict[str, str]()
    for number, some in enumerate((names[:3], names[3:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, path / file)
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_run(world: World, path: Path) -> None:
    with opened(path, world) as ckpt:
        ckpt.resume()
        ckpt.save().durable.result(60)


def renamed(world: World) -> dict[str, torch.Tensor]:
    return {f"module.{name}": one for name, one in world.model.state_dict().items()}


WRITERS: dict[str, tuple[Callable[[World, Path], Any], bool]] = {
    # name: (writer, an optimizer is in it)
    "torch": (lambda world, path: torch.save(world.model.state_dict(), path), False),
    "torch, parts": (lambda world, path: torch.save(parts_of(world), path), True),
    "torch, legacy": (
        lambda world, path: torch.save(parts_of(world), path, _use_new_zipfile_serialization=False),
        True,
    ),
    "Lightning": (
        lambda world, path: torch.save({"state_dict": renamed(world), "epoch": 3}, path),
        False,
    ),
    "safetensors": (
        lambda world, path: save_file(
            {name: one.clone() for name, one in world.model.state_dict().items()}, path
        ),
        False,
    ),
    "Hugging Face": (write_hugging_face, False),
    "DCP": (lambda world, path: dcp.save(parts_of(world), checkpoint_id=path), True),
    "run": (write_run, True),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_new_run_begins_with_it(kind: str, trained: World, tmp_path: Path) -> None:
    write, has_optimizer = WRITERS[kind]
    source = tmp_path / "source"
    write(trained, source)
    world = World(seed=9)
    with opened(tmp_path / "run", world) as ckpt:
        recovery = ckpt.resume(initial=source)
        assert (recovery.step, recovery.source, recovery.exact) == (0, "fresh", True)
        assert recovery.mismatched == ()
        assert str(source) in recovery.notes[0]
        for name, one in trained.model.state_dict().items():
            assert torch.equal(world.model.state_dict()[name], one)
        mine, theirs = (one.optimizer.state_dict()["state"] for one in (world, trained))
        assert bool(mine) == has_optimizer
        if has_optimizer:
            assert torch.equal(mine[0]["exp_avg"], theirs[0]["exp_avg"])
        if kind != "run":  # which has plain data and generators, too
            torch.manual_seed(7)
        for _ in range(5):
            world.train()
            ckpt.step()
    # What follows is recovered from the run itself: the source may be gone.
    again = World(seed=11)
    with opened(tmp_path / "run", again) as ckpt:
        recovery = ckpt.resume(initial=tmp_path / "gone")
        assert (recovery.step, recovery.exact) == (5, True)
        assert again.snapshot() == world.snapshot()


def test_a_state_dict_is_taken_as_it_is(trained: World, tmp_path: Path) -> None:
    world = World(seed=9)
    with opened(tmp_path / "run", world) as ckpt:
        recovery = ckpt.resume(initial=parts_of(trained), only=["model"])
        assert recovery.notes == ("the run begins with the state that was given: 'model'",)
    assert torch.equal(world.model[0].weight, trained.model[0].weight)
    assert not world.optimizer.state_dict()["state"]


def test_names_that_differ_are_listed(trained: World, tmp_path: Path) -> None:
    """Before anything is changed; what matches is taken if that is wanted."""
    given = dict(trained.model.state_dict())
    given["4.weight"] = given["4.weight"][:1].bfloat16()
    given["0.bias"] = given["0.bias"].double()
    del given["3.bias"]
    given["extra"] = torch.zeros(1)
    expected = {
        ("model/4.weight", "is (1, 6), not (2, 6)"),
        ("model/3.bias", "missing"),
        ("model/extra", "unexpected"),
    }
    world = World(seed=9)
    before = world.snapshot()
    with opened(tmp_path / "run", world) as ckpt:
        with pytest.raises(MismatchError) as caught:
            ckpt.resume(initial=given)
        assert set(caught.value.mismatches) == expected
        assert world.snapshot() == before
    with opened(tmp_path / "other", world) as ckpt:
        recovery = ckpt.resume(initial=given, strict=False)
        assert set(recovery.mismatched) == expected
        assert "'model': torch.float64 is converted to torch.float32" in recovery.notes
    assert torch.equal(world.model[0].weight, trained.model[0].weight)
    assert not torch.equal(world.model[3].bias, trained.model[3].bias)


def test_prefixes_of_wrappers_are_left_out(trained: World, tmp_path: Path) -> None:
    world = World(seed=9)
    with opened(tmp_path / "run", world) as ckpt:
        recovery = ckpt.resume(initial=renamed(trained))
    assert any("names were renamed: 'module.' is left out" in note for note in recovery.notes)
    assert torch.equal(world.model[0].weight, trained.model[0].weight)


# --- everstep import ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "run"])
def test_an_imported_state_is_a_run(kind: str, trained: World, tmp_path: Path) -> None:
    write, has_optimizer = WRITERS[kind]
    source = tmp_path / "source"
    write(trained, source)
    run = tmp_path / "run"
    found = document("import", source, "--to", run, "--step", 3)
    assert ("optimizer" in [one["part"] for one in found["left_out"]]) == has_optimizer
    assert document("verify", run)["ok"]
    loaded = everstep.load(run)
    assert (loaded.step, loaded.exact) == (3, True)
    part = "model" if has_optimizer or kind != "Lightning" else "state_dict"
    model = loaded.state_dict(part)
    for name, one in trained.model.state_dict().items():
        if name in model:
            assert torch.equal(model[name], one)
    assert len(model) >= len(trained.model.state_dict()) - 1
    world = World(seed=9)
    with opened(tmp_path / "next", world) as ckpt:
        ckpt.resume(initial=run)
    assert torch.equal(world.model[0].weight, trained.model[0].weight)


def test_export_and_import_are_inverse(trained: World, tmp_path: Path) -> None:
    write_run(trained, tmp_path / "run")
    for to in ("safetensors", "torch", "dcp"):
        out = tmp_path / to
        document("export", tmp_path / "run", "--to", to, "--out", out)
        document("import", out, "--to", tmp_path / f"run of {to}")
        mine = everstep.load(tmp_path / f"run of {to}").state_dict("model")
        theirs = everstep.load(tmp_path / "run").state_dict("model")
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


# --- Refused ------------------------------------------------------------------------------


def _truncated(path: Path, trained: World) -> None:
    torch.save(trained.model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-600])


def _npz(path: Path, _: World) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.npy", b"\x93NUMPY")


def _short_safetensors(path: Path, trained: World) -> None:
    WRITERS["safetensors"][0](trained, path)
    path.write_bytes(path.read_bytes()[:-8])


def _folder(path: Path, *names: str) -> None:
    path.mkdir()
    for name in names:
        (path / name).mkdir()


class _Custom:
    pass


FOREIGN: dict[str, tuple[Callable[[Path, World], Any], str]] = {
    "missing": (lambda path, _: None, "does not exist"),
    "empty": (lambda path, _: path.write_bytes(b""), "is an empty file"),
    "text": (lambda path, _: path.write_text("hello"), "is a file that begins with b'hello'"),
    "gguf": (lambda path, _: path.write_bytes(b"GGUF\x03\0\0\0" * 8), "is a GGUF file"),
    "lfs": (
        lambda path, _: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer",
    ),
    "npz": (_npz, "is an archive of arrays"),
    "truncated": (_truncated, "is a file that begins with b'PK"),
    "short": (_short_safetensors, "is not a whole safetensors file"),
    "objects": (
        lambda path, _: torch.save({"model": _Custom()}, path),
        "holds Python objects that torch.load(weights_only=True) refuses",
    ),
    "scalars": (lambda path, _: torch.save({"epoch": 3}, path), "none of the parts"),
    "folder": (lambda path, _: _folder(path, "a", "b"), "is a folder with a, b"),
    "Trainer": (
        lambda path, _: _folder(path, "checkpoint-500"),
        "is a folder of checkpoints: choose one of them, for example checkpoint-500",
    ),
    "DeepSpeed": (lambda path, _: _folder(path, "latest"), "is a folder of DeepSpeed"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_none_of_these_is_said(kind: str, trained: World, tmp_path: Path) -> None:
    write, problem = FOREIGN[kind]
    source = tmp_path / "source"
    write(source, trained)
    world = World(seed=9)
    before = world.snapshot()
    with (
        opened(tmp_path / "run", world) as ckpt,
        pytest.raises(everstep.EverstepError) as caught,
    ):
        ckpt.resume(initial=source)
    assert problem in caught.value.message
    assert world.snapshot() == before
    result = invoke("import", source, "--to", tmp_path / "imported")
    assert result.exit_code in (1, 2)
    assert not (tmp_path / "imported").exists()


def test_parts_that_are_not_there_are_refused(trained: World, tmp_path: Path) -> None:
    with opened(tmp_path / "run", World(seed=9)) as ckpt:
        with pytest.raises(OptionError, match="is not a part of the state"):
            ckpt.resume(initial=parts_of(trained), only=["nothing"])
        with pytest.raises(OptionError, match="selects parts of initial="):
            ckpt.resume(only=["model"])


def test_a_missing_shard_is_named(trained: World, tmp_path: Path) -> None:
    write_hugging_face(trained, tmp_path / "source")
    (tmp_path / "source" / "model-00002-of-00002.safetensors").unlink()
    with (
        opened(tmp_path / "run", World(seed=9)) as ckpt,
        pytest.raises(OptionError, match=r"model-00002-of-00002\.safetensors is missing"),
    ):
        ckpt.resume(initial=tmp_path / "source")


def test_an_import_writes_over_nothing(trained: World, tmp_path: Path) -> None:
    torch.save(trained.model.state_dict(), tmp_path / "source")
    (tmp_path / "run").mkdir()
    shutil.copyfile(tmp_path / "source", tmp_path / "run" / "mine")
    result = invoke("import", tmp_path / "source", "--to", tmp_path / "run")
    assert result.exit_code == 2
    assert "is not empty" in result.output
