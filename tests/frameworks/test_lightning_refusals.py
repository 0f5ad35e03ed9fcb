"""A Lightning Trainer that cannot be resumed exactly is refused before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from everstep.errors import OptionError
from everstep.integrations.lightning import EverstepCallback


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.linear(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2)


def trainer_of(*callbacks: lightning.Callback, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_steps": 4, **options},
    )


def loader() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.randn(16, 2), batch_size=2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"overfit_batches": 1}, "overfit_batches"),
    ],
)
def test_options(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    trainer = trainer_of(EverstepCallback(tmp_path / "run"), **options)
    with pytest.raises(OptionError, match=problem):
        trainer.fit(Module(), loader())
    assert not (tmp_path / "run").exists()


class Sharding(SingleDeviceStrategy):
    """Stands for strategies that need devices which this machine may not have."""


def test_strategies(tmp_path: Path) -> None:
    trainer = trainer_of(EverstepCallback(tmp_path / "run"), strategy=Sharding("cpu"))
    with pytest.raises(OptionError, match="a Trainer with the strategy Sharding cannot be"):
        trainer.fit(Module(), loader())
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    plain = trainer_of()
    plain.fit(Module(), loader())
    plain.save_checkpoint(tmp_path / "checkpoint")
    trainer = trainer_of(EverstepCallback(tmp_path / "run"))
    with pytest.raises(OptionError, match="ckpt_path is given"):
        trainer.fit(Module(), loader(), ckpt_path=tmp_path / "checkpoint", weights_only=False)


class Plain:
    def __iter__(self) -> Any:
        yield torch.ones(2, 2)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (DataLoader(Endless(), batch_size=2), "has no length"),
        ({"one": loader(), "other": Plain()}, "the position of a Plain cannot be restored"),
    ],
)
def test_loaders_without_a_position(data: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=problem):
        trainer_of(EverstepCallback(tmp_path / "run")).fit(Module(), data)


def test_parts_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'model' of the state is the Trainer's own"):
        EverstepCallback(tmp_path / "run", state={"model": Module()})


def test_plain_data_that_the_user_adds_stays_in_their_mapping(tmp_path: Path) -> None:
    class Counts(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            state["batches"] += 1

    for steps in (4, 6):
        state = {"batches": 0}
        callback = EverstepCallback(tmp_path / "run", state=state)
        trainer_of(Counts(), callback, max_steps=steps).fit(Module(), loader())
        assert state == {"batches": steps}


def test_two_callbacks(tmp_path: Path) -> None:
    callbacks = [EverstepCallback(tmp_path / "a"), EverstepCallback(tmp_path / "b")]
    with pytest.raises(Exception, match="EverstepCallback"):
        trainer_of(*callbacks).fit(Module(), loader())


def test_a_finished_training_does_not_go_on(tmp_path: Path) -> None:
    first, again = Module(), Module()
    trainer_of(EverstepCallback(tmp_path / "run")).fit(first, loader())
    trainer = trainer_of(EverstepCallback(tmp_path / "run"))
    trainer.fit(again, loader())
    assert trainer.global_step == 4
    assert torch.equal(first.linear.weight, again.linear.weight)


def test_an_error_in_training_closes_the_run(tmp_path: Path) -> None:
    """A Trainer of the same process can take the run over."""

    class Fails(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.global_step == 2:
                raise ValueError("mine")
            return super().training_step(batch, index)

    with pytest.raises(ValueError, match="mine"):
        trainer_of(EverstepCallback(tmp_path / "run", every=1)).fit(Fails(), loader())
    steps = list[int]()
    callback = EverstepCallback(tmp_path / "run", on_resume=lambda found: steps.append(found.step))
    trainer = trainer_of(callback)
    trainer.fit(Module(), loader())
    assert steps == [2]
    assert trainer.global_step == 4
