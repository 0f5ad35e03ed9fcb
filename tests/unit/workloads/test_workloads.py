"""The model, the text, the loader and the training that experiments share."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import MismatchError, OptionError, UnavailableError
from everstep.workloads import (
    GPT,
    GPTConfig,
    Training,
    TrainingConfig,
    WarmupCosine,
    WindowLoader,
    gpt_of,
    make_deterministic,
    stdlib_text,
    training_of,
)
from everstep.workloads.comparison import fingerprint
from everstep.workloads.processes import interruptible

TINY = GPTConfig(layers=1, width=16, heads=2, context=8)
TEXT = bytes(np.random.default_rng(7).integers(0, 256, size=4000, dtype=np.uint8))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gives the process its own settings back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


class TestGPT:
    @given(
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        head_width=st.integers(1, 8),
        context=st.integers(1, 12),
        vocab=st.integers(1, 20),
    )
    @settings(max_examples=25)
    def test_config_knows_the_number_of_parameters(
        self, layers: int, heads: int, head_width: int, context: int, vocab: int
    ) -> None:
        config = GPTConfig(layers, heads * head_width, heads, context, vocab)
        counted = sum(parameter.numel() for parameter in GPT(config).parameters())
        assert config.params == counted

    def test_the_demo_s_model_is_the_size_it_is_said_to_be(self) -> None:
        assert GPTConfig(layers=4, width=128, heads=4, context=128).params == 836_736

    def test_logits_have_one_row_per_byte_and_shorter_input_is_fine(self) -> None:
        model = GPT(TINY).eval()
        assert model(torch.zeros(3, 8, dtype=torch.int64)).shape == (3, 8, 256)
        assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)

    def test_no_position_sees_what_follows_it(self) -> None:
        model = GPT(TINY).eval()
        a = torch.arange(8).reshape(1, 8)
        b = a.clone()
        b[0, 5] += 1
        first, second = model(a), model(b)
        assert torch.equal(first[0, :5], second[0, :5])
        assert not torch.equal(first[0, 5], second[0, 5])

    def test_head_and_embedding_are_one_tensor(self) -> None:
        model = GPT(TINY)
        assert model.head.weight is model.tokens.weight

    def test_dropout_acts_in_training_only(self) -> None:
        model = GPT(TINY)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))

    @pytest.mark.parametrize(
        ("params", "off"),
        [(100_000, 0.2), (10**6, 0.05), (3 * 10**7, 0.02), (124 * 10**6, 0.02), (10**10, 0.02)],
    )
    def test_gpt_of_comes_near(self, params: int, off: float) -> None:
        config = gpt_of(params, context=64, dropout=0.25)
        assert abs(config.params - params) <= off * params
        assert (config.context, config.dropout) == (64, 0.25)
        assert 16 <= config.width / config.layers <= 128

    @pytest.mark.parametrize("layers", [1, 4, 40])
    def test_gpt_of_as_many_layers_as_are_asked_for(self, layers: int) -> None:
        config = gpt_of(20_000_000, context=64, layers=layers)
        assert config.layers == layers
        assert abs(config.params - 20_000_000) <= 0.2 * 20_000_000

    def test_gpt_of_refuses_what_cannot_be_that_small(self) -> None:
        with pytest.raises(OptionError, match="as few as 100 parameters"):
            gpt_of(100)

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"layers": 0}, "layers must be at least 1"),
            ({"heads": 3}, "not a multiple of heads 3"),
            ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ],
    )
    def test_impossible_sizes_are_refused(self, sizes: dict[str, int], words: str) -> None:
        options = {"layers": 1, "width": 16, "heads": 2, "context": 8, **sizes}
        with pytest.raises(OptionError, match=words):
            GPTConfig(**options)


class TestText:
    def test_it_is_source_text_and_the_same_each_time(self) -> None:
        text = stdlib_text(300_000)
        assert len(text) == 300_000
        assert text == stdlib_text(300_000)
        assert text == stdlib_text(400_000)[:300_000]
        assert text.count(b"    def ") > 100

    def test_files_come_by_path_without_tests_packages_and_links(self, tmp_path: Path) -> None:
        for name in ("b.py", "a/z.py", "a/c.py", "test/t.py", "site-packages/s.py", "b.txt"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"<{name}>")
        os.symlink(tmp_path / "b.txt", tmp_path / "link.py")
        (tmp_path / "folder.py").mkdir()
        assert stdlib_text(1000, folder=tmp_path) == b"<b.py><a/c.py><a/z.py>"
        assert stdlib_text(8, folder=tmp_path) == b"<b.py><a"

    def test_a_library_without_sources_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UnavailableError, match="source files are not installed") as caught:
            stdlib_text(10, folder=tmp_path)
        assert caught.value.path == str(tmp_path)

    def test_nothing_cannot_be_asked_for(self) -> None:
        with pytest.raises(OptionError, match="at least 1"):
            stdlib_text(0)


class TestLoader:
    @given(
        length=st.integers(20, 200),
        context=st.integers(1, 6),
        batch=st.integers(1, 3),
        seed=st.integers(0, 2**40),
        before=st.integers(0, 120),
        after=st.integers(1, 120),
    )
    def test_continues_with_the_same_batches_from_any_point(
        self, length: int, context: int, batch: int, seed: int, before: int, after: int
    ) -> None:
        def fresh() -> WindowLoader:
            return WindowLoader(TEXT[:length], context=context, batch=batch, seed=seed)

        undisturbed, resumed = fresh(), fresh()
        for _ in range(before):
            undisturbed.next_batch()
        resumed.load_state_dict(undisturbed.state_dict())
        for _ in range(after):
            expected, found = undisturbed.next_batch(), resumed.next_batch()
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
        assert undisturbed.state_dict() == resumed.state_dict()

    def test_an_epoch_visits_every_window_once_and_the_next_one_in_another_order(self) -> None:
        text = bytes(range(61))  # 20 windows of 3 that begin with 0, 3, 6, ...
        loader = WindowLoader(text, context=3, batch=4, seed=1)
        epochs = []
        for _ in range(2):
            firsts = [loader.next_batch()[0][:, 0].tolist() for _ in range(loader.batches)]
            epochs.append([first for batch in firsts for first in batch])
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 60, 3))
        assert epochs[0] != epochs[1]
        assert loader.state_dict()["epoch"] == 1

    def test_targets_are_the_inputs_one_byte_on(self) -> None:
        inputs, targets = WindowLoader(TEXT, context=8, batch=5, seed=0).next_batch()
        assert inputs.shape == targets.shape == (5, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for row, target in zip(inputs, targets, strict=True):
            assert bytes([*row.tolist(), int(target[-1])]) in TEXT

    def test_no_global_generator_is_touched(self) -> None:
        before = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())
        loader = WindowLoader(TEXT, context=8, batch=5, seed=0)
        for _ in range(2 * loader.batches):
            loader.next_batch()
        after = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())
        assert before == after

    def test_the_state_of_a_loader_over_another_text_is_refused(self) -> None:
        state = WindowLoader(TEXT, context=8, batch=5, seed=0).state_dict()
        other = WindowLoader(TEXT[:-1] + b"?", context=8, batch=4, seed=0)
        with pytest.raises(MismatchError) as caught:
            other.load_state_dict(state)
        assert [name for name, _ in caught.value.mismatches] == ["text_digest", "batch"]

    def test_a_text_shorter_than_one_batch_is_refused(self) -> None:
        WindowLoader(TEXT[:41], context=8, batch=5, seed=0)
        with pytest.raises(OptionError, match="has 4 windows of 8 bytes, less than one batch of 5"):
            WindowLoader(TEXT[:40], context=8, batch=5, seed=0)


class TestTraining:
    def build(self, seed: int = 3) -> Training:
        make_deterministic(seed)
        config = TrainingConfig(steps=40, batch=4, seed=seed, lr=1e-2, warmup_steps=4)
        return training_of(TINY, config, b"to be or not to be, that is the question. " * 50)

    def test_the_same_seed_gives_the_same_bits(self, deterministic: None) -> None:
        runs = []
        for _ in range(2):
            training = self.build()
            losses = [training.step().hex() for _ in range(5)]
            runs.append((losses, fingerprint(training)))
        assert runs[0] == runs[1]

    def test_another_seed_gives_others(self, deterministic: None) -> None:
        assert self.build(3).step() != self.build(4).step()

    def test_it_learns(self, deterministic: None) -> None:
        training = self.build()
        losses = [training.step() for _ in range(40)]
        assert np.mean(losses[-5:]) < 0.6 * losses[0]
        assert training.progress == {
            "steps": 40,
            "bytes_seen": 40 * 4 * 8,
            "loss_best": min(losses),
        }

    @pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
    def test_every_step_depends_on_every_generator(
        self, generator: str, deterministic: None
    ) -> None:
        reseed: dict[str, Callable[[int], object]] = {
            "python": random.seed,
            "numpy": np.random.seed,
            "torch": torch.manual_seed,
        }
        losses = []
        for seed in (1, 2):
            training = self.build()
            reseed[generator](seed)
            losses.append([training.step() for _ in range(2)])
        assert losses[0] != losses[1]

    def test_only_matrices_decay(self, deterministic: None) -> None:
        groups = self.build().optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert all(p.dim() >= 2 for p in groups[0]["params"])
        assert all(p.dim() < 2 for p in groups[1]["params"])

    def test_the_schedule_warms_up_and_comes_down(self) -> None:
        schedule = WarmupCosine(warmup_steps=4, total_steps=20, floor=0.1)
        assert [schedule(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
        assert math.isclose(schedule(12), 0.1 + 0.9 * 0.5)
        assert math.isclose(schedule(20), 0.1)
        assert math.isclose(schedule(1000), 0.1)
        assert WarmupCosine(0, 10)(0) == 1.0

    def test_the_schedule_s_state_is_plain_data(self, deterministic: None) -> None:
        state = self.build().scheduler.state_dict()
        numbers = {"warmup_steps": 4, "total_steps": 40, "floor": 0.1}
        assert state["lr_lambdas"] == [numbers, numbers]

    @pytest.mark.parametrize(
        "numbers", [{"steps": 0}, {"batch": 0}, {"warmup_steps": -1}, {"seed": -1}, {"seed": 2**32}]
    )
    def test_impossible_numbers_are_refused(self, numbers: dict[str, int]) -> None:
        with pytest.raises(OptionError):
            TrainingConfig(**{"steps": 10, **numbers})


def test_a_handler_that_python_cannot_restore_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a C library that had it before the interpreter began."""
    look = signal.getsignal
    install = signal.signal
    foreign = signal.SIGHUP
    before = signal.getsignal(foreign)

    def installed(number: int, handler: Any) -> Any:
        earlier = install(number, handler)
        return None if number == foreign else earlier

    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == foreign else look(n))
    monkeypatch.setattr(signal, "signal", installed)
    with interruptible():
        assert look(foreign) is before
        assert look(signal.SIGTERM) is not signal.SIG_DFL
    assert look(signal.SIGTERM) is signal.SIG_DFL
