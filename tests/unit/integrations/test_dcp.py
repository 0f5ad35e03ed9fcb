"""``torch.distributed.checkpoint`` on everstep's files, in one process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import everstep
from everstep import errors
from everstep.integrations import dcp
from everstep.integrations.dcp.folder import Share
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem, Seams
from tests.crash.sim.training import freeze
from tests.support.command import document, invoke
from tests.support.ranks.dcp_saves import SlicePlanner, blank, save_as_ranks, trained_state
from tests.support.world import TIMEOUT_S, HookedFileSystem, files_below, flip, no_space

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:torch.distributed is unavailable",
)


def loaded(folder: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What ``load`` makes of a state without its values."""
    found: dict[str, Any] = blank(state)
    dcp.load(found, checkpoint_id=folder, **options)
    return found


def failure(action: Callable[[], object]) -> BaseException:
    """The error of rank 0 in the exception of torch."""
    with pytest.raises(CheckpointException) as caught:
        action()
    failed: BaseException = caught.value.failures[0][0]
    return failed


def statuses(folder: Path) -> list[str]:
    return [base.status for base in scan_run(PosixFileSystem(), folder).bases]


def shard_with(folder: Path, name: str) -> tuple[Path, int]:
    """The file that has an entry, and the place of its first byte."""
    found = document("inspect", folder)
    row = next(row for row in found["entries"] if row["name"] == name)
    return Path(found["path"]) / row["file"], row["offset"]


# --- What comes back ----------------------------------------------------------------------


def test_every_bit_comes_back(tmp_path: Path) -> None:
    state = trained_state()
    dcp.save(state, checkpoint_id=tmp_path / "step-12")
    assert freeze(loaded(tmp_path / "step-12", state)) == freeze(state)


