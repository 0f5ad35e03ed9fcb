"""DeepSpeed: checkpoints of an engine in verified files, and engines that are not supported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")

import torch  # noqa: E402
from deepspeed.utils import groups  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import everstep  # noqa: E402
from everstep.errors import DamageError, OptionError  # noqa: E402
from everstep.integrations.deepspeed import EverstepCheckpointEngine, resumable  # noqa: E402
from tests.frameworks.samples import classifier  # noqa: E402

STAGES = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("LOCAL_RANK", "0")
    method = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    yield
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None


def engine_of(stage: int, *, groups: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model = classifier()
    parameters: Any = list(model.parameters())
    if groups == 2:
        parameters = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 1e-3}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **options,
    }
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for number in steps:
        torch.manual_seed(number)
        loss = engine(torch.randn(4, 16)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(8, 16), batch_size=4)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumable_engine_makes_the_same_updates(stage: int, tmp_path: Path) -> None:
    plain = train(engine_of(stage), range(5))
    engine = engine_of(stage)
    run, _ = resumable(engine, tmp_path / "run", loader())
    assert train(engine, range(5)) == plain
    run.close()


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_of_an_engine(stage: int, tmp_path: Path) -> None:
    engine = engine_of(stage)
    engine.checkpoint_engine = EverstepCheckpointEngine()
    train(engine, range(3))
    engine.save_checkpoint(tmp_path / "out", client_state={"samples": 12})
    wanted = train(engine, range(3, 6))
    again = engine_of(stage)
    again.checkpoint_engine = EverstepCheckpointEngine()
    folder, client = again.load_checkpoint(tmp_path / "out")
    assert client["samples"] == 12
    assert again.global_steps == 3
    assert train(again, range(3, 6)) == wanted
    files = sorted(Path(folder).parent.glob("*_states.pt"))
    assert len(files) == (1 if stage == 0 else 2)
    for file in files:
        assert everstep.peek(file).step == (3 if "model" in file.name else 0)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    engine = engine_of(1)
    engine.checkpoint_engine = EverstepCheckpointEngine()
    engine.save_checkpoint(tmp_path / "out", tag="first")
    file = next((tmp_path / "out" / "first").glob("*optim_states.pt"))
    shard = max((p for p in file.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(DamageError, match="the checkpoint cannot be read"):
        engine.load_checkpoint(tmp_path / "out")


def test_a_later_resume_of_the_loops_own(tmp_path: Path) -> None:
    """The weights that the module computes with follow the partitions."""
    engine = engine_of(2)
    run, _ = resumable(engine, tmp_path / "run", loader(), every=1, method="sync", keep=9)
    losses = []
    for number in range(6):
        losses += train(engine, range(number, number + 1))
        run.checkpointer.step()
    run.checkpointer.resume(step=3)
    assert train(engine, range(3, 6)) == losses[3:]
    run.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, "with the optimizer"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "with offload_optimizer",
        ),
    ],
    ids=["no ZeRO", "offload"],
)
def test_engines_that_are_not_supported(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    engine = engine_of(0, **options, zero_force_ds_cpu_optimizer=False)
    with pytest.raises(OptionError, match=words) as caught:
        resumable(engine, tmp_path / "run", loader())
    assert "EverstepCheckpointEngine saves" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_loaders(tmp_path: Path) -> None:
    engine = engine_of(1)
    with pytest.raises(OptionError, match="no loader is given"):
        resumable(engine, tmp_path / "run")
    with pytest.raises(OptionError, match="a list cannot be made resumable"):
        resumable(engine, tmp_path / "run", [1, 2])  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
