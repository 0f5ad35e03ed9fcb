"""Trainings over a resumable loader, killed by SIGKILL: losses and batches are the same again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.trainers import run_trainer

TRAIN = """
import hashlib, os, signal, sys
import torch
from torch.utils.data import DataLoader
import everstep
from tests.support.loaded import Noisy, NoisyStream

path, method, kind, workers, die = *sys.argv[1:4], *map(int, sys.argv[4:])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dataset, shuffle = (Noisy(), True) if kind == "map" else (NoisyStream(22), None)
made = DataLoader(dataset, batch_size=4, shuffle=shuffle, num_workers=workers)
loader = everstep.data.ResumableLoader(made, seed=3)
state = {"model": model, "optimizer": optimizer, "loader": loader}
with everstep.Checkpointer(path, state, every=1 if method == "sync" else 3, method=method) as ckpt:
    step = ckpt.resume().step
    for epoch in range(loader.epoch, 3):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.step()
            print(step, epoch, hashlib.sha256(batch.numpy().tobytes()).hexdigest(), loss.item())
            sys.stdout.flush()
            if step == die:
                os.kill(os.getpid(), signal.SIGKILL)
        print("epoch", epoch, torch.rand(()).item(), flush=True)
"""


def said(path: Path, method: str, kind: str, workers: int, die: int) -> list[str]:
    arguments = (str(path), method, kind, str(workers), str(die))
    status, out, err = run_trainer(TRAIN, *arguments, timeout_s=100)
    assert status == (-signal.SIGKILL if die else 0), err
    return out.splitlines()


@pytest.mark.parametrize(
    ("method", "kind", "workers"),
    [
        pytest.param("logged", "map", 0, marks=pytest.mark.slow),
        pytest.param("logged", "stream", 0, marks=pytest.mark.slow),
        pytest.param("sync", "map", 2, marks=pytest.mark.slow),
        pytest.param("logged", "map", 2, marks=pytest.mark.slow),
        pytest.param("logged", "stream", 2, marks=pytest.mark.slow),
        pytest.param("sync", "stream", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_five_times(
    run_folder: Path, tmp_path: Path, method: str, kind: str, workers: int
) -> None:
    """Twice in one epoch, at its end, and twice in the next; the validation at the end of an epoch
    is done again where the kill came before it."""
    whole = said(tmp_path / "whole", method, kind, workers, 0)
    found: list[str] = []
    for die in (2, 5, 6, 8, 11, 0):
        found += said(run_folder, method, kind, workers, die)
    assert found == whole


def test_killed_in_mid_epoch_and_at_its_end(run_folder: Path, tmp_path: Path) -> None:
    """Of the slow tests above one case."""
    whole = said(tmp_path / "whole", "logged", "map", 0, 0)
    found = [line for die in (5, 6, 0) for line in said(run_folder, "logged", "map", 0, die)]
    assert found == whole
