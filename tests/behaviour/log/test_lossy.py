"""Lossy copies of log records that the keeper makes: those that training would have recorded."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.compress import Compressor
from everstep.compress.quantized import BLOCK_NUMEL, Int8
from everstep.compress.sparse import Sparse
from everstep.errors import FormatError, OptionError
from everstep.format.log import LogRecord, RecordHead
from everstep.keeper.ship.log_copies import lossy_record
from everstep.replay.updates import Packed, dense
from everstep.restore.redo.updates import update_from_record
from everstep.state.layout.entries import GRADIENT, UPDATE_OBJECT
from everstep.state.values.objects import decode, encode
from tests.support.log.lossy import large_and_small, log_of, raw, record_of
from tests.support.logged import opened, rewrite_segment, segments_of
from tests.support.world import TIMEOUT_S

RATIO = 0.05


class Several:
    """One optimizer with gradients of every kind.

    Args:
        scaled: as a GradScaler leaves them to a fused optimizer.
        unusable: there is NaN in the large one.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        scaled: bool = False,
        unusable: bool = False,
        others: tuple[torch.dtype, ...] = (),
        seed: int = 1,
    ) -> None:
        torch.manual_seed(seed)
        shapes: dict[str, tuple[int, ...]] = {
            "large": (330, 310),
            "small": (13, 7),
            "block": (4, 64),
            "none": (5,),
            "wide": (2, 3, 8, 8),
        }
        if not scaled:
            shapes |= {"scalar": (), "empty": (0, 3), "one": (1,)}
        self.model = nn.Module()
        for name, shape in shapes.items():
            self.model.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
        for number, other in enumerate(others):
            values = nn.Parameter(torch.randn(40, 5).to(other))
            self.model.register_parameter(f"other{number}", values)
        rate = torch.tensor(0.01)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=scaled)
        self.scaled, self.unusable = scaled, unusable
        self.state = {"model": self.model, "optimizer": self.optimizer, "plain": {"seen": 0}}

    def train(self) -> None:
        for name, parameter in self.model.named_parameters():
            gradient = torch.randn_like(parameter) * 1e-6
            if name == "wide" and not self.scaled:
                gradient = gradient.to(memory_format=torch.channels_last)
            if name == "large" and self.unusable:
                gradient[3, 4] = math.nan
            parameter.grad = None if name == "none" else gradient
        if self.scaled:
            self.optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
            self.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.state["plain"]["seen"] += 1  # type: ignore[index]

    def snapshot(self) -> list[bytes]:
        found = list(self.model.state_dict().values())
        found += [v for values in self.optimizer.state.values() for v in values.values()]
        return [raw(tensor) for tensor in found]


WORLDS: Mapping[str, functools.partial[Several]] = {
    "float32": functools.partial(Several),
    "float64": functools.partial(Several, torch.float64),
    "bfloat16": functools.partial(Several, torch.bfloat16),
    "float16": functools.partial(Several, torch.float16),
    "NaN": functools.partial(Several, unusable=True),
    "complex ones": functools.partial(Several, others=(torch.complex64, torch.complex128)),
    "a GradScaler": functools.partial(Several, scaled=True),
}


def parts_of(record: LogRecord) -> tuple[Any, ...]:
    objects = list(record.objects.items())
    return record.head, record.layout, objects, record.data.tobytes(), record.digest


def about_of(record: LogRecord) -> Any:
    return decode(record.objects[UPDATE_OBJECT])


# --- As training would have recorded it ---------------------------------------------------


@pytest.mark.thinned(9)
@pytest.mark.parametrize("world", WORLDS)
def test_the_same_bytes_as_in_a_log_that_training_makes_lossy(tmp_path: Path, world: str) -> None:
    whole = log_of(tmp_path / "dense", WORLDS[world](), "dense")
    wanted = log_of(tmp_path / "adaptive", WORLDS[world](), "adaptive", ratio=RATIO)
    assert len(whole) == len(wanted) > 3
    for mine, theirs in zip(whole, wanted, strict=True):
        before = parts_of(mine)
        found = lossy_record(mine, RATIO)
        assert parts_of(found) == parts_of(theirs)
        found.verify()
        assert parts_of(mine) == before
    update = next(record for record in wanted if record.head.kind == "update")
    assert {"small", "block", "wide"} <= {
        n.rpartition(".")[2] for n in about_of(update)["compressed"]
    }


def test_gradients_of_several_dtypes_are_the_same_but_for_their_order(tmp_path: Path) -> None:
    make = functools.partial(Several, others=(torch.bfloat16, torch.float64))
    whole = log_of(tmp_path / "dense", make(), "dense")
    wanted = log_of(tmp_path / "adaptive", make(), "adaptive", ratio=RATIO)
    for mine, theirs in zip(whole, wanted, strict=True):
        found = lossy_record(mine, RATIO)
        assert entries_of(found) == entries_of(theirs)
        if mine.head.kind == "update":
            assert about_of(found) == about_of(theirs)


