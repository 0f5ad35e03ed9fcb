"""Gradients whose low bits are all zero lie in a segment without them, and come back with them."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
import torch
from safetensors import safe_open

from everstep.errors import FormatError
from everstep.format.log import LogRecord, RecordHead, gathered
from everstep.format.writer import ChunkRing
from everstep.run.segments import read_segment
from everstep.seams import PosixFileSystem
from tests.support.log.lossy import record_of
from tests.support.logged import segments_of, write_segment
from tests.support.world import TIMEOUT_S

SIZE = 300_001  # more than a chunk, and odd
MARK = RecordHead("mark", 1, 1, 1, "s" * 32)
UPDATE = RecordHead("update", 1, 1, 1, "s" * 32)


def short(size: int = SIZE) -> torch.Tensor:
    """Gradients of a 16-bit backward for a 32-bit master, with everything that a float may be."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(size, generator=generator).bfloat16()
    odd = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40]
    return torch.cat([torch.tensor(odd).bfloat16(), found])[:size].float()


def written(run: Path, gradients: dict[str, torch.Tensor]) -> tuple[list[str], int, LogRecord]:
    """Names of the flat tensors of an update, size of the file, and the record as it is read."""
    records = [record_of(gradients, head=UPDATE), record_of({}, head=MARK)]
    ring = ChunkRing(4, 2)
    try:
        write_segment(run, "r" * 32, records, 0, ring)
        (segment,) = segments_of(run)
        found = read_segment(PosixFileSystem(), segment, ring, timeout_s=TIMEOUT_S)
    finally:
        ring.close()
    assert found[0].data == records[0].data
    found[0].verify()
    (path,) = Path(segment.path).glob("*.safetensors")
    with safe_open(str(path), "pt") as file:
        names = [name for name in file.keys() if name.startswith("000000/")]  # noqa: SIM118
    return names, path.stat().st_size, found[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "timeline-00001" / "log").mkdir(parents=True)
    return tmp_path


def test_they_take_half(run: Path) -> None:
    names, size_bytes, _ = written(run, {"a": short(), "b": short(7).reshape(7, 1)})
    assert names == ["000000/F32/BF16"]
    assert 2 * SIZE < size_bytes < 2 * SIZE + (64 << 10)


@pytest.mark.parametrize("at", [0, 5000, SIZE - 1])
def test_a_single_low_bit_keeps_them_whole(run: Path, at: int) -> None:
    gradient = short()
    gradient.view(torch.int32)[at] |= 1
    names, size_bytes, _ = written(run, {"a": gradient})
    assert names == ["000000/F32"]
    assert size_bytes > 4 * SIZE


def test_other_dtypes_are_as_they_were(run: Path) -> None:
    gradients = {"wide": short(11).double(), "a": short(9), "b": short(5).bfloat16()}
    names, _, _ = written(run, gradients)
    assert sorted(names) == ["000000/BF16", "000000/F32/BF16", "000000/F64"]


@pytest.mark.parametrize(
    "flat",
    [
        {"F32": bytes(8), "F32/BF16": bytes(4)},
        {"F32/BF16": bytes(3)},
        {"F32/BF16": bytes(6)},
        {"F32/F16": bytes(4)},
        {"F64/BF16": bytes(4)},
    ],
)
def test_halves_that_do_not_fit_are_refused(flat: dict[str, bytes]) -> None:
    layout = record_of({"a": short(2)}).layout
    views = {name: memoryview(data) for name, data in flat.items()}
    with pytest.raises(FormatError, match="do not match its index"):
        gathered(layout, views, PurePath("segment"))
