"""Loaders that save their position: where a training goes on after a resume, and what it draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from everstep import Checkpointer, Recovery
from everstep.errors import OptionError
from everstep.state.positions import POSITIONS, WorkerGenerators, _DatasetState
from tests.support.stateful_loader import BATCH, COUNT, EPOCH, Noisy, StatefulLoader


class Permuted(Sampler[int]):
    """Draws its order as soon as it is iterated."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(COUNT))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return COUNT


@pytest.fixture(autouse=True)
def nobody_else_follows_loaders() -> None:
    """Restore the loaders' classes: an earlier test of this process may have dropped a
    Checkpointer without close(), as a killed process does."""
    while POSITIONS.is_open:
        POSITIONS.close()


def distributed() -> StatefulLoader:
    sampler: Any = DistributedSampler(Noisy(), num_replicas=1, rank=0)
    return StatefulLoader(Noisy(), batch_size=BATCH, sampler=sampler)


def shuffled() -> StatefulLoader:
    return StatefulLoader(Noisy(), batch_size=BATCH, sampler=RandomSampler(Noisy()))


def of_a_generator() -> StatefulLoader:
    generator = torch.Generator()
    return StatefulLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=generator)


def permuted() -> StatefulLoader:
    return StatefulLoader(Noisy(), batch_size=BATCH, sampler=Permuted())


MAKERS = (distributed, shuffled, of_a_generator, permuted)


class Training:
    """Three epochs over a loader, with dropout.

    Args:
        run: None: without a Checkpointer.
        stop: the step behind which it ends.
        before: called between resume() and the loop.
    """

    def __init__(
        self,
        loader: Any,
        run: Path | None = None,
        stop: int = 3 * EPOCH,
        before: Callable[[Any], None] = lambda ckpt: None,
        method: str = "sync",
    ) -> None:
        random.seed(0)
        torch.manual_seed(0)
        self.seen: list[list[float]] = []
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
        ckpt = None if run is None else Checkpointer(run, state, every=1, method=method)
        self.recovery: Recovery | None = None if ckpt is None else ckpt.resume()
        step = 0 if self.recovery is None else self.recovery.step
        try:
            before(ckpt)
            for epoch in range(int(str(state["epoch"])), 3):
                if isinstance(loader.sampler, DistributedSampler):
                    loader.sampler.set_epoch(epoch)
                for batch in loader:
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    self.seen.append([*batch.flatten().tolist(), loss.item()])
                    if ckpt is not None:
                        ckpt.step()
                    if step >= stop:
                        return
                state["epoch"] = epoch + 1
        finally:
            self.random = torch.get_rng_state().tolist()
            if ckpt is not None:
                ckpt.close()


@pytest.mark.thinned(8)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("method", ["sync", "logged"])
def test_a_loader_goes_on_where_it_was(
    make: Callable[[], StatefulLoader], method: str, run_folder: Path
) -> None:
    """In mid-epoch, twice there, at the end of an epoch, and in a later one."""
    whole, seen = Training(make()), []
    for stop in (2, 3, EPOCH, EPOCH + 2, 3 * EPOCH):
        last = Training(make(), run_folder, stop, method=method)
        seen += last.seen
        assert last.recovery is not None
        assert last.recovery.exact
        assert last.recovery.data == "restored"
    assert seen == whole.seen
    assert last.random == whole.random


def test_a_checkpointer_changes_no_batch(run_folder: Path) -> None:
    """Asked for its position before the loop has told the sampler its epoch, it makes nothing."""
    whole = Training(distributed())
    assert Training(distributed(), run_folder).seen == whole.seen
    assert "_get_iterator" in vars(StatefulLoader)
    assert vars(StatefulLoader)["_get_iterator"].__module__ == StatefulLoader.__module__


def test_a_position_that_waits_is_saved_again(run_folder: Path) -> None:
    whole = Training(shuffled())
    first = Training(shuffled(), run_folder, stop=7)

    def save(ckpt: Any) -> None:
        ckpt.save()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(shuffled(), run_folder, before=save)
    rest = Training(shuffled(), run_folder)
    assert first.seen + rest.seen == whole.seen


def test_whoever_holds_an_older_iterator_goes_on_at_the_restored_position(run_folder: Path) -> None:
    """As a Trainer that makes its iterator before its callbacks resume."""
    whole = Training(shuffled())
    Training(shuffled(), run_folder, stop=3)
    loader = shuffled()
    held = iter(loader)
    state = {"loader": loader, "model": nn.Linear(1, 1)}
    with Checkpointer(run_folder, state) as ckpt:
        ckpt.resume(strict=False)
        assert next(held).flatten().tolist() == whole.seen[3][:-1]
        assert len(list(held)) == 1