def entries_of(record: LogRecord) -> dict[Any, bytes]:
    return {p.entry: record.data[p.begin : p.end].tobytes() for p in record.layout.placed}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("world", ["float32", "bfloat16", "NaN", "a GradScaler"])
def test_replay_gives_what_a_log_that_training_makes_lossy_gives(
    tmp_path: Path, world: str
) -> None:
    found = {}
    for log in ("dense", "adaptive"):
        run = tmp_path / log
        log_of(run, WORLDS[world](), log, 5, **({"ratio": RATIO} if log == "adaptive" else {}))
        if log == "dense":
            for segment in segments_of(run):
                rewrite_segment(run, segment, lambda old: [lossy_record(r, RATIO) for r in old])
        other = WORLDS[world](seed=9)
        with opened(run, other, every=100) as ckpt:
            recovery = ckpt.resume(step=4)
            assert (recovery.step, recovery.replayed, recovery.exact) == (4, 3, False)
            assert "not exact: the log holds lossy copies of the gradients" in recovery.evidence
            found[log] = other.snapshot()
    assert found["dense"] == found["adaptive"]


# --- What is there as it was --------------------------------------------------------------


def test_marks_are_there_as_they_were(tmp_path: Path) -> None:
    marks = [r for r in log_of(tmp_path / "run", Several(), "dense") if r.head.kind == "mark"]
    assert marks
    for mark in marks:
        assert parts_of(lossy_record(mark, RATIO)) == parts_of(mark)


def test_declared_updates_are_there_as_they_were() -> None:
    old = record_of({}, head=RecordHead("update", 1, 4, 7, "shape", True, "ema/*"))
    assert parts_of(lossy_record(old, RATIO)) == parts_of(old)


@pytest.mark.parametrize("kind", ["topk", "int8"])
def test_what_training_consumed_compressed_is_there_as_it_was(tmp_path: Path, kind: str) -> None:
    """Beside it a gradient that was not, which would make the whole an approximation."""
    world = Several()
    world.state["compressor"] = Compressor(  # type: ignore[assignment]
        world.optimizer, kind=kind, dense_below=100, error_feedback=False
    )
    whole = log_of(tmp_path / "run", world, "topk")
    updates = [record for record in whole if record.head.kind == "update"]
    assert all("compressed" in about_of(record) for record in updates)
    assert any(p.entry.name == GRADIENT + "model.small" for p in updates[0].layout.placed)
    for old in updates:
        assert parts_of(lossy_record(old, RATIO)) == parts_of(old)
        assert not update_from_record(lossy_record(old, RATIO)).lossy


@pytest.mark.parametrize(
    ("kind", "value"),
    [("update", 1.0), ("update", math.nan), ("mark", 1.0)],
    ids=["an update", "one of which all is left dense", "a mark"],
)
def test_it_keeps_no_memory_of_the_old_record(kind: Any, value: float) -> None:
    """What the keeper is about to use again, or what other records lie in, too."""
    head = RecordHead(kind, 1, 4, 7, "shape", True)
    made = record_of({"small": torch.full((40, 5), value), "one": torch.ones(())}, head=head)
    memory = bytearray(made.data)
    data = memoryview(memory)
    old = LogRecord(head, made.layout, made.objects, data[:], made.digest)
    found = lossy_record(old, RATIO)
    del old
    data.release()
    memory.clear()  # a BufferError, if anyone holds on to it
    found.verify()


def test_memory_that_cannot_be_written_to_will_do() -> None:
    old = record_of({"small": torch.randn(40, 5)})
    sealed = LogRecord(old.head, old.layout, old.objects, old.data.toreadonly(), old.digest)
    assert parts_of(lossy_record(sealed, RATIO)) == parts_of(lossy_record(old, RATIO))


# --- How far off it is --------------------------------------------------------------------


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    """Of any shape, with any order of dimensions in memory, on any scale."""
    shape = draw(st.lists(st.integers(0, 30), max_size=3))
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dtype = draw(st.sampled_from(dtypes))
    power = draw(st.integers(-12, 12) if dtype == torch.float16 else st.integers(-80, 80))
    seed = draw(st.integers(0, 1 << 30))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = draw(st.sampled_from([1.0, 0.5, 0.01, 0.0]))
    where = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < kept
    gradient = (values * where * math.ldexp(1.0, power)).to(dtype)
    if gradient.numel() and draw(st.integers(0, 9)) == 0:
        gradient.view(-1)[-1] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    order = draw(st.permutations(range(len(shape))))
    back = sorted(range(len(shape)), key=order.__getitem__)
    return gradient.permute(order).contiguous().permute(back)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("int8_below", [0, 200, 1 << 20])
