"""A streaming dataset of Hugging Face, through a loader that is part of the state."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

import everstep
from tests.frameworks import record
from tests.frameworks.samples import classifier


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    """Add noise, drawn from NumPy's generator as transforms draw it."""
    return {**sample, "noise": float(np.random.rand())}


def main() -> None:
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stream = Dataset.from_dict({"n": list(range(96))}).to_iterable_dataset(num_shards=4)
    if os.environ.get("BUFFER"):
        stream = stream.shuffle(seed=42, buffer_size=int(os.environ["BUFFER"]))
    workers = int(os.environ["WORKERS"])
    loader = everstep.data.ResumableLoader(
        DataLoader(stream.map(augmented), batch_size=8, num_workers=workers),
        seed=3,
        dataset_state=bool(os.environ.get("STATE")),
    )
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with everstep.Checkpointer(
        os.environ["RUN"], state, every=5, method=os.environ["METHOD"]
    ) as ckpt:
        recovery = ckpt.resume()
        record.recovered(recovery)
        step = recovery.step
        for epoch in range(loader.epoch, 3):
            for batch in loader:
                features = batch["n"][:, None] / 96 + batch["noise"][:, None].float() * torch.ones(
                    16
                )
                loss = torch.nn.functional.cross_entropy(model(features), batch["n"] % 4)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                ckpt.step()
                record.step(step, [epoch, batch["n"].tolist(), loss.item()])
                record.kill_if_due(step)
    record.final(model=model.state_dict(), optimizer=optimizer.state_dict()["state"])


if __name__ == "__main__":
    main()
