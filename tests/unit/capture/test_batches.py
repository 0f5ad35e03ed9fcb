"""What is copied where: against torch itself, for every kind of tensor; and what is written
while it is still arriving: never a byte that is not there yet."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from everstep.arena import Arena
from everstep.capture import batches
from everstep.capture import lane as lane_module
from everstep.capture.batches import Batch, Chunks, Runs, plan_batches, run_batch
from everstep.capture.cuda import DeviceLane
from everstep.capture.lane import CpuLane, Lane, Transfer
from everstep.capture.spot_check import SpotCheck
from everstep.errors import DeadlineError, KeeperError
from everstep.format.digests import digest
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.reader import read_header
from everstep.format.writer import ChunkRing, digest_shard, write_shard
from everstep.link.capture import Capture, Incoming, shard_offsets
from everstep.link.save import Save
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import WriteFile
from everstep.seams.progress import silent
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import ShardLayout, plan_shards
from everstep.state.values.tensors import DTYPE_CODES, byte_view, tensor_entry
from tests.support.elsewhere import elsewhere
from tests.support.world import TIMEOUT_S

IDENTITY = ShardIdentity("run", 1, 2, 3, 0, 1, True)
DTYPES = [*DTYPE_CODES, torch.complex128]
POISON = 0xAA


# --- Tensors into a block ---------------------------------------------------------------

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "strided": lambda t: t[..., ::2] if t.dim() else t,
    "permuted": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "offset": lambda t: t.reshape(-1)[1:],
    "conjugated": lambda t: t.conj() if t.is_complex() else t,
    "negated": lambda t: t.conj().imag if t.is_complex() else t,
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, shape and arrangement in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    noise = random.Random(draw(st.integers(0, 99))).randbytes(size)
    raw = torch.tensor([byte % top for byte in noise], dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    return FORMS[draw(st.sampled_from(sorted(FORMS)))](tensor)


def row_major(tensor: torch.Tensor) -> bytes:
    """What must be stored."""
    return byte_view(tensor.resolve_conj().resolve_neg().contiguous()).numpy().tobytes()


def layout_of(live: Mapping[str, torch.Tensor]) -> ShardLayout:
    (layout,) = plan_shards([tensor_entry(name, tensor) for name, tensor in live.items()])
    return layout


@pytest.fixture(params=["whole", "in pieces"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with limits so small that everything is large, and cut into pieces."""
    if request.param == "in pieces":
        monkeypatch.setattr(batches, "_SMALL_BYTES", 24)
        monkeypatch.setattr(batches, "_PACK_BYTES_MAX", 40)
        monkeypatch.setattr(batches, "_PIECE_BYTES", 16)
        monkeypatch.setattr(batches, "_RUN_BYTES", 60)


@pytest.mark.thinned(6)
@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("how", ["run_batch", "lane", "runs"])
def test_every_tensor_lands_in_its_place(how: str) -> None:
    copier = CpuLane()

    @settings(max_examples=150)
    @given(st.lists(tensors(), max_size=8), st.data())
    def check(found: list[torch.Tensor], data: st.DataObject) -> None:
        live = {f"t{number}": tensor for number, tensor in enumerate(found)}
        chosen = {name for name in live if data.draw(st.booleans())}
        offset = 4096 * data.draw(st.integers(0, 1))
        layout = layout_of(live)
        block = torch.full((offset + layout.size_bytes + 64,), POISON, dtype=torch.uint8)
        planned = plan_batches(layout, live, chosen, offset=offset)
        ends = [batch.end for batch in planned]
        assert ends == sorted(ends), "progress goes one way"
        seen: list[int] = []
        if how == "lane":
            assert copier.submit(planned, block, seen.append).wait(TIMEOUT_S)
            assert seen == ends
        elif how == "runs":
            together = Runs(planned)
            assert copier.submit(together, block, seen.append).wait(TIMEOUT_S)
            assert seen == [run[-1].end for run in together.runs]
        else:
            for batch in planned:
                run_batch(batch, block)
        wanted = bytearray([POISON]) * block.numel()
        for place in layout.placed:
            if place.entry.name in chosen:
                stored = row_major(live[place.entry.name])
                assert len(stored) == place.end - place.begin
                wanted[offset + place.begin : offset + place.end] = stored
        assert block.numpy().tobytes() == bytes(wanted)

    try:
        check()
    finally:
        copier.close()


