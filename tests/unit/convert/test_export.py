"""``everstep export``: states in the formats of other programs, each read by its own library."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import everstep
from everstep.convert.selection import TensorStream
from tests.support.logged import World, document, invoke, opened, train
from tests.support.world import base_folder, flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_STEPS = (4, 7, 10)  # a base, a step of the log, the newest


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("export") / "run"
    train(run, World(), 10)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def same(one: Any, other: Any) -> bool:
    """Return True if nested values have the same keys, and tensors with the same bits."""
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("step", _STEPS)
def test_safetensors_has_the_names_of_the_model(step: int, template: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    found = document("export", template, "--to", "safetensors", "--out", out, "--step", step)
    model = everstep.load(template, step).state_dict("model")
    assert found["step"] == step
    assert found["exact"]
    written = load_file(out)
    assert same(dict(sorted(written.items())), dict(sorted(model.items())))
    assert torch.equal(written["tied"], written["3.weight"])
    world = World(seed=2)
    world.model.load_state_dict(written)


@pytest.mark.parametrize("step", _STEPS)
def test_a_torch_file_has_every_part(step: int, template: Path, tmp_path: Path) -> None:
    out = tmp_path / "state.pt"
    document("export", template, "--to", "torch", "--out", out, "--step", step)
    objects = everstep.load(template, step).objects
    for written in (torch.load(out), torch.load(out, mmap=True)):
        assert same(written, {k: v for k, v in objects.items() if not k.startswith("everstep/")})
        # Tied weights are one tensor, as in a state_dict() that torch itself has saved.
        model = written["model"]
        assert model["tied"].data_ptr() == model["3.weight"].data_ptr()
        world = World(seed=2)
        world.model.load_state_dict(model)
        world.optimizer.load_state_dict(written["optimizer"])


def test_a_part_that_is_named_is_written_alone(template: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    document("export", template, "--to", "torch", "--out", out, "--only", "model")
    assert same(torch.load(out), everstep.load(template).state_dict("model"))


@pytest.mark.parametrize("step", _STEPS)
def test_dcp_loads_the_folder(step: int, template: Path, tmp_path: Path) -> None:
    out = tmp_path / "dcp"
    document("export", template, "--to", "dcp", "--out", out, "--step", step)
    expected = everstep.load(template, step)
    state = {
        "model": {k: torch.zeros_like(v) for k, v in expected.state_dict("model").items()},
        "optimizer": World(seed=2).optimizer.state_dict(),
        "plain": {"seen": 0},
    }
    dcp.load(state, checkpoint_id=out)
    assert same(state["model"], expected.state_dict("model"))
    assert state["plain"] == {"seen": step}


def test_files_of_limited_size_and_their_index(template: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    arguments = ("--to", "safetensors", "--out", out, "--shard-size", "200")
    found = document("export", template, *arguments, "--dtype", "bf16")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("*.safetensors"))
    assert found["files"] == len(shards) + 1 > 2
    written = dict[str, torch.Tensor]()
    for shard in shards:
        tensors = load_file(shard)
        assert set(tensors) == {k for k, v in index["weight_map"].items() if v == shard.name}
        sizes = [one.nbytes for one in tensors.values()]
        assert sum(sizes) <= 200 or len(sizes) == 1
        written |= tensors
    model = everstep.load(template).state_dict("model")
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in written.values())
    as_bf16 = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.items()}
    assert same(dict(sorted(written.items())), dict(sorted(as_bf16.items())))


def test_a_hugging_face_folder_has_the_files_of_the_model(template: Path, tmp_path: Path) -> None:
    model = tmp_path / "pretrained"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    out = tmp_path / "hf"
    document("export", template, "--to", "hf", "--out", out, "--config", model)
    names = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert sorted(one.name for one in out.iterdir()) == names
    assert set(load_file(out / "model.safetensors")) == set(World().model.state_dict())
    other = tmp_path / "other"
    config = model / "config.json"
    document("export", template, "--to", "hf", "--out", other, "--config", config)
    assert sorted(one.name for one in other.iterdir()) == ["config.json", "model.safetensors"]


def test_tensors_are_read_a_group_at_a_time(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fits into a group, the files are the same."""
    monkeypatch.setattr("everstep.convert.selection._GROUP_BYTES", 1)
    for to in ("safetensors", "torch"):
        one = tmp_path / f"one.{to}"
        document("export", template, "--to", to, "--out", one)
    monkeypatch.undo()
    for to in ("safetensors", "torch"):
        other = tmp_path / f"other.{to}"
        document("export", template, "--to", to, "--out", other)
    mine, theirs = (load_file(tmp_path / f"{n}.safetensors") for n in ("one", "other"))
    assert same(mine, theirs)
    assert same(torch.load(tmp_path / "one.torch"), torch.load(tmp_path / "other.torch"))


