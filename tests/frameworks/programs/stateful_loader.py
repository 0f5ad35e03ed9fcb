"""torchdata's StatefulDataLoader in the state, over the data that the environment names."""

from __future__ import annotations

import os

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier

DATA, WORKERS = os.environ["DATA"], int(os.environ["WORKERS"])


class Permuted(torch.utils.data.Sampler):
    """Draws its order from torch's own generator as soon as it is iterated."""

    def __iter__(self):
        return iter(torch.randperm(80).tolist())

    def __len__(self):
        return 80


class Stream(torch.utils.data.IterableDataset):
    """Samples of a stream that has no position."""

    def __iter__(self):
        noisy, worker = Noisy(80), torch.utils.data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (noisy[index] for index in range(first, 80, every))


def loader_of() -> StatefulDataLoader:
    options: dict = {"batch_size": 4, "num_workers": WORKERS}
    data = Noisy(80)
    if DATA == "shuffled":
        return StatefulDataLoader(data, shuffle=True, **options)
    if DATA == "persistent":
        options |= {"sampler": torch.utils.data.RandomSampler(data), "persistent_workers": True}
        return StatefulDataLoader(data, **options)
    if DATA == "shuffled, own generator":
        return StatefulDataLoader(data, shuffle=True, generator=torch.Generator(), **options)
    if DATA == "distributed":
        sampler: torch.utils.data.Sampler = torch.utils.data.DistributedSampler(
            data, num_replicas=1, rank=0
        )
        return StatefulDataLoader(data, sampler=sampler, **options)
    if DATA == "torch's sampler":
        return StatefulDataLoader(data, sampler=torch.utils.data.RandomSampler(data), **options)
    if DATA == "permuted":
        return StatefulDataLoader(data, sampler=Permuted(), **options)
    if DATA == "weighted":
        sampler = torch.utils.data.WeightedRandomSampler(torch.ones(80), 80)
        batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
        return StatefulDataLoader(data, batch_sampler=batches, num_workers=WORKERS)
    if DATA == "stream":
        return StatefulDataLoader(Stream(), **options)
    assert DATA in ("datasets", "datasets, buffer")
    from datasets import Dataset

    clean = [Noisy(80)[index] for index in range(80)]
    rows = {
        "id": [i for i, _, _ in clean],
        "x": [x for _, x, _ in clean],
        "y": [y for *_, y in clean],
    }
    stream = Dataset.from_dict(rows).to_iterable_dataset(num_shards=4).with_format("torch")
    if "buffer" in DATA:
        stream = stream.shuffle(seed=0, buffer_size=10)
    return StatefulDataLoader(stream.map(lambda s: {"x": s["x"] + torch.randn(16)}), **options)


torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if DATA.startswith("accelerate"):
    from accelerate import Accelerator, DataLoaderConfiguration

    shuffles = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=DATA.endswith("seeded")
    )
    accelerator = Accelerator(cpu=True, dataloader_config=shuffles)
    # accelerate fetches a batch ahead: samples that draw in this process would not be exact.
    samples = Noisy(80)
    if WORKERS == 0:
        samples = [samples[index] for index in range(80)]
    loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True, num_workers=WORKERS)
    loader = accelerator.prepare(loader)
else:
    loader = loader_of()
told = getattr(loader, "sampler", None)
told = told if hasattr(told, "set_epoch") else loader.dataset
state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
with everstep.Checkpointer(os.environ["RUN"], state, every=5, method=os.environ["METHOD"]) as ckpt:
    recovery = ckpt.resume()
    record.recovered(recovery)
    step = recovery.step
    for epoch in range(state["epoch"], 3):
        if hasattr(told, "set_epoch") and not DATA.startswith("accelerate"):
            told.set_epoch(epoch)
        for batch in loader:
            ids, x, y = batch.values() if isinstance(batch, dict) else batch
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            record.step(step, [ids.tolist(), x.sum().item(), loss.item()])
            ckpt.step()
            record.kill_if_due(step)
        state["epoch"] = epoch + 1
record.final(
    model=model.state_dict(), optimizer=optimizer.state_dict(), random=torch.get_rng_state()
)