def test_an_iterator_that_was_made_for_its_state_alone(run_folder: Path) -> None:
    """As accelerate does when it prepares a loader."""

    def prepared() -> StatefulLoader:
        loader = shuffled()
        loader.state_dict()
        return loader

    whole = Training(prepared())
    first = Training(prepared(), run_folder, stop=2)
    rest = Training(prepared(), run_folder)
    assert first.seen + rest.seen == whole.seen


def test_an_order_of_unknown_draws_is_not_called_exact(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = shuffled()
    state = {"loader": loader}
    next(iter(loader))
    with Checkpointer(run_folder, state, every=1, method="sync") as ckpt:
        ckpt.resume()
        ckpt.step()
    state = {"loader": shuffled()}
    with Checkpointer(run_folder, state, every=1, method="sync") as ckpt:
        ckpt.resume()
        next(iter(state["loader"]))
        ckpt.step()
    assert "may draw the order of the epoch from random generators" in caplog.text
    with Checkpointer(run_folder, {"loader": shuffled()}, method="sync") as ckpt:
        assert not ckpt.resume().exact


def test_generators_that_move_before_a_loop_goes_on(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Training(distributed(), run_folder, stop=2)
    Training(distributed(), run_folder, stop=3, before=lambda _: torch.manual_seed(5))
    assert "have moved between resume() and the batch" in caplog.text
    assert not Training(distributed(), run_folder, stop=4).recovery.exact  # type: ignore[union-attr]


def test_at_the_end_of_an_epoch_counters_are_spoken_of(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Training(distributed(), run_folder, stop=EPOCH - 1)
    Training(distributed(), run_folder, stop=EPOCH)
    assert "goes on at the end" not in caplog.text
    Training(distributed(), run_folder, stop=EPOCH + 1)
    assert "continues at the end of an epoch: its first iteration gives no batch" in caplog.text


class Stream:
    """Takes its position only when it is iterated."""

    def __init__(self) -> None:
        self.given, self._next = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.given = self._next
        while True:
            self.given += 1
            yield self.given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["given"]


def test_a_stream_that_takes_its_position_later(run_folder: Path) -> None:
    stream = Stream()
    with Checkpointer(run_folder, {"stream": stream}, every=1, method="sync") as ckpt:
        ckpt.resume()
        for _, _ in zip(range(3), stream, strict=False):
            ckpt.step()
    with Checkpointer(run_folder, {"stream": Stream()}, method="sync") as ckpt:
        assert ckpt.resume().data == "restored"
        ckpt.save()
    stream = Stream()
    with Checkpointer(run_folder, {"stream": stream}, method="sync") as ckpt:
        ckpt.resume()
        assert next(iter(stream)) == 4


def test_workers_go_on_with_the_numbers_that_they_would_have_drawn() -> None:
    data: Any = Noisy()
    state = _DatasetState(None)
    data.state_dict, data.load_state_dict = state.state_dict, state.load_state_dict
    assert data.state_dict() is None, "nothing was drawn: nothing is added"
    torch.rand(3), random.random()
    saved = data.state_dict()
    wanted = [torch.rand(2).tolist(), random.random()]
    later = _DatasetState(None)
    later.load_state_dict(saved)
    later.state_dict()  # torchdata asks for it before the first batch
    assert [torch.rand(2).tolist(), random.random()] == wanted


def test_a_worker_keeps_its_position_until_its_first_item() -> None:
    stream = Stream()
    state = _DatasetState(stream)
    next(items := iter(stream)), next(items)
    saved = state.state_dict()
    restored = Stream()
    later = _DatasetState(restored)
    later.load_state_dict(saved)
    items = iter(restored)
    assert later.state_dict() == saved, "no item was taken yet"
    assert next(items) == 3
    assert later.state_dict() == {"given": 3}


def test_a_workers_own_initialization_comes_first() -> None:
    called: list[int] = []
    WorkerGenerators(called.append)(3)
    assert called == [3]


class Prepared:
    """As accelerate's loader around one of torch's own."""

    def __init__(self) -> None:
        self.base_dataloader: Any = DataLoader(Noisy())

    def state_dict(self) -> dict[str, int]:
        raise AttributeError

    load_state_dict = state_dict


def test_a_prepared_loader_without_a_position_is_refused(run_folder: Path) -> None:
    with pytest.raises(OptionError, match="has no position"):
        Checkpointer(run_folder, {"loader": Prepared()})
