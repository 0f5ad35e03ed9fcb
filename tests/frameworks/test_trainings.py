"""Programs on real frameworks end with the same bits whether or not they are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.kills import train

METHODS = ("lazy", "logged")


def deepspeed_has_float16() -> bool:
    accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
    return bool(accelerator.is_fp16_supported())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("program", "env", "kill_at"),
    [
        ("accelerated", {"WORKERS": "0"}, (3, 17)),
        ("accelerated", {"WORKERS": "2"}, (12, 13)),
        ("accelerate_resumable", {}, (7, 22)),
        ("accelerate_resumable", {"WORKERS": "2"}, (11, 24)),
        ("deepspeed_loop", {"STAGE": "1"}, (7.5, 22)),
        ("deepspeed_loop", {"STAGE": "2", "DTYPE": "float16"}, (3.5, 9)),
        ("deepspeed_loop", {"STAGE": "3", "DTYPE": "bfloat16"}, (7, 22.5)),
        ("fabric_loop", {"WORKERS": "2"}, (7.5, 22)),
        ("lightning_fit", {}, (7, 38)),
        ("lightning_callback", {"WORKERS": "2"}, (7, 20)),
        ("lightning_callback", {"ACCUMULATE": "2", "MAX_STEPS": "25"}, (5, 20)),
        ("lightning_callback", {"LIMIT": "0.75"}, (15, 38)),
        ("peft_lora", {}, (8, 13)),
        ("trainer", {}, (7, 20)),
        ("trainer_resumable", {}, (7, 24)),
        ("trainer_resumable", {"SAVE": "epoch", "WORKERS": "2"}, (12, 25)),
        ("trainer_resumable", {"DATA": "stream", "MAX_STEPS": "30"}, (5, 25)),
    ],
)
def test_killed_training_ends_in_the_same_bits(
    program: str, env: dict[str, str], kill_at: tuple[float, ...], method: str, tmp_path: Path
) -> None:
    if env.get("DTYPE") == "float16" and not deepspeed_has_float16():
        pytest.skip("DeepSpeed refuses float16 on this processor")
    env = {**env, "METHOD": method}
    whole = train(program, tmp_path / "whole", env=env)
    killed = train(program, tmp_path / "killed", kill_at=kill_at, env=env)
    assert [r["exact"] for r in killed.recoveries] == [True] * (1 + len(kill_at))
    assert killed.recoveries[-1]["step"] > 0
    if method == "logged":  # the keeper has the log: no step is lost
        assert [r["step"] for r in killed.recoveries] == [0, *map(int, kill_at)]
    assert killed.steps == whole.steps
    assert killed.final == whole.final


@pytest.mark.parametrize(
    ("program", "method", "env", "kill_at"),
    [
        ("accelerate_resumable", "lazy", {}, [7, (11.5, "0,1")]),
        ("accelerate_resumable", "logged", {}, [4, (11.5, "1")]),
        ("accelerate_resumable", "lazy", {"FSDP": "2"}, [(9, "0,1")]),
        ("accelerate_resumable", "logged", {"FSDP": "2"}, [(6.5, "1"), 15]),
        ("deepspeed_loop", "lazy", {"STAGE": "1"}, [7.5, (12, "1")]),
        ("deepspeed_loop", "logged", {"STAGE": "2"}, [(7.5, "0,1"), 12]),
        ("deepspeed_loop", "logged", {"STAGE": "3", "DTYPE": "bfloat16"}, [(4, "1"), 12.5]),
        ("fabric_loop", "logged", {}, [4, (7.5, "1"), (12, "0,1")]),
        ("lightning_callback", "lazy", {"ACCUMULATE": "2", "MAX_STEPS": "13"}, [(7, "0,1"), 10]),
        ("lightning_callback", "logged", {"WORKERS": "2"}, [4, (9.5, "1"), (20, "0,1")]),
        ("trainer_resumable", "lazy", {"DATA": "stream", "MAX_STEPS": "15"}, [(8, "1"), 12]),
        ("trainer_resumable", "logged", {}, [4, (9.5, "1"), (15, "0,1")]),
    ],
)
def test_two_ranks_are_killed(
    program: str, method: str, env: dict[str, str], kill_at: list[Any], tmp_path: Path
) -> None:
    """The first rank, the second amid a step, and both: the record of each rank is the same."""
    env = {**env, "METHOD": method}
    whole = train(program, tmp_path / "whole", env=env, ranks=2)
    killed = train(program, tmp_path / "killed", kill_at, env, ranks=2)
    assert killed.recoveries[-1]["step"] > 0
    for mine, other in ((killed, whole), (killed.others[0], whole.others[0])):
        assert [one["exact"] for one in mine.recoveries] == [True] * (1 + len(kill_at))
        assert mine.steps == other.steps
        assert mine.final == other.final


def test_without_the_trainers_sampler_each_rank_reads_all(tmp_path: Path) -> None:
    env = {"METHOD": "lazy", "SAMPLER": "own", "MAX_STEPS": "4"}
    trained = train("lightning_callback", tmp_path, env=env, ranks=2)
    ids = [{n: saw[:4] for n, saw in one.steps.items()} for one in (trained, *trained.others)]
    assert ids[0] == ids[1]
    assert len({number for saw in ids[0].values() for number in saw}) == 16


@pytest.mark.parametrize("method", METHODS)
def test_manual_optimization_of_two_optimizers(method: str, tmp_path: Path) -> None:
    """Lightning counts two steps where everstep counts one."""
    env = {"MANUAL": "1", "METHOD": method}
    whole = train("lightning_callback", tmp_path / "whole", env=env)
    killed = train("lightning_callback", tmp_path / "killed", (14, 40), env)
    assert [r["exact"] for r in killed.recoveries] == [True] * 3
    if method == "logged":
        assert [r["step"] for r in killed.recoveries] == [0, 7, 20]
    assert killed.steps == whole.steps
    assert killed.final == whole.final


@pytest.mark.parametrize("method", METHODS)
def test_a_scheduler_that_the_trainer_has_replaced_is_told_of(method: str, tmp_path: Path) -> None:
    killed = train("trainer", tmp_path, (9,), {"SCHEDULER": "replaced", "METHOD": method})
    assert [r["exact"] for r in killed.recoveries] == [True, False]
    assert "a scheduler that is not part of the state" in killed.output


@pytest.mark.parametrize(
    "program", ["accelerate_resumable", "lightning_callback", "trainer_resumable"]
)
def test_integrations_without_checkpoints(program: str, tmp_path: Path) -> None:
    saved = train(program, tmp_path / "saved", env={"METHOD": "lazy"})
    env = {"METHOD": "lazy", "EVERSTEP_DISABLE": "1"}
    disabled = train(program, tmp_path / "disabled", env=env)
    assert not (tmp_path / "disabled" / "run").exists()
    assert disabled.steps == saved.steps
    assert disabled.final == saved.final
