"""Which epoch a loop over a resumable loader goes through, and who may say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import everstep
from everstep.data import ResumableLoader
from everstep.errors import MismatchError, OptionError, StateError
from everstep.state.values.objects import is_plain
from tests.support.loaded import Noisy, NoisyStream, generator_states, loader_of, same, take
from tests.support.world import opened


def at(batches: int) -> dict[str, Any]:
    """The state after so many batches."""
    loader = loader_of(Noisy(), shuffle=True)
    take(loader, batches)
    return loader.state_dict()


def restored(state: dict[str, Any]) -> ResumableLoader:
    loader = loader_of(Noisy(), shuffle=True)
    loader.load_state_dict(state)
    return loader


WHOLE = take(loader_of(Noisy(), shuffle=True), 30)


def test_epochs_advance_when_they_end() -> None:
    loader = loader_of(Noisy(), shuffle=True)
    assert (loader.epoch, len(loader)) == (0, 6)
    assert len(list(loader)) == 6
    assert loader.epoch == 1
    assert same([(1, batch) for batch in loader], WHOLE[6:12])


def test_the_epoch_of_the_position_goes_on() -> None:
    loader = restored(at(8))
    assert loader.epoch == 1
    loader.set_epoch(1)
    assert same(take(loader, 4), WHOLE[8:12])
    loader.set_epoch(2)
    assert same(take(loader, 6), WHOLE[12:18])


def test_another_epoch_begins_at_its_start() -> None:
    for epoch in (0, 3):
        loader = restored(at(8))
        loader.set_epoch(epoch)
        assert same(take(loader, 6), WHOLE[6 * epoch : 6 * epoch + 6])


def test_an_epoch_that_was_set_before_the_resume() -> None:
    for epoch in (0, 1, 3):
        loader = loader_of(Noisy(), shuffle=True)
        loader.set_epoch(epoch)
        loader.load_state_dict(at(8))
        assert same(take(loader, 4), WHOLE[8:12])


def test_an_iterator_that_was_made_before_is_asked_later() -> None:
    loader = loader_of(Noisy(), shuffle=True)
    iterator = iter(loader)
    loader.load_state_dict(at(8))
    assert same([(1, next(iterator))], WHOLE[8:9])


def test_after_the_last_batch_the_epoch_is_over() -> None:
    """What the loop does at the end of an epoch is done once more, and no batch is."""
    loader = restored(at(6))
    loader.set_epoch(0)
    assert loader.epoch == 0
    assert list(loader) == []
    assert loader.epoch == 1
    assert same(take(loader, 6), WHOLE[6:12])


def test_behind_the_end_it_is_the_next_epoch() -> None:
    loader = loader_of(Noisy(), shuffle=True)
    list(loader)
    resumed = restored(loader.state_dict())
    assert resumed.epoch == 1
    assert same(take(resumed, 6), WHOLE[6:12])


def test_a_loop_that_was_broken_off_is_followed_by_the_next_epoch() -> None:
    loader = loader_of(Noisy(), shuffle=True)
    assert same(take(loader, 2), WHOLE[:2])
    assert same(take(loader, 2), WHOLE[6:8])
    loader.set_epoch(1)
    assert same(take(loader, 6), WHOLE[6:12]), "from its start, as it was asked for"


def test_a_resume_in_a_broken_epoch_goes_on_in_it() -> None:
    resumed = restored(at(2))
    assert same(take(resumed, 4), WHOLE[2:6])
    resumed = restored(at(2))
    resumed.set_epoch(1)
    assert same(take(resumed, 6), WHOLE[6:12])


def test_an_iterator_of_before_does_not_go_on() -> None:
    loader = loader_of(Noisy(), shuffle=True)

    def load() -> None:
        loader.load_state_dict(at(2))

    for change in (load, lambda: loader.set_epoch(4), lambda: next(iter(loader))):
        iterator = iter(loader)
        next(iterator)
        change()
        with pytest.raises(StateError, match="this iteration over a ResumableLoader is over"):
            next(iterator)


def test_the_state_is_small_and_plain() -> None:
    assert is_plain(at(8))
    assert len(repr(at(8))) < 250


def test_workers_that_are_ahead_do_not_count() -> None:
    loader = loader_of(NoisyStream(), num_workers=2, prefetch_factor=2)
    take(loader, 3)
    assert loader.state_dict()["batch"] == 3


def test_the_sampler_is_told_the_epoch_of_the_loader() -> None:
    sampler: Any = DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=9)
    loader = loader_of(Noisy(), sampler=sampler)
    loader.set_epoch(2)
    mine = [int(sample[0]) for _, batch in take(loader, 6) for sample in batch]
    sampler.set_epoch(2)
    assert mine == list(sampler)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, "saved with seed=0, this loader has 5"),
        ({"batch_size": 5}, "saved with batch_size=4, this loader has 5"),
        ({"dataset": Noisy(23)}, "saved with length=22, this loader has 23"),
        ({"dataset": NoisyStream()}, "not a position of a ResumableLoader|kind 'map'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    loader = loader_of(**{"dataset": Noisy(), **change})
    with pytest.raises(StateError, match=words):
        loader.load_state_dict(at(2))
    assert loader.epoch == 0


def test_other_workers_of_a_stream_are_refused_in_mid_epoch() -> None:
    loader = loader_of(NoisyStream())
    take(loader, 2)
    resumed = loader_of(NoisyStream(), num_workers=2)
    with pytest.raises(StateError, match="workers=1, this loader has 2"):
        resumed.load_state_dict(loader.state_dict())
    resumed.load_state_dict(loader_of(NoisyStream()).state_dict())


def test_everstep_refuses_it_before_anything_is_touched(run_folder: Any) -> None:
    loader, weight = loader_of(Noisy()), torch.zeros(1)
    with opened(run_folder, {"loader": loader, "weight": weight}) as ckpt:
        take(loader, 2)
        ckpt.save()
    weight = torch.ones(1)
    other = loader_of(Noisy(), seed=3)
    with opened(run_folder, {"loader": other, "weight": weight}) as ckpt:
        with pytest.raises(MismatchError, match="loader: the position was saved with seed=0"):
            ckpt.resume()
        assert weight == 1
        assert not ckpt.resume(strict=False).exact
    assert weight == 0


@pytest.mark.parametrize(
    ("batches", "epoch", "is_said"), [(8, 0, True), (8, 2, True), (8, 1, False), (12, 2, False)]
)
def test_the_rest_of_a_restored_epoch_that_is_given_up(
    batches: int, epoch: int, is_said: bool, run_folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop over epochs that begins with 0, or counts an epoch at its beginning."""
    loader = loader_of(Noisy(), shuffle=True)
    with opened(run_folder, {"loader": loader}) as ckpt:
        take(loader, batches)
        ckpt.save()
    resumed = loader_of(Noisy(), shuffle=True)
    with opened(run_folder, {"loader": resumed}) as ckpt:
        ckpt.resume()
        resumed.set_epoch(epoch)
        assert (f"set_epoch({epoch}) begins epoch {epoch} instead" in caplog.text) == is_said
        ckpt.step()
        take(resumed, 2)
        caplog.clear()
        resumed.set_epoch(0)
        assert not caplog.text, "a program may do that in training"


