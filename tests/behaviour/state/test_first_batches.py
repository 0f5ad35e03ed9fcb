"""Loaders that are not in the state: what a program does before its first step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep import Checkpointer, Recovery
from everstep.data import ResumableLoader
from tests.support.stateful_loader import BATCH, COUNT, EPOCH, Noisy, StatefulLoader

# Other tests drop Checkpointers without close(). Those would watch the loaders of these tests.
pytestmark = pytest.mark.usefixtures("no_garbage")

MOVED = "batches were skipped, and the loader, its sampler or its samples have drawn from them"


class Fixed(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


def train(
    run: Path,
    stop: int,
    data: Any,
    *,
    method: str = "sync",
    own: bool = True,
    skips: bool = True,
    counts: bool = True,
    accumulate: int = 1,
    before: Any = lambda model: None,
    undo: bool = False,
    sampler: Any = None,
) -> Recovery:
    """The README's recipe: counters in plain data, a generator seeded by the epoch, a skip."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator() if own else None
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler, generator=generator)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if counts:
        state |= {"epoch": 0, "batch": 0}
    with Checkpointer(run, state, every=1, method=method) as ckpt:
        recovery = ckpt.resume()
        step = recovery.step
        before(model)
        restored = torch.get_rng_state()
        done = step * accumulate
        for epoch in range(done // EPOCH, 4):
            if generator is not None:
                generator.manual_seed(epoch)
            skipped = done - epoch * EPOCH if skips else 0
            for batch in itertools.islice(loader, skipped, None):
                if undo and step == recovery.step:
                    torch.set_rng_state(restored)
                (model(batch).square().mean() / accumulate).backward()
                done += 1
                if done % accumulate:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if counts:
                    state["epoch"], state["batch"] = divmod(done, EPOCH)
                ckpt.step()
                if step >= stop:
                    return recovery
    return recovery


def unobserved() -> bool:
    """Return whether torch's loaders are as they were."""
    return _BaseDataLoaderIter.__init__.__module__ == "torch.utils.data.dataloader"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["sync", "logged"])
def test_skipping_that_draws_is_not_called_exact(
    method: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_folder, 3, Noisy(), method=method)
    assert MOVED not in caplog.text
    recovery = train(run_folder, 4, Noisy(), method=method)
    assert recovery.exact, "this far it is"
    assert recovery.data == "not in the state"
    assert caplog.text.count(MOVED) == 1
    again = train(run_folder, 5, Noisy(), method=method)
    assert (again.step, again.exact) == (4, False)
    assert unobserved()