WAYS: dict[str, Callable[[Lane, list[Batch], torch.Tensor], Transfer | None]] = {
    "copy_now": lambda lane, found, block: lane.copy_now(found, block),
    "submit": lambda lane, found, block: lane.submit(found, block, lambda end: None),
    "runs": lambda lane, found, block: lane.submit(Runs(found), block, lambda end: None),
    "yielding": lambda lane, found, block: lane.submit_yielding(
        Chunks(found, 16), block, lambda end: None
    ),
}


@pytest.mark.parametrize("few_bytes", [0, 32 << 10], ids=["many bytes", "few bytes"])
@pytest.mark.parametrize("way", WAYS)
def test_a_device_without_a_lane_is_fetched_from(
    way: str, few_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never by the address of its memory, which is none of the host's, and packed where it lies."""
    monkeypatch.setattr(lane_module, "_FEW_BYTES", few_bytes)
    plain = {f"{name}{n}": torch.randn(5, n) for n in (1, 2, 3) for name in "abc"}
    others = {name: form(torch.randn(3, 4, dtype=torch.cfloat)) for name, form in FORMS.items()}
    made = plain | others
    # Neighbours on one device, which are packed, and on two.
    live = {name: t if name in ("c1", "c2", "c3") else elsewhere(t) for name, t in made.items()}
    layout = layout_of(live)
    planned = plan_batches(layout, live, live.keys())
    assert any(len(batch.sources) > 1 and not batch.sources[0].is_cpu for batch in planned)
    block = torch.full((layout.size_bytes,), POISON, dtype=torch.uint8)
    copier = DeviceLane(CpuLane())
    transfer = WAYS[way](copier, planned, block)
    assert transfer is None or transfer.wait(TIMEOUT_S)
    copier.close()
    for place in layout.placed:
        stored = block[place.begin : place.end].numpy().tobytes()
        assert stored == row_major(made[place.entry.name]), place.entry.name


@settings(max_examples=150)
@given(st.lists(tensors(), max_size=8), st.integers(1, 64))
def test_chunks_hold_the_same_bytes_and_none_is_larger_than_it_must_be(
    found: list[torch.Tensor], chunk_bytes: int
) -> None:
    live = {f"t{number}": tensor for number, tensor in enumerate(found)}
    layout = layout_of(live)
    whole, cut = (torch.full((layout.size_bytes,), POISON, dtype=torch.uint8) for _ in range(2))
    planned = plan_batches(layout, live, live.keys())
    chunks = list(Chunks(planned, chunk_bytes))
    for batch in planned:
        run_batch(batch, whole)
    for batch in chunks:
        run_batch(batch, cut)
        tensor = batch.rearranged
        one_row = tensor is not None and (tensor.dim() == 0 or len(tensor) == 1)
        assert one_row or batch.end - batch.begin <= chunk_bytes
    assert whole.numpy().tobytes() == cut.numpy().tobytes()
    ends = [batch.end for batch in chunks]
    assert ends == sorted(ends)
    assert {batch.end for batch in planned} <= set(ends)


def test_a_single_element_of_many_has_a_byte_view() -> None:
    """It counts as contiguous whatever its stride."""
    every_other = torch.tensor([258, 7], dtype=torch.int16)[::2]
    assert every_other.stride() == (2,)
    assert byte_view(every_other).tolist() == [2, 1]
    assert byte_view(every_other[:0]).tolist() == []
    assert byte_view(every_other[None, :]).tolist() == [2, 1]


def test_thousands_of_small_tensors_are_few_operators() -> None:
    """What a thread of Python does for each of them stands in the way of training."""
    live = {f"t{number}": torch.full((8,), float(number)) for number in range(2000)}
    layout = layout_of(live)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    planned = plan_batches(layout, live, set(live))
    operators = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operators.append(str(func))
            return func(*args, **kwargs or {})

    with Counted():
        for batch in planned:
            run_batch(batch, block)
    assert len(operators) <= 10, operators[:20]
    assert float(block.view(torch.float32).view(2000, 8).sum()) == 8 * sum(range(2000))


def test_what_lies_on_a_device_is_not_cut() -> None:
    batch = Batch(0, 64, (torch.empty(64, dtype=torch.uint8, device="meta"),))
    assert list(Chunks([batch], 16)) == [batch]


def test_a_batch_tells_nothing_of_what_comes_before_it() -> None:
    """A pack ends where the next chosen tensor does not follow at once: its end is the progress
    that is reported, and what was left out in between is somebody else's to copy."""
    live = {name: torch.full((4,), float(n)) for n, name in enumerate("abcd")}
    layout = layout_of(live)
    planned = plan_batches(layout, live, {"a", "b", "d"})
    assert [(batch.begin, batch.end, len(batch.sources)) for batch in planned] == [
        (0, 32, 2),
        (48, 64, 1),
    ]


def test_views_of_one_memory_are_stored_each_in_full() -> None:
    whole = torch.arange(12.0)
    live = {"whole": whole, "part": whole[3:7], "again": whole.view(3, 4).t()}
    layout = layout_of(live)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for batch in plan_batches(layout, live, live.keys()):
        run_batch(batch, block)
    for place in layout.placed:
        found = block[place.begin : place.end].numpy().tobytes()
        assert found == row_major(live[place.entry.name])


@pytest.mark.parametrize("form", ["transposed", "conjugated", "expanded", "strided"])
def test_a_complex_tensor_behind_half_of_one(form: str) -> None:
    """complex128 is stored as pairs of float64: it need not begin at a multiple of its size."""
    live = {"one": torch.ones(1, dtype=torch.float64)}
    live["many"] = FORMS[form](torch.randn(3, 4, dtype=torch.complex128))
    layout = layout_of(live)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for batch in plan_batches(layout, live, live.keys()):
        run_batch(batch, block)
    assert block.numpy().tobytes() == row_major(live["one"]) + row_major(live["many"])


# --- A block into files, while it arrives -----------------------------------------------


class MemoryWriteFile:
    """A file in memory; threads may write to it at once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._lock = threading.Lock()

    def write(self, data: memoryview, offset: int) -> None:
        assert offset % 4096 == 0
        assert data.nbytes % 4096 == 0
        with self._lock:
            self.data.extend(bytes(max(0, offset + data.nbytes - len(self.data))))
            self.data[offset : offset + data.nbytes] = data

    def reserve(self, size_bytes: int) -> None: ...

    def truncate(self, size_bytes: int) -> None:
        del self.data[size_bytes:]

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Arriving:
    """A base that arrives in pieces. Who asks how far it is makes it go on; what is not there
    yet is poisoned, so whoever reads it gets something else than the oracle.

    Args:
        steps: how much arrives each time somebody asks; in the end, all the rest.
        first: offsets that are there from the beginning, whatever the progress (marks).
    """

    def __init__(
        self, plan: BasePlan, steps: list[int], objects: dict[str, bytes], *, first: set[int]
    ) -> None:
        self.plan = plan
        self.objects = objects
        offsets, self.size_bytes = shard_offsets(plan)
        self.arena = Arena.anonymous(self.size_bytes + 4096)
        self.offset = 4096
        self.truth = random.Random(self.size_bytes).randbytes(self.size_bytes)
        view = self.arena.view
        view[:] = bytes([POISON]) * view.nbytes
        self.copied = 0
        self._steps = iter(steps)
        self._end = 0  # of the last tensor
        for shard, offset in zip(plan.shards, offsets, strict=True):
            for place in shard.layout.placed:
                self._end = max(self._end, offset + place.end)
                if place.begin in first:
                    self._fill(offset + place.begin, offset + place.end)
        self.incoming = Incoming(self.progress, timeout_s=TIMEOUT_S)

    def _fill(self, begin: int, end: int) -> None:
        self.arena.view[self.offset + begin : self.offset + end] = self.truth[begin:end]

    def progress(self) -> int:
        step = next(self._steps, 50_000)
        before, self.copied = self.copied, min(self._end, self.copied + step)
        self._fill(before, self.copied)
        if before == self._end and step:
            self.incoming.arrived(self.objects)
        return before  # what has just come is not told yet

    def capture(self) -> Capture:
        return Capture(
            number=1,
            layout=1,
            plan=self.plan,
            save=Save(2, 1),
            offset=self.offset,
            word=0,
            stream=True,
            incoming=self.incoming,
            on_end=lambda ended: None,
        )

    def tensors(self, number: int) -> bytes:
        """What the tensors of a shard must be in its file."""
        offset = shard_offsets(self.plan)[0][number]
        return self.truth[offset : offset + self.plan.shards[number].layout.size_bytes]


EDGES = [0, 1, 7, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 20001]
LAYOUTS = st.lists(st.tuples(st.sampled_from(["U8", "F32", "F64"]), st.sampled_from(EDGES)))


def planned(shapes: list[tuple[str, int]], per_file: int, objects: dict[str, bytes]) -> BasePlan:
    widths = {"U8": 1, "F32": 4, "F64": 8}
    entries = [
        Entry.whole(f"t{number}", dtype, (size // widths[dtype],))
        for number, (dtype, size) in enumerate(shapes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        cost = 620  # of one entry, about
        patch.setattr(
            "everstep.format.header.plan_shards",
            lambda found: plan_shards(found, header_bytes_max=cost * per_file),
        )
        sizes = {name: len(data) for name, data in objects.items()}
        return BasePlan(IDENTITY, plan_files(IDENTITY, entries, {}, sizes))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkRing]:
    """Chunks of two pages: every edge is near."""
    monkeypatch.setattr("everstep.format.writer.CHUNK_BYTES", 8192)
    ring = ChunkRing(4, 2)
    yield ring
    ring.close()


def test_what_is_written_while_it_arrives_is_what_arrived(
    small_chunks: ChunkRing, tmp_path: Path
) -> None:
    @settings(max_examples=200)
    @given(
        LAYOUTS,
        st.integers(1, 4),
        st.lists(st.sampled_from([0, 1, 4096, 5000, 8192, 30000]), max_size=12),
        st.lists(st.binary(max_size=9000), max_size=3),
        st.sets(st.sampled_from([0, 4096, 8192, 12288])),
    )
    def check(
        shapes: list[tuple[str, int]],
        per_file: int,
        steps: list[int],
        data: list[bytes],
        first: set[int],
    ) -> None:
        objects = {f"everstep/objects/{number}": item for number, item in enumerate(data)}
        plan = planned(shapes, per_file, objects)
        base = Arriving(plan, steps, objects, first=first)
        bodies = base.capture().bodies(base.arena)
        last = len(plan.shards) - 1
        for number, (shard, body) in enumerate(zip(plan.shards, bodies, strict=True)):
            file = MemoryWriteFile()
            typed: WriteFile = file
            written = write_shard(
                typed, shard, IDENTITY, body, small_chunks, timeout_s=TIMEOUT_S, progress=silent
            )
            wanted = base.tensors(number) + (b"".join(data) if number == last else b"")
            assert bytes(file.data[shard.room_bytes :]) == wanted
            path = tmp_path / "shard"
            path.write_bytes(file.data)
            opened = PosixFileSystem().open(path)
            header = read_header(opened, written.record, path)
            opened.close()
            assert header.digests == tuple(
                digest(wanted[place.begin : place.end]) for place in header.placed
            )
            assert digest_shard(shard, IDENTITY, body) == written

    check()


def test_whole_chunks_go_out_before_the_rest_is_there(small_chunks: ChunkRing) -> None:
    """That is what streaming is for."""
    plan = planned([("U8", 8192 * 4)], 9, {})
    base = Arriving(plan, [8192 + 10, *([0] * 30), 8192 * 3], {}, first=set())
    reached: list[int] = []

    class Watched(MemoryWriteFile):
        def write(self, data: memoryview, offset: int) -> None:
            reached.append(base.copied)
            super().write(data, offset)

    (body,) = base.capture().bodies(base.arena)
    write_shard(
        Watched(),
        plan.shards[0],
        IDENTITY,
        body,
        small_chunks,
        timeout_s=TIMEOUT_S,
        progress=silent,
    )
    assert reached[0] == 8192 + 10


@pytest.mark.parametrize("when", ["before", "between", "objects"])
def test_what_is_lost_on_the_way_ends_the_writing(when: str, small_chunks: ChunkRing) -> None:
    plan = planned([("U8", 8192 * 4)], 9, {"everstep/objects/o": b"x"})
    base = Arriving(plan, [], {"everstep/objects/o": b"x"}, first=set())
    asked = 0
    error = KeeperError("the training process ended")

    def progress() -> int:
        nonlocal asked
        asked += 1
        if asked == 20:
            base.incoming.lose(error)
            base.incoming.arrived({})  # of no effect any more
        return {"before": 0, "between": 8192 + 1, "objects": 8192 * 4}[when]

    base.incoming = Incoming(progress, timeout_s=TIMEOUT_S)
    (body,) = base.capture().bodies(base.arena)
    file = MemoryWriteFile()
    with pytest.raises(KeeperError) as caught:
        write_shard(
            file,
            plan.shards[0],
            IDENTITY,
            body,
            small_chunks,
            timeout_s=TIMEOUT_S,
            progress=silent,
        )
    assert caught.value is error
    assert not any(file.data[: plan.shards[0].room_bytes]), "no header: no reader accepts it"


def test_a_capture_that_stands_still_is_given_up() -> None:
    incoming = Incoming(lambda: 7, timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"no progress for 0.05 s"):
        incoming.wait_for(8)
    incoming.wait_for(7)
    with pytest.raises(DeadlineError):
        incoming.objects()
    incoming.arrived({"o": b""})
    incoming.wait_for(8)
    assert incoming.objects() == {"o": b""}


def test_progress_of_any_size_keeps_it_going() -> None:
    """Each time it is asked one more byte has come: slow, and not hung."""
    seen = iter(range(1000))
    incoming = Incoming(lambda: next(seen), timeout_s=0.005)
    incoming.wait_for(100)


# --- Spot checks ------------------------------------------------------------------------


def checked(live: dict[str, torch.Tensor]) -> tuple[SpotCheck, torch.Tensor]:
    """A spot check of all, and a block that holds them as they are now."""
    layout = layout_of(live)
    block = torch.zeros(4096 + layout.size_bytes, dtype=torch.uint8, device="cpu")
    for batch in plan_batches(layout, live, live.keys(), offset=4096):
        run_batch(batch, block)
    return SpotCheck([(layout, 4096)], live, live.keys()), block


@settings(max_examples=100)
@given(st.lists(tensors(), min_size=1, max_size=8), st.data())
def test_what_was_not_touched_is_never_suspected(
    found: list[torch.Tensor], data: st.DataObject
) -> None:
    live = {f"t{number}": tensor for number, tensor in enumerate(found)}
    check, block = checked(live)
    assert check.differing(check.take(), block) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_tensor_that_changes_is_found_by_name(dtype: torch.dtype) -> None:
    top = 2 if dtype == torch.bool else 256
    size = 100 * torch.empty((), dtype=dtype).element_size()
    noise = [byte % top for byte in random.Random(3).randbytes(size)]
    live: dict[str, Any] = {
        "same": torch.arange(50),
        "small": torch.ones(3),
        "changes": torch.tensor(noise, dtype=torch.uint8).view(dtype),
        "last": torch.zeros(9, dtype=torch.uint8),
    }
    check, block = checked(live)
    raw = byte_view(live["changes"])
    raw.copy_(1 - raw if dtype == torch.bool else 255 - raw)
    assert check.differing(check.take(), block) == "changes"


@pytest.mark.parametrize(
    ("size", "least"),
    [(1, 1), (2, 2), (7, 7), (8, 8), (9, 8), (17, 8), (1000, 8), (1024, 8), (1025, 4), (99_999, 4)],
)
def test_so_many_elements_are_looked_at(size: int, least: int) -> None:
    live = {"t": torch.zeros(size)}
    check, _ = checked(live)
    (values,) = check.take().values.values()
    assert least <= values.numel() <= 2 * least


@pytest.mark.parametrize(("size", "share"), [(1000, 8), (1030, 4), (4099, 4)])
def test_what_changes_in_one_go_is_found_wherever_it_is(size: int, share: int) -> None:
    """An eighth of a small tensor, a quarter of a large one."""
    for begin in range(0, size - size // share, 7):
        live = {"other": torch.zeros(3), "t": torch.zeros(size)}
        check, block = checked(live)
        live["t"][begin : begin + size // share] = 1.0
        assert check.differing(check.take(), block) == "t"


def no_rows(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors whose elements do not lie in row-major order."""
    flat = torch.arange(1, 4 * 6 * 5 * 7 + 1, device="cpu").to(dtype)
    return {
        "turned": flat.view(28, 30).t(),
        "channels last": flat.view(4, 6, 5, 7).to(memory_format=torch.channels_last),
        "every second": flat.view(20, 42)[::2, 1::3],
        "a column": flat.view(20, 42)[:, 3],
        "one, spread": flat[:1].expand(9, 4),
        "small": flat[:6].view(2, 3).t(),
    }


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("name", no_rows(torch.float32))
def test_tensors_that_are_not_contiguous_are_looked_at(name: str, dtype: torch.dtype) -> None:
    """In the places that they have in the file."""
    tensor = no_rows(dtype)[name]
    assert not tensor.is_contiguous()
    check, block = checked({"before": torch.zeros(3), "t": tensor, "behind": torch.zeros(5)})
    assert check.differing(check.take(), block) is None
    tensor.untyped_storage().fill_(0)
    assert check.differing(check.take(), block) == "t"


def test_tensors_on_several_devices_are_each_looked_at_where_they_are() -> None:
    """Adam keeps its step counters in host memory, and the rest on the device."""
    live = {"step": torch.zeros(1), "weight": torch.zeros(10, device="meta")}
    layout = layout_of(live)
    SpotCheck([(layout, 0)], live, live.keys()).take()


def test_it_works_under_another_default_device() -> None:
    with torch.device("meta"):
        live = {"t": torch.zeros(30, device="cpu")}
        check, block = checked(live)
        assert check.differing(check.take(), block) is None