def test_a_resume_moves_no_generator(run_folder: Any) -> None:
    loader = loader_of(Noisy(), shuffle=True)
    with opened(run_folder, {"loader": loader}) as ckpt:
        take(loader, 3)
        ckpt.save()
        before = generator_states()
    torch.rand(1)
    resumed = loader_of(Noisy(), shuffle=True)
    with opened(run_folder, {"loader": resumed}) as ckpt:
        ckpt.resume()
        assert same(take(resumed, 3), WHOLE[3:6])
        assert generator_states() == before


class Once(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Positioned(DataLoader[int]):
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ((n for n in range(3)), "a generator can be iterated only once"),
        (iter([1]), "can be iterated only once"),
        (5, "neither a DataLoader nor an iterable"),
        (Positioned([1]), "has a position of its own"),  # type: ignore[arg-type]
        (DataLoader([1], sampler=iter([0])), "sampler is an iterator"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_entered_again(source: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ResumableLoader(source)


def test_other_arguments_that_are_refused() -> None:
    for options in ({"rank": 1}, {"rank": 2, "world": 2}, {"seed": 0.5}):
        with pytest.raises(OptionError):
            ResumableLoader([1], **options)  # type: ignore[arg-type]
    for epoch in (-1, 0.5, None):
        with pytest.raises(OptionError, match="an epoch must be"):
            ResumableLoader([1]).set_epoch(epoch)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="dataset_state=True is for"):
        ResumableLoader(DataLoader(Once()), dataset_state=True)


class Counted(IterableDataset[torch.Tensor]):
    """Knows its position."""

    def __init__(self) -> None:
        self.next, self.read = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["next"]

    begin = 0

    def __iter__(self) -> Any:
        for index in range(self.begin, 23):
            self.next = index + 1
            self.read += 1
            yield torch.tensor([index, float(np.random.rand())])
        self.begin = 0


def test_a_dataset_that_is_restored_by_its_own_state() -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(DataLoader(Counted(), batch_size=4), dataset_state=True)

    whole = take(make(), 14)
    for cut in (1, 4, 6, 8):
        first = make()
        take(first, cut)
        resumed = make()
        resumed.load_state_dict(first.state_dict())
        assert same(take(resumed, 14 - cut), whole[cut:])
    loader = make()
    loader.load_state_dict(first.state_dict())
    take(loader, 1)
    assert loader.source.dataset.read == 4  # type: ignore[union-attr]
    loader.set_epoch(0)
    assert same(take(loader, 6), whole[:6]), "an epoch that is begun anew begins at its start"


def test_the_module_is_there_when_it_is_asked_for() -> None:
    assert everstep.data.ResumableLoader is ResumableLoader
    assert ResumableLoader([1]).everstep_restores_data is True