def test_a_loader_that_draws_its_order_from_the_processs_generator(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_folder, 3, Fixed(), own=False)
    train(run_folder, 4, Fixed(), own=False)
    assert MOVED in caplog.text


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("data", "shuffled", "exact"),
    [(Fixed(), False, True), (Noisy(), False, False), (Fixed(), True, False)],
    ids=["a seed for workers", "samples that draw", "an order that is drawn"],
)
def test_generators_that_are_put_back_after_skipping(
    data: Any, shuffled: bool, exact: bool, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As some Trainers do. It is right if nothing but the iterator itself has drawn."""
    options: Any = {} if shuffled else {"sampler": range(COUNT)}
    for stop in (3, 4):
        train(run_folder, stop, data, own=False, undo=True, **options)
    assert (MOVED not in caplog.text) == exact
    assert train(run_folder, 5, data, own=False, undo=True, **options).exact == exact
    assert unobserved()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", [Fixed(), Noisy()], ids=["fixed", "noisy"])
def test_nothing_is_said_of_a_right_program(
    data: Any, accumulate: int, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It skips batches whose samples draw nothing, or resumes between two epochs."""
    stops = (3, 4, 8, 9) if isinstance(data, Fixed) else (EPOCH, 2 * EPOCH)
    for stop in stops:
        assert train(run_folder, stop, data, accumulate=accumulate).exact
    assert not caplog.text
    assert unobserved()


def test_an_evaluation_skips_nothing(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            for batch in DataLoader(Noisy(), batch_size=BATCH):
                model(batch)

    train(run_folder, EPOCH, Fixed())
    train(run_folder, EPOCH + 1, Fixed(), before=evaluate)
    assert MOVED not in caplog.text


def test_generators_that_are_seeded_after_resume(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_folder, 3, Fixed(), before=lambda model: torch.manual_seed(1))
    assert not caplog.text, "a fresh run may"
    train(run_folder, 4, Fixed(), before=lambda model: torch.manual_seed(2))
    assert "were drawn from, or seeded, between resume() and the first batch" in caplog.text


def test_each_of_two_that_resumed_watches_the_same_loader(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is dropped without close(), as in a notebook whose cell is run again."""
    other = tmp_path / "other"
    train(other, 3, Fixed(), own=False, counts=False)
    train(run_folder, 3, Fixed(), own=False)
    model = nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}
    dropped = Checkpointer(other, state, every=1, method="sync")
    dropped.resume()
    train(run_folder, 4, Fixed(), own=False)
    assert caplog.text.count(MOVED) == 2
    dropped.close()
    assert unobserved()


def test_an_epoch_that_begins_anew_in_its_middle(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    what = "the order of batches is not part of the state"
    train(run_folder, 3, Fixed(), skips=False, counts=False)
    assert what not in caplog.text
    train(run_folder, 4, Fixed(), skips=False, counts=False)
    assert what in caplog.text
    caplog.clear()
    train(run_folder, 5, Fixed(), counts=False)
    assert what not in caplog.text, "it skips: by the step, say"


def test_a_run_without_steps_leaves_nothing_behind(run_folder: Path) -> None:
    train(run_folder, 3, Fixed())
    model = nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}
    with Checkpointer(run_folder, {**state, "epoch": 0, "batch": 0}) as ckpt:
        ckpt.resume()
        assert not unobserved()
    assert unobserved()


class Counted(Sampler[int]):
    """A sampler with a position: in a part of the state, alone."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        while self.at < COUNT:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Wrapped:
    """A loader with a position, around torch's."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.at = inner, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in itertools.islice(iter(self.inner), self.at, None):
            self.at += 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def resume_beside(
    run: Path, part: Any, batches: Iterable[Any], stop: int, before: Any = lambda: None
) -> Recovery:
    """Train up to a step, with ``part`` in the state, and say what the resume was."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer, "data": part}
    with Checkpointer(run, state, every=1, method="sync") as ckpt:
        recovery = ckpt.resume()
        before()
        for step, batch in enumerate(batches, recovery.step + 1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
            if step == stop:
                break
    return recovery


@pytest.mark.thinned(4)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["sampler", "loader"])
def test_a_loader_of_a_part_that_has_its_position_back(
    kind: str, own: bool, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its iterator draws a seed, which an uninterrupted run does not do in mid-epoch."""
    for stop in (3, 4, 5):
        generator = torch.Generator() if own else None
        batches: Any
        if kind == "sampler":
            part: Any = Counted()
            batches = DataLoader(Fixed(), batch_size=BATCH, sampler=part, generator=generator)
        else:
            batches = part = Wrapped(DataLoader(Fixed(), batch_size=BATCH, generator=generator))
        recovery = resume_beside(run_folder, part, batches, stop)
    assert recovery.data == "restored"
    assert recovery.exact == own
    assert ("has drawn from the process's random generators" in caplog.text) == (not own)


def test_another_loader_beside_the_one_in_the_state(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    what = "the order of batches is not part of the state"

    def summed(*loaders: Any) -> Iterator[torch.Tensor]:
        yield from map(sum, zip(*loaders, strict=False))

    for stop in (3, 4):
        assert what not in caplog.text
        loader = ResumableLoader(DataLoader(Fixed(), batch_size=BATCH, shuffle=True))
        other = DataLoader(Fixed(), batch_size=BATCH, shuffle=True)
        resume_beside(run_folder, loader, summed(loader, other), stop)
    assert what in caplog.text


def test_generators_that_move_before_a_resumable_loader_goes_on(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that draws before it asks for its batch does so without the interruption, too."""

    def drawing(loader: Any) -> Iterator[torch.Tensor]:
        batches = iter(loader)
        while True:
            torch.rand(1)
            yield next(batches)

    def resume(stop: int, before: Any = lambda: None) -> Recovery:
        loader = ResumableLoader(DataLoader(Fixed(), batch_size=BATCH, shuffle=True))
        return resume_beside(run_folder, loader, drawing(loader), stop, before)

    resume(1)
    resume(2)
    assert resume(3, lambda: torch.manual_seed(3)).exact
    # drawing() begins behind that, and asks for the iterator before it draws
    assert "random generators have moved between resume() and the batch" in caplog.text
    assert not resume(4).exact


@pytest.mark.thinned(2)
@pytest.mark.parametrize("own_counter", [False, True])
def test_a_sampler_in_another_epoch_than_its_position(
    own_counter: bool, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for stop in (EPOCH + 2, EPOCH + 3, EPOCH + 4):
        sampler: Any = DistributedSampler(Fixed(), num_replicas=1, rank=0)
        loader = StatefulLoader(Fixed(), batch_size=BATCH, sampler=sampler)
        first = 1 if own_counter and stop > EPOCH + 2 else 0

        def batches(sampler: Any = sampler, loader: Any = loader, first: int = first) -> Any:
            for epoch in range(first, 4):
                sampler.set_epoch(epoch)
                yield from loader

        recovery = resume_beside(run_folder, loader, batches(), stop)
    assert recovery.exact == own_counter
    assert ("its sampler was set to epoch 0 instead of 1" in caplog.text) == (not own_counter)
