"""A Trainer that cannot be resumed exactly is refused before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from everstep.errors import OptionError, StateError
from everstep.integrations.transformers import resumable


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def trainer_of(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder / "trainer"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        **{"max_steps": 4, "per_device_train_batch_size": 2, **options},
    )
    data = Dataset.from_dict({"x": [[0.1 * n, 1.0] for n in range(32)]}).with_format("torch")
    return Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=list(callbacks))


@pytest.mark.parametrize("option", ["auto_find_batch_size", "ignore_data_skip"])
def test_options(option: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=option):
        resumable(trainer_of(tmp_path, **{option: True}), tmp_path / "run")


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_kinds_of_several_ranks(
    kind: DistributedType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", kind)
    with pytest.raises(OptionError, match=f"a Trainer of the type {kind} cannot be made resumable"):
        resumable(trainer, tmp_path / "run")


def test_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(OptionError, match="DataParallel"):
        resumable(trainer, tmp_path / "run")


def test_data_that_one_rank_reads_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(OptionError, match="whose first rank reads the data for all"):
        resumable(trainer, tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


def test_twice(tmp_path: Path) -> None:
    trainer = resumable(trainer_of(tmp_path), tmp_path / "run")
    with pytest.raises(OptionError, match="resumable already"):
        resumable(trainer, tmp_path / "run")


def test_parts_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'model' of the state is the Trainer's own"):
        resumable(trainer_of(tmp_path), tmp_path / "run", state={"model": Model()})


def test_a_version_without_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Trainer, "_init_training_state")
    with pytest.raises(OptionError, match="no _init_training_state"):
        resumable(trainer_of(tmp_path), tmp_path / "run")


def test_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    trainer = resumable(trainer_of(tmp_path), tmp_path / "run")
    with pytest.raises(OptionError, match="resumes by itself"):
        trainer.train(resume_from_checkpoint=True)


def test_finished_training_is_not_trained_again(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        trainer = resumable(
            trainer_of(tmp_path), tmp_path / "run", on_resume=lambda one: found.append(one.step)
        )
        trainer.train()
        assert trainer.state.global_step == 4
    assert found == [0, 4]


@pytest.mark.parametrize(
    ("options", "callbacks", "error"),
    [
        ({"gradient_accumulation_steps": 2}, [], "gradient_accumulation_steps"),
        ({"per_device_train_batch_size": 4}, [], "batch_size"),
        ({}, [EarlyStoppingCallback(3)], "callbacks"),
    ],
)
def test_another_trainer(
    options: dict[str, Any], callbacks: list[TrainerCallback], error: str, tmp_path: Path
) -> None:
    resumable(trainer_of(tmp_path), tmp_path / "run").train()
    more: dict[str, Any] = {"max_steps": 6, "metric_for_best_model": "loss", **options}
    trainer = resumable(trainer_of(tmp_path, *callbacks, **more), tmp_path / "run")
    with pytest.raises(StateError, match=error):
        trainer.train()