def test_every_form_of_tensor_and_of_plain_data(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    state = {
        "tensors": {str(kind): torch.arange(6).to(kind) for kind in (*dtypes, torch.complex128)},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "view": torch.arange(12.0).view(3, 4).t(),
        "strided": torch.arange(12)[::2],
        "conj": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "plain": {"none": None, "set": {1, 2}, "tuple": (1, (2.5, "x")), "dtype": torch.float16},
        "numpy": np.array([[1, 2]], dtype=np.int16),
        "mixed": {"in a tuple": (torch.arange(3), 1), "in a list": [torch.ones(1), "x"]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "x")
    state["conj"] = state["conj"].resolve_conj()  # its bytes are those of the original
    found = blank(state)
    found["mixed"]["in a list"] = [torch.zeros(1), None]
    dcp.load(found, checkpoint_id=tmp_path / "x")
    assert freeze(found) == freeze(state)


def test_a_flat_state_dict_as_torchtitan_saves_it(tmp_path: Path) -> None:
    whole = trained_state()
    state = {**whole["model"], "optimizer": whole["optim"], "train_state": whole["train"]}
    dcp.save(state, checkpoint_id=tmp_path / "step-1")
    assert freeze(loaded(tmp_path / "step-1", state)) == freeze(state)
    assert freeze(state_dict_loader._load_state_dict_from_keys(  # of all
        storage_reader=dcp.EverstepStorageReader(tmp_path / "step-1")
    )) == freeze(state)  # fmt: skip


def test_objects_with_a_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    dcp.save({"model": model}, checkpoint_id=tmp_path / "x")
    other = torch.nn.Linear(2, 3)
    dcp.load({"model": other}, checkpoint_id=tmp_path / "x")
    assert freeze(other.state_dict()) == freeze(model.state_dict())


def test_without_flattening(tmp_path: Path) -> None:
    state = {"a.b": torch.arange(3), "plain": {"deep": [1, {"x": 2}]}}
    dcp.save(state, checkpoint_id=tmp_path / "x", planner=DefaultSavePlanner(False, False))
    found: dict[str, Any] = {"a.b": torch.zeros(3, dtype=torch.int64), "plain": None}
    dcp.load(found, checkpoint_id=tmp_path / "x", planner=DefaultLoadPlanner(False, False))
    assert freeze(found) == freeze(state)


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    state = trained_state()
    dcp.save(state, checkpoint_id=tmp_path / "x")
    part = {"model": state["model"], "train": {"step": 1}}
    assert freeze(loaded(tmp_path / "x", part)) == freeze(part)
    more = {**part, "new": torch.ones(2)}
    error = failure(lambda: loaded(tmp_path / "x", more))
    assert "Missing key in checkpoint state_dict: new" in str(error)
    found = loaded(tmp_path / "x", more, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert freeze(found["model"]) == freeze(part["model"])
    assert freeze(found["new"]) == freeze(torch.zeros(2))


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    state = {"large": torch.ones(1 << 20), "small": torch.arange(8)}
    dcp.save(state, checkpoint_id=tmp_path / "x")
    path, offset = shard_with(tmp_path / "x", "large")
    flip(path, offset)
    assert freeze(loaded(tmp_path / "x", {"small": state["small"]})["small"]) == freeze(
        state["small"]
    )


def test_a_planner_that_converts(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            found = super().transform_object(write_item, object)
            return found.half() if isinstance(found, torch.Tensor) else found

    state = {"weight": torch.tensor([1.5, 2.5]), "plain": {"lr": 0.1, "betas": (0.9, 0.99)}}
    dcp.save(state, checkpoint_id=tmp_path / "x", planner=Half())
    assert everstep.load(tmp_path / "x").tensors["weight"].dtype == torch.float16
    assert freeze(loaded(tmp_path / "x", state)) == freeze(state)  # in float32 again


# --- The folder ---------------------------------------------------------------------------


def test_everstep_reads_the_folder(tmp_path: Path) -> None:
    state = trained_state()
    folder = tmp_path / "step-12"
    dcp.save(state, checkpoint_id=folder)
    found = everstep.load(folder)
    assert (found.step, found.exact) == (12, True)
    objects = {k: v for k, v in found.objects.items() if not k.startswith("everstep/")}
    assert freeze(objects) == freeze(state)
    assert freeze(found.state_dict("model")) == freeze(dict(state["model"]))
    assert [base["status"] for base in document("ls", folder)["bases"]] == ["committed"]
    assert document("verify", folder)["bases"][0]["damages"] == []
    out = tmp_path / "model.safetensors"
    document("export", folder, "--to", "safetensors", "--out", out, "--only", "model")
    with safe_open(out, framework="pt") as file:
        assert set(file.keys()) == set(state["model"])


def test_the_tensors_of_a_flat_state_dict_are_exported_together(tmp_path: Path) -> None:
    state = {**trained_state()["model"], "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=tmp_path / "x")
    out = tmp_path / "model.safetensors"
    document("export", tmp_path / "x", "--to", "safetensors", "--out", out)
    with safe_open(out, framework="pt") as file:
        assert {name: freeze(file.get_tensor(name)) for name in file.keys()} == {  # noqa: SIM118
            name: freeze(one) for name, one in state.items() if isinstance(one, torch.Tensor)
        }


def test_files_are_safetensors_and_json_only(tmp_path: Path) -> None:
    dcp.save(trained_state(), checkpoint_id=tmp_path / "x")
    kinds = set()
    for path in files_below(tmp_path / "x"):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert file.keys()
        else:
            assert data.startswith(b"{")
        kinds.add(path.suffix or path.name)
        # Beginnings of pickles and of torch.save; the state has bytes that begin like one.
        assert b"PK\x03\x04" not in data
        assert b"\x80\x02}" not in data
    assert kinds == {".safetensors", ".json", ".done", ".metadata"}


def test_a_checkpoint_goes_on_as_a_run(tmp_path: Path) -> None:
    """A model that DCP has saved; the state of an optimizer has other names there."""
    model = torch.nn.Linear(2, 3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-7")
    other = torch.nn.Linear(2, 3)
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(tmp_path / "run", {"model": other}, keeper=keeper) as ckpt:
        ckpt.resume(initial=str(tmp_path / "step-7"))
    assert freeze(other.state_dict()) == freeze(model.state_dict())


@pytest.mark.parametrize(
    ("name", "step"), [("step-100", 100), ("epoch3", 3), ("latest", 0), ("7-final", 0)]
)
def test_the_step_is_the_number_at_the_end(name: str, step: int, tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / name)
    assert everstep.load(tmp_path / name).step == step


# --- Several ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_slices_of_several_ranks(world: int, tmp_path: Path) -> None:
    """Of 3 ranks the last has no rows of some tensors."""
    state = trained_state()
    save_as_ranks(state, tmp_path / "step-5", world)
    assert freeze(loaded(tmp_path / "step-5", state)) == freeze(state)
    found = everstep.load(tmp_path / "step-5")
    objects = {k: v for k, v in found.objects.items() if not k.startswith("everstep/")}
    assert freeze(objects) == freeze(state)
    assert (found.exact, found.notes) == (True, ())
    part = everstep.load(tmp_path / "step-5", only="model/*").state_dict("model")
    assert freeze(part) == freeze(dict(state["model"]))
    assert document("verify", tmp_path / "step-5")["bases"][0]["damages"] == []
    for verb in ("ls", "inspect", "du"):
        assert invoke(verb, tmp_path / "step-5").exit_code == 0
    out = tmp_path / "restored"
    document("restore", tmp_path / "step-5", "--step", 5, "--out", out)
    assert freeze(everstep.load(out).state_dict("model")) == freeze(dict(state["model"]))
    out = tmp_path / "model.safetensors"
    document("export", tmp_path / "step-5", "--to", "safetensors", "--out", out, "--only", "model")
    with safe_open(out, framework="pt") as file:
        assert all(
            freeze(file.get_tensor(name)) == freeze(one) for name, one in state["model"].items()
        )


def test_ranks_that_write_to_other_folders(tmp_path: Path) -> None:
    state = trained_state()
    writers = [dcp.EverstepStorageWriter(tmp_path / str(rank)) for rank in range(2)]
    planners = [SlicePlanner(rank, 2) for rank in range(2)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state, None, rank == 0)
        writers[rank].set_up_storage_writer(rank == 0, rank=rank)
    plans, _ = planners[0].create_global_plan([one.create_local_plan() for one in planners])
    plans = writers[0].prepare_global_plan(plans)
    writers[0].write_data(plans[0], planners[0])
    with pytest.raises(errors.StorageError, match="rank 1 does not see the save"):
        writers[1].write_data(plans[1], planners[1])
    assert not (tmp_path / "1").exists()


def test_a_checkpoint_without_the_files_of_a_rank_is_not_committed(tmp_path: Path) -> None:
    state = trained_state()
    save_as_ranks(state, tmp_path / "x", 2)

    class Forgetful(dcp.EverstepStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            found = super().write_data(plan, planner)
            for path in files_below(tmp_path / "x" / "timeline-00002", "rank-00001*"):
                path.unlink()
            return found

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(errors.StorageError, match=r"files of rank\(s\) 1 are not in the folder"),
    ):
        patch.setattr(dcp, "EverstepStorageWriter", Forgetful)
        save_as_ranks(trained_state(2), tmp_path / "x", 2)
    assert freeze(loaded(tmp_path / "x", state)) == freeze(state)
    assert statuses(tmp_path / "x") == ["committed"]


def test_ranks_that_would_read_different_checkpoints(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    readers = [dcp.EverstepStorageReader(tmp_path / "x") for _ in range(2)]
    plans = []
    for reader in readers:
        dcp.save(state, checkpoint_id=tmp_path / "x")
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, reader.read_metadata(), is_coordinator=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    with pytest.raises(errors.StateError, match="ranks read different checkpoints"):
        readers[0].prepare_global_plan(plans)


# --- The same id again --------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["new", "the same"])
def test_a_new_checkpoint_replaces_the_old(writer: str, tmp_path: Path) -> None:
    one = dcp.EverstepStorageWriter()
    for seed in range(3):
        state = trained_state(seed)
        chosen = one if writer == "the same" else None
        dcp.save(state, checkpoint_id=tmp_path / "latest", storage_writer=chosen)
        assert freeze(loaded(tmp_path / "latest", state)) == freeze(state)
        assert statuses(tmp_path / "latest") == ["committed"]
    assert not files_below(tmp_path, "*.tmp")
    assert not files_below(tmp_path, "slot-*")


def test_a_checkpoint_that_reads_back_damaged_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained_state()
    dcp.save(state, checkpoint_id=tmp_path / "x")
    really = Share.commit

    def commit(share: Any, fence: Any) -> None:
        really(share, fence)
        flip(Path(share.directory / share.files[0].name), -1)

    monkeypatch.setattr(Share, "commit", commit)
    error = failure(lambda: dcp.save(trained_state(2), checkpoint_id=tmp_path / "x"))
    assert isinstance(error, errors.DamageError)
    assert "older bases are kept" in str(error)
    assert freeze(loaded(tmp_path / "x", state)) == freeze(state)


def test_a_save_that_another_has_overtaken(tmp_path: Path) -> None:
    old, new = trained_state(1), trained_state(2)

    class Late(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            dcp.save(new, checkpoint_id=tmp_path / "x")
            return super().finish_plan(new_plan)

    error = failure(lambda: dcp.save(old, checkpoint_id=tmp_path / "x", planner=Late()))
    assert isinstance(error, errors.EverstepError)
    assert freeze(loaded(tmp_path / "x", new)) == freeze(new)
    assert statuses(tmp_path / "x") == ["committed"]


def test_a_save_that_is_overtaken_before_its_commit(tmp_path: Path) -> None:
    old, new = trained_state(1), trained_state(2)

    class Overtaken(dcp.EverstepStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            dcp.save(new, checkpoint_id=tmp_path / "x")
            super().finish(metadata, results)

    error = failure(lambda: dcp.save(old, checkpoint_id=tmp_path / "x", storage_writer=Overtaken()))
    assert isinstance(error, (errors.FencedError, errors.StorageError))
    assert freeze(loaded(tmp_path / "x", new)) == freeze(new)
    assert statuses(tmp_path / "x") == ["committed"]


# --- In the background --------------------------------------------------------------------


def test_async_save_has_the_values_of_the_call(tmp_path: Path) -> None:
    state = trained_state()
    expected = freeze(state)
    future = dcp.async_save(state, checkpoint_id=tmp_path / "x")
    state["model"]["0.weight"].add_(1)
    future.result(TIMEOUT_S)  # type: ignore[union-attr]
    assert freeze(loaded(tmp_path / "x", state)) == expected


def test_saves_of_one_writer_that_overlap(tmp_path: Path) -> None:
    """The first waits in its planner until the second has ended."""
    goes_on = threading.Event()
    begun = threading.Event()

    class Waiting(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            begun.set()
            assert goes_on.wait(TIMEOUT_S)
            return super().lookup_object(index)

    writer = dcp.EverstepStorageWriter()
    states = [trained_state(seed) for seed in range(2)]
    first = dcp.async_save(
        states[0], checkpoint_id=tmp_path / "0", storage_writer=writer, planner=Waiting()
    )
    assert begun.wait(TIMEOUT_S)
    second = dcp.async_save(states[1], checkpoint_id=tmp_path / "1", storage_writer=writer)
    second.result(TIMEOUT_S)  # type: ignore[union-attr]
    goes_on.set()
    first.result(TIMEOUT_S)  # type: ignore[union-attr]
    for number, state in enumerate(states):
        assert freeze(loaded(tmp_path / str(number), state)) == freeze(state)


# --- Damage -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_flipped_byte_is_named_and_reaches_no_tensor(world: int, tmp_path: Path) -> None:
    state = trained_state()
    save_as_ranks(state, tmp_path / "x", world)
    path, offset = shard_with(tmp_path / "x", "model/0.weight")
    flip(path, offset)
    found = blank(state)
    error = failure(lambda: dcp.load(found, checkpoint_id=tmp_path / "x"))
    assert isinstance(error, errors.DamageError)
    assert (error.entry, error.path) == ("model/0.weight", str(path))
    assert not found["model"]["0.weight"].any()
    assert document("verify", tmp_path / "x", status=1)["bases"][0]["damages"]


@pytest.mark.parametrize("what", ["header", "object", "end", "missing"])
def test_other_damage_is_refused(what: str, tmp_path: Path) -> None:
    state = trained_state()
    dcp.save(state, checkpoint_id=tmp_path / "x")
    path, offset = shard_with(tmp_path / "x", "everstep/objects/optim")
    if what == "missing":
        path.unlink()
    elif what == "end":
        os.truncate(path, path.stat().st_size - 1)
    else:
        flip(path, 100 if what == "header" else offset)
    error = failure(lambda: loaded(tmp_path / "x", state))
    assert isinstance(error, errors.StorageError)
    assert isinstance(error, errors.DamageError) == (what != "missing")
    assert str(tmp_path / "x") in str(error)


def test_damaged_records_do_not_bring_an_older_checkpoint_back(tmp_path: Path) -> None:
    state = trained_state()
    dcp.save(state, checkpoint_id=tmp_path / "x")
    before = {path: path.read_bytes() for path in files_below(tmp_path / "x" / "timeline-00001")}
    dcp.save(trained_state(2), checkpoint_id=tmp_path / "x")
    for path, data in before.items():  # as if the save had been killed before it deleted them
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name in ("manifest.json", "*.done"):
        for path in files_below(tmp_path / "x" / "timeline-00002" / "base", name):
            flip(path, 30)
    error = failure(lambda: loaded(tmp_path / "x", state))
    assert isinstance(error, errors.DamageError)
    assert "manifest.json is damaged" in str(error)


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    state = {"x": torch.ones(1)}
    error = failure(lambda: loaded(tmp_path / "nowhere", state))
    assert isinstance(error, errors.RecoveryError)
    assert not (tmp_path / "nowhere").exists()
    metadata = dcp.EverstepStorageReader(tmp_path / "nowhere").read_metadata()
    with pytest.raises(errors.RecoveryError):
        _ = metadata.state_dict_metadata


WRITES = {False: 11, True: 10}
"""Writes and reservations of a save to a new id, and to one that has a checkpoint."""
LAST_MARKER = 9


@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_leaves_nothing_half_made(again: bool, tmp_path: Path) -> None:
    """Each write in turn finds no room. Once the last marker is there, the checkpoint is whole."""
    old, new = trained_state(1), trained_state(2)
    for number in range(1, WRITES[again] + 2):
        folder = tmp_path / str(number)
        if again:
            dcp.save(old, checkpoint_id=folder)
        seen: list[str] = []

        def full(op: str, path: PurePath, seen: list[str] = seen, number: int = number) -> None:
            if op in ("write", "reserve"):
                seen.append(op)
                if len(seen) == number:
                    raise no_space()

        writer = dcp.EverstepStorageWriter(folder, seams=Seams(HookedFileSystem(full)))
        save = functools.partial(dcp.save, new, storage_writer=writer)
        if number > WRITES[again]:
            save()
        else:
            assert isinstance(failure(save), errors.OutOfSpaceError)
        if number > LAST_MARKER:
            assert freeze(loaded(folder, new)) == freeze(new)
            continue
        assert statuses(folder) == ["committed"] * again
        assert len(files_below(folder, "*.safetensors*")) == 2 * again
        if again:
            assert freeze(loaded(folder, old)) == freeze(old)


# --- Refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"lr": {"function": abs}}, "lr/function: .*code cannot be stored"),
        ({"where": Path("/x")}, r"where: .*store str\(value\)"),
        ({"everstep": {"x": torch.ones(1)}}, "cannot have the key 'everstep'"),
        ({"": torch.ones(1)}, "cannot have the key ''"),
        ({"sparse": torch.eye(2).to_sparse()}, "'sparse' cannot be stored: torch.sparse_coo"),
        ({"bits": torch.empty(1, dtype=torch.float4_e2m1fn_x2)}, "no safetensors code"),
        ({"in": (torch.eye(2).to_sparse(),)}, "'in/0' cannot be stored: torch.sparse_coo"),
    ],
)
def test_what_cannot_be_stored_is_named(state: dict[str, Any], reason: str, tmp_path: Path) -> None:
    error = failure(lambda: dcp.save({"ok": torch.ones(9), **state}, checkpoint_id=tmp_path / "x"))
    assert isinstance(error, errors.UnsupportedStateError)
    with pytest.raises(errors.UnsupportedStateError, match=reason):
        raise error
    assert not files_below(tmp_path / "x", "*.safetensors*")


def test_a_planner_that_gives_another_tensor_than_planned(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            return object.half()

    error = failure(
        lambda: dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x", planner=Half())
    )
    assert "gives 'x' as torch.float16 [2], and has planned torch.float32 [2]" in str(error)


def test_a_planner_with_a_stream_of_its_own(tmp_path: Path) -> None:
    class Custom(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            return super().transform_object(write_item, Path("/x"))

    error = failure(lambda: dcp.save({"x": 1}, checkpoint_id=tmp_path / "x", planner=Custom()))
    assert isinstance(error, errors.UnsupportedStateError)
    assert "Custom gives a stream of other data than plain" in str(error)


def test_slices_that_are_not_all_of_a_tensor(tmp_path: Path) -> None:
    state = {"x": torch.arange(8)}
    error = failure(
        lambda: dcp.save(state, checkpoint_id=tmp_path / "x", planner=SlicePlanner(0, 2))
    )
    assert isinstance(error, errors.StateError)
    assert "slices of 'x' have 4 of 8 elements" in str(error)
    assert statuses(tmp_path / "x") == []


def test_the_run_of_a_training(tmp_path: Path) -> None:
    keeper = everstep.KeeperOptions(process=False)
    model = torch.nn.Linear(2, 2)
    with everstep.Checkpointer(tmp_path / "run", {"model": model}, keeper=keeper) as ckpt:
        ckpt.resume()
        ckpt.save().durable.result(TIMEOUT_S)
    before = {path: path.read_bytes() for path in files_below(tmp_path)}
    state = {"model": model.state_dict()}
    for action in (dcp.save, dcp.load):
        error = failure(lambda action=action: action(state, checkpoint_id=tmp_path / "run"))  # type: ignore[misc]
        assert isinstance(error, errors.OptionError)
        assert "is the run folder of a training" in str(error)
    assert {path: path.read_bytes() for path in files_below(tmp_path)} == before


def test_a_folder_that_torch_has_written(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    torch_dcp.save(state, checkpoint_id=tmp_path / "x")
    for action in (dcp.save, dcp.load):
        error = failure(lambda action=action: action(state, checkpoint_id=tmp_path / "x"))  # type: ignore[misc]
        assert isinstance(error, errors.ForeignDirectoryError)
    torch_dcp.load(state, checkpoint_id=tmp_path / "x")


def test_torch_refuses_the_folder(tmp_path: Path) -> None:
    """Its reader does not take the note for a checkpoint."""
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x")
    error = failure(lambda: torch_dcp.load({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x"))
    assert "invalid load key, '{'" in str(error)


def test_plans_that_torch_caches(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = str(tmp_path)
    for message in ("cached", "cached"):
        error = failure(
            lambda: dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x", planner=planner)
        )
        assert isinstance(error, errors.OptionError)
        assert message in str(error)
    planner._enable_plan_caching = False  # what a planner of another kind may do as well
    writer = dcp.EverstepStorageWriter(tmp_path / "x")
    with pytest.raises(errors.OptionError, match="cached"):
        writer.prepare_local_plan(SavePlan([], usable=False))


def test_saves_without_collectives(tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match="use_collectives=False"):
        dcp.save({"x": 1}, checkpoint_id=tmp_path / "x", use_collectives=False)


@pytest.mark.parametrize("where", [None, "s3://bucket/x", ""])
def test_ids_that_are_no_folders(where: str | None) -> None:
    with pytest.raises((errors.OptionError, CheckpointException), match="folder"):
        dcp.save({"x": 1}, checkpoint_id=where)