_LARGE = """
import re, sys, torch, everstep
from pathlib import Path
from everstep.convert import export_state
run, out, to = sys.argv[1:]

def most() -> int:
    # Not ru_maxrss, which begins with the parent's.
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.zeros(1)
before = most()
export_state(run, Path(out), to)
print((most() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_memory_is_bounded(to: str, tmp_path: Path) -> None:
    """A model of 2 GiB needs less than 1 GiB."""
    model = torch.nn.ParameterList([torch.full((1 << 24,), float(n)) for n in range(32)])
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(
        tmp_path / "run", {"model": model}, method="sync", keeper=keeper
    ) as ckpt:
        ckpt.resume()
        ckpt.save().durable.result(60)
    del model
    out = tmp_path / "out"
    command = [sys.executable, "-c", _LARGE, str(tmp_path / "run"), str(out), to]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert 1 << 26 < int(done.stdout) < 1 << 30


# --- Refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--to", "torch", "--step", "77"], "neither a base nor the log has step 77"),
        (["--to", "torch", "--only", "nothing"], "matches nothing"),
        (["--to", "torch", "--shard-size", "1GB"], "only safetensors and hf are split"),
        (["--to", "torch", "--config", "here"], "only --to hf copies it"),
        (["--to", "torch", "--dtype", "bf16"], "would round the state of an optimizer"),
        (["--to", "torch", "--dtype", "int32"], "not a floating-point dtype"),
        (["--to", "torch", "--dtype", "half-ish"], "is not a dtype"),
        (["--to", "hf"], "needs the configuration of the model"),
        (["--to", "hf", "--config", "nowhere"], "no config.json"),
        (["--to", "safetensors", "--only", "scheduler"], "holds only tensors"),
        (["--to", "safetensors", "--shard-size", "0"], "must be more than nothing"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], problem: str, template: Path, tmp_path: Path
) -> None:
    result = invoke("export", template, "--out", tmp_path / "out", *arguments)
    assert result.exit_code in (1, 2)
    assert problem in result.output
    assert not list(tmp_path.iterdir())


def test_two_models_are_chosen_between(tmp_path: Path) -> None:
    world = World()
    world.state["teacher"] = torch.nn.Linear(2, 2)
    with opened(tmp_path / "run", world) as ckpt:
        ckpt.resume()
        ckpt.save().durable.result(60)
    out = tmp_path / "out"
    result = invoke("export", tmp_path / "run", "--to", "safetensors", "--out", out)
    assert "'model', 'teacher'" in result.output
    arguments = ("--to", "safetensors", "--out", out, "--only", "teacher")
    document("export", tmp_path / "run", *arguments)
    assert set(load_file(out)) == {"weight", "bias"}


def test_nothing_is_overwritten(template: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    result = invoke("export", template, "--to", "torch", "--out", out)
    assert (result.exit_code, out.read_text()) == (2, "mine")


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_a_full_disk_leaves_nothing(
    to: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TensorStream.read
    calls = list[int]()

    def full(self: TensorStream, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(self, tensor)

    monkeypatch.setattr(TensorStream, "read", full)
    result = invoke("export", template, "--to", to, "--out", tmp_path / "out")
    assert result.exit_code == 4
    assert "No space left on device" in result.output
    assert len(calls) == 4
    assert not list(tmp_path.iterdir())


def test_an_export_that_cannot_fit_is_refused_early(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    result = invoke("export", template, "--to", "torch", "--out", tmp_path / "out")
    assert result.exit_code == 4
    assert "10 are free" in result.output


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_a_damaged_tensor_is_never_written(to: str, run: Path, tmp_path: Path) -> None:
    """Of the only base that has the step."""
    shutil.rmtree(run / "timeline-00001" / "log")
    shard = next(base_folder(run, 4).glob("*.safetensors"))
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    tensors = json.loads(shard.read_bytes()[8 : 8 + header])
    flip(shard, 8 + header + tensors["model/4.weight"]["data_offsets"][0])
    before = sorted(tmp_path.iterdir())
    result = invoke("export", run, "--to", to, "--out", tmp_path / "out", "--step", 4)
    assert result.exit_code == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_torch_file_is_a_zip_archive(template: Path, tmp_path: Path) -> None:
    """The numbering of storages that the writer relies on."""
    out = tmp_path / "state.pt"
    document("export", template, "--to", "torch", "--out", out)
    names = [name.partition("/")[2] for name in zipfile.ZipFile(out).namelist()]
    count = sum(name.startswith("data/") for name in names)
    assert {f"data/{number}" for number in range(count)} <= set(names)
