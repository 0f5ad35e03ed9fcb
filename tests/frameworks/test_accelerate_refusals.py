"""Prepared objects that cannot be resumed exactly are refused before training begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from everstep.errors import OptionError
from everstep.integrations.accelerate import resumable


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test has an Accelerator of its own; accelerate shares some of it."""
    yield
    Accelerator().free_memory()


def prepared(config: DataLoaderConfiguration | None = None, batches: int = 4) -> Any:
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(torch.randn(2 * batches, 2), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def step(accelerator: Any, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_stateful_loaders(tmp_path: Path) -> None:
    accelerator, *_ = prepared(DataLoaderConfiguration(use_stateful_dataloader=True))
    with pytest.raises(OptionError, match="StatefulDataLoader cannot be made resumable"):
        resumable(accelerator, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_dispatched_loaders(tmp_path: Path) -> None:
    accelerator, *_ = prepared(DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(OptionError, match="DataLoaderDispatcher cannot be made resumable"):
        resumable(accelerator, tmp_path / "run")


def test_nothing_prepared(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has prepared no optimizer or no loader"):
        resumable(Accelerator(cpu=True), tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(DistributedType.FSDP, "FSDP 1"), (DistributedType.DEEPSPEED, "the type DEEPSPEED")],
)
def test_kinds_of_several_ranks(
    kind: DistributedType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, *_ = prepared()
    monkeypatch.setattr(accelerator.state, "distributed_type", kind)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", plugin, raising=False)
    with pytest.raises(OptionError, match=f"an Accelerator (with|of) {name} cannot be made"):
        resumable(accelerator, tmp_path / "run")


def test_parts_of_the_accelerator(tmp_path: Path) -> None:
    accelerator, model, *_ = prepared()
    with pytest.raises(OptionError, match="'model' of the state is the Accelerator's own"):
        resumable(accelerator, tmp_path / "run", state={"model": model})


def test_a_loop_that_leaves_its_epochs_early(tmp_path: Path) -> None:
    """The step of the last batch is marked, and the next epoch begins with its own order."""
    accelerator, model, optimizer, loader = prepared(batches=6)
    run = resumable(accelerator, tmp_path / "run", every=1)
    saw = list[torch.Tensor]()
    for _ in range(3):
        for number, batch in enumerate(loader):
            step(accelerator, model, optimizer, batch)
            saw.append(batch.clone())
            if number == 3:
                break
    run.close()
    assert run.checkpointer.stats().step == 12
    assert run.epoch == 3


def test_a_finished_training_does_not_go_on(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = prepared()
    run = resumable(accelerator, tmp_path / "run")
    for _ in range(run.epoch, 2):
        for batch in loader:
            step(accelerator, model, optimizer, batch)
    accelerator.end_training()
    weight = model.weight.clone()
    accelerator.free_memory()
    accelerator, model, optimizer, loader = prepared()
    run = resumable(accelerator, tmp_path / "run")
    assert (run.recovery.step, run.recovery.exact, run.epoch) == (8, True, 2)
    assert torch.equal(model.weight, weight)
    run.close()


def test_the_epoch_is_that_of_the_loader_that_trains(tmp_path: Path) -> None:
    """Of several prepared loaders, in any order: an evaluation has epochs of its own."""
    for start in range(2):
        accelerator, model, optimizer, held_out = prepared()  # the first that is prepared
        loader: Any = accelerator.prepare(DataLoader(torch.randn(8, 2), batch_size=2))
        run = resumable(accelerator, tmp_path / "run")
        assert run.epoch == 2 * start
        for _ in range(run.epoch, 2):
            for batch in loader:
                step(accelerator, model, optimizer, batch)
                for _ in held_out:
                    pass
        run.close()
        accelerator.free_memory()