@given(drawn=st.lists(gradients(), min_size=1, max_size=4))
def test_restored_values_are_within_the_bound_of_their_form(
    int8_below: int, drawn: list[torch.Tensor]
) -> None:
    named = {f"g{number}": gradient for number, gradient in enumerate(drawn)}
    old = record_of(named)
    new = lossy_record(old, RATIO, int8_below)
    new.verify()
    update = update_from_record(new)
    assert update.gradients.keys() == named.keys()
    compressed = about_of(new).get("compressed", {})
    assert update.lossy == bool(compressed)
    assert new.data.nbytes <= old.data.nbytes
    for name, gradient in named.items():
        found = update.gradients[name]
        restored = dense(found)
        assert (restored.dtype, restored.shape) == (gradient.dtype, gradient.shape)
        if not isinstance(found, Packed):
            assert restored.stride() == gradient.stride() or gradient.is_contiguous()
        fields = compressed.get(name)
        if fields is None:
            assert raw(restored) == raw(gradient)
        elif "counts" in fields:
            within_sparse(restored.double(), gradient, fields["exponent"])
        else:
            within_int8(restored.double(), gradient)


def within_int8(restored: torch.Tensor, gradient: torch.Tensor) -> None:
    """Half a scale's step; a scale that would be subnormal is none; and rounded to its dtype."""
    rows = torch.split(gradient.double().reshape(-1), BLOCK_NUMEL)
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    for row, back in zip(rows, torch.split(restored.reshape(-1), BLOCK_NUMEL), strict=True):
        scale = row.abs().max() / 127
        step = scale / 2 if scale >= torch.finfo(wide).tiny else row.abs().max()
        allowed = step * (1 + 1e-4) + ulp(gradient.dtype, back)
        assert ((back - row).abs() <= allowed).all()


def within_sparse(restored: torch.Tensor, gradient: torch.Tensor, exponent: int) -> None:
    """What is kept within the rounding of float16, and zero what is not: none of the largest."""
    wide = gradient.double()
    kept = restored != 0
    finest = math.ldexp(1.0, exponent - 25)
    allowed = 2.0**-11 * wide.abs() + finest + ulp(gradient.dtype, restored)
    assert ((restored - wide).abs() <= allowed)[kept].all()
    wanted = min(math.ceil(RATIO * wide.numel()) / 2, int((wide.abs() > finest).sum()))
    assert int(kept.sum()) >= wanted
    if kept.any() and not kept.all():
        largest = wide[~kept].abs().max()
        assert wide[kept].abs().min() >= largest or largest <= finest


def ulp(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(dtype)
    return info.eps * values.abs() + info.tiny * info.eps


# --- Whatever process makes it ------------------------------------------------------------

_OTHER = """
import sys
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.keeper.ship.log_copies import lossy_record
from everstep.state.layout.shards import ShardLayout

empty = memoryview(bytearray(0))
mark = RecordHead("mark", 1, 4, 7, "shape", True)
found = lossy_record(LogRecord(mark, ShardLayout(()), {}, empty, record_digest(empty, {})), 0.05)
found.verify()
assert "torch" not in sys.modules, "only gradients need it"

from tests.support.log.lossy import large_and_small
print(lossy_record(large_and_small(), 0.05).digest)
"""


@pytest.mark.slow
def test_another_process_with_other_threads_makes_the_same() -> None:
    """And needs no torch for what is no gradient."""
    found = lossy_record(large_and_small(), RATIO)
    kinds = {name: type(form_of(found, name)) for name in ("large", "half", "small")}
    assert kinds == {"large": Sparse, "half": Sparse, "small": Int8}
    threads = "1" if torch.get_num_threads() > 1 else "2"
    about = {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": "5"}
    said = subprocess.run(
        [sys.executable, "-c", _OTHER],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **about},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == [found.digest]


def form_of(record: LogRecord, name: str) -> Sparse | Int8:
    gradient = update_from_record(record).gradients[name]
    assert isinstance(gradient, Packed)
    return gradient.form


# --- Refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, -1.0, 1.5, math.nan])
def test_ratios_that_cannot_be(ratio: float) -> None:
    with pytest.raises(OptionError, match="ratio must be in"):
        lossy_record(record_of({"small": torch.ones(40)}), ratio)


@pytest.mark.parametrize("objects", [{}, {UPDATE_OBJECT: encode([1])}, {UPDATE_OBJECT: b"\xc1"}])
def test_what_is_no_update(objects: dict[str, bytes]) -> None:
    old = record_of({"small": torch.ones(40)})
    with pytest.raises(FormatError):
        lossy_record(LogRecord(old.head, old.layout, objects, old.data, old.digest), RATIO)
