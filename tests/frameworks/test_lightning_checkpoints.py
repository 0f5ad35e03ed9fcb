"""Checkpoints of Lightning's Trainer and of Fabric in everstep's files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

import everstep
from everstep.convert import run_folder
from everstep.errors import DamageError, OptionError, StorageError, UnsupportedStateError
from everstep.integrations.lightning import EverstepCheckpointIO
from tests.frameworks.kills import train
from tests.support.logged import document
from tests.support.world import flip

IO = EverstepCheckpointIO()


class Module(lightning.LightningModule):
    def __init__(self, width: int = 8, rates: tuple[float, ...] = (1e-2,), **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rates[0])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(32.0).reshape(16, 2) / 32, batch_size=2)


def trainer_of(folder: Path, *plugins: Any, **options: Any) -> lightning.Trainer:
    callbacks = [
        ModelCheckpoint(folder, monitor="loss", save_top_k=2, save_last=True),
        EarlyStopping("loss", patience=20),
    ]
    return lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=list(plugins),
        **options,
    )


def trained(folder: Path, *plugins: Any) -> dict[str, Any]:
    """Train three epochs, then two more from the checkpoint; return the final state."""
    torch.manual_seed(0)
    trainer_of(folder, *plugins, max_epochs=3).fit(Module(), loader())
    module = Module()
    trainer = trainer_of(folder, *plugins, max_epochs=5)
    trainer.fit(module, loader(), ckpt_path="last")
    assert trainer.global_step == 40
    return {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "best": trainer.checkpoint_callback.best_model_score,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("plugin", [IO, AsyncCheckpointIO(EverstepCheckpointIO())])
def test_training_goes_on_as_from_lightnings_own(plugin: Any, tmp_path: Path) -> None:
    own = trained(tmp_path / "own")
    mine = trained(tmp_path / "mine", plugin)
    assert same(mine, own)
    names = sorted(path.name for path in (tmp_path / "own").iterdir())
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == names
    assert all(path.is_dir() for path in (tmp_path / "mine").iterdir())


def test_a_checkpoint_has_all_that_lightnings_own_has(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, IO, max_epochs=1)
    trainer.fit(Module(rates=(0.1, 0.2), name="café"), loader())
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    own = trainer._checkpoint_connector.dump_checkpoint(False)
    found = IO.load_checkpoint(tmp_path / "mine.ckpt", weights_only=True)
    assert same(found, own)
    assert found["hyper_parameters"] == {"width": 8, "rates": (0.1, 0.2), "name": "café"}
    module = Module(**found["hyper_parameters"])
    module.load_state_dict(found["state_dict"])
    assert document("verify", tmp_path / "mine.ckpt")["ok"]
    # The commands and other trainings read it, and so does Lightning without the plugin.
    weights = everstep.load(tmp_path / "mine.ckpt", only="state_dict").state_dict("state_dict")
    assert same(dict(weights), dict(own["state_dict"]))
    state: dict[str, Any] = {"model": Module()}
    with everstep.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.resume(initial=tmp_path / "mine.ckpt")
    assert same(state["model"].state_dict(), own["state_dict"])
    document("export", tmp_path / "mine.ckpt", "--to", "torch", "--out", tmp_path / "own.ckpt")
    module = Module.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=True)
    assert same(module.state_dict(), own["state_dict"])


class Choice:
    """An object that nothing can store without pickle."""


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "own", max_steps=2)
    module = Module()
    trainer.fit(module, loader())
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
    IO.save_checkpoint(checkpoint, tmp_path / "last.ckpt")
    checkpoint["hyper_parameters"]["choice"] = Choice()
    checkpoint["hyper_parameters"]["more"] = [torch.relu]
    with pytest.raises(UnsupportedStateError) as found:
        IO.save_checkpoint(checkpoint, tmp_path / "last.ckpt")
    assert [name for name, _ in found.value.leaves] == [
        "hyper_parameters/choice",
        "hyper_parameters/more/0",
    ]
    assert "choice" not in IO.load_checkpoint(tmp_path / "last.ckpt")["hyper_parameters"]
    bad: dict[Any, Any] = {3: "three"}
    with pytest.raises(UnsupportedStateError, match="3"):
        IO.save_checkpoint(bad, tmp_path / "other.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "own"]


def test_keys_of_any_name(tmp_path: Path) -> None:
    checkpoint = {"a/b": torch.ones(2), "~1": {3: (1,), "x": None}, "empty": {}, "no tensors": []}
    IO.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert same(IO.load_checkpoint(tmp_path / "a.ckpt"), checkpoint)
    IO.save_checkpoint({"only": "text"}, tmp_path / "b.ckpt")
    assert IO.load_checkpoint(str(tmp_path / "b.ckpt")) == {"only": "text"}


def test_damage_is_an_error_with_file_and_entry(tmp_path: Path) -> None:
    weight = torch.arange(64.0)
    IO.save_checkpoint({"state_dict": {"weight": weight}}, tmp_path / "a.ckpt")
    (file,) = (tmp_path / "a.ckpt").rglob("*.safetensors")
    flip(file, file.read_bytes().index(weight.numpy().tobytes()) + 7)
    with pytest.raises(DamageError) as found:
        IO.load_checkpoint(tmp_path / "a.ckpt")
    assert file.name in str(found.value)
    assert "state_dict/weight" in str(found.value)


def test_a_failed_save_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IO.save_checkpoint({"n": 1}, tmp_path / "last.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "exchange", lambda *names: errno.EACCES)
        with pytest.raises(StorageError, match="Permission denied"):
            IO.save_checkpoint({"n": 2}, tmp_path / "last.ckpt")
    assert IO.load_checkpoint(tmp_path / "last.ckpt") == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_paths_and_options_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        IO.load_checkpoint(tmp_path / "none.ckpt")
    torch.save({"n": 1}, tmp_path / "own.ckpt")
    with pytest.raises(OptionError, match="was not written by everstep"):
        IO.load_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(OptionError, match="is a file"):
        IO.save_checkpoint({"n": 2}, tmp_path / "own.ckpt")
    with pytest.raises(OptionError, match="local directory"):
        IO.save_checkpoint({"n": 2}, "s3://bucket/last.ckpt")
    with pytest.raises(OptionError, match="storage_options"):
        IO.save_checkpoint({"n": 2}, tmp_path / "a.ckpt", storage_options={"a": 1})
    IO.save_checkpoint({"n": torch.ones(1)}, tmp_path / "a.ckpt")
    with pytest.raises(OptionError, match="map_location"):
        IO.load_checkpoint(tmp_path / "a.ckpt", map_location=lambda storage, place: storage)
    assert IO.load_checkpoint(tmp_path / "a.ckpt", map_location="meta")["n"].is_meta


def test_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[EverstepCheckpointIO()])
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "epoch": 3})
    again = torch.optim.Adam(other.parameters())
    state = dict(zip(("model", "optimizer"), fabric.setup(other, again), strict=True))
    assert fabric.load(tmp_path / "a.ckpt", state) == {"epoch": 3}
    assert same(other.state_dict(), model.state_dict())
    assert same(again.state_dict(), optimizer.state_dict())


def test_a_training_that_is_killed_in_its_saves(tmp_path: Path) -> None:
    """Amid the files of a checkpoint, and before it is complete: the older one is there."""
    whole = train("lightning_checkpoints", tmp_path / "whole")
    folder = tmp_path / "killed"
    points = ["save.before_rename=kill:3", "save.before_manifest=kill:4"]
    killed = train(
        "lightning_checkpoints", folder, [{"EVERSTEP_FAILPOINTS": point} for point in points]
    )
    assert killed.steps == whole.steps
    assert killed.final == whole.final
    # Lightning keeps some of those that it has resumed from; all of them are complete.
    assert all(IO.load_checkpoint(path) for path in (folder / "run").iterdir())
