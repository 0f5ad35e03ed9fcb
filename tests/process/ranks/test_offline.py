"""Commands without the program that trained, of a run of several ranks: each entry of each of them
is what training had, bit for bit, or it is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import everstep
from everstep.capture.lane import LiveBody
from everstep.convert import ExportOptions, export_state
from everstep.convert.selection import tensors_in
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.log import LogRecord, record_digest
from everstep.format.names import (
    AUDIT_RECORD,
    MANIFEST,
    SLOTS_DIR,
    marker_name,
    shard_name,
    timeline_dir,
)
from everstep.format.reader import read_body
from everstep.format.records import AuditRecord, Manifest
from everstep.format.writer import ChunkRing
from everstep.keeper.log.segment_queue import SegmentWriter
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.restore.offline.audit import audit_newest
from everstep.run.open_base import OpenBase
from everstep.run.scan import scan_run
from everstep.run.segments import read_segment, scan_log
from everstep.seams import ManualClock, PosixFileSystem, Seams
from everstep.seams.progress import silent
from everstep.state.layout.entries import GRADIENT, OBJECT_PREFIX
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import byte_view, empty_like_entry, host_bytes
from everstep.tiers.durable_files import SlotStore
from tests.support.keepers import end_keepers
from tests.support.logged import AT_ONCE, document, invoke
from tests.support.ranks.parallel import LAYOUTS, MORE, Training
from tests.support.trainers import finish_trainer, start_trainer, whole_lines
from tests.support.world import flip, forget

FS = PosixFileSystem()
_HANGS_S = 240.0
LAST = 8  # step behind which all ranks die
BASES = (1, 3, 6)

TRAINING = """
import json, os, pathlib, random, signal, sys, time, warnings
from datetime import timedelta
import numpy as np
import torch, torch.distributed as dist
import everstep
from tests.support.ranks.parallel import MORE

run, meet, layout, rank, world, last, method = sys.argv[1:]
rank, world, last = int(rank), int(world), int(last)
warnings.simplefilter("ignore")
torch.use_deterministic_algorithms(True)
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=world,
    timeout=timedelta(seconds=200),
)
torch.manual_seed(1)
training = MORE[layout].build(rank, world)
torch.manual_seed(100 + training.draws)
random.seed(rank)
np.random.seed(rank)
audits = method == "audited"  # of the bases of steps 1 and 3, which lie within a batch
log = everstep.LogOptions(to="disk", batch_steps=9, audit=True) if audits else (
    everstep.LogOptions(to="disk", batch_steps=2, lag_steps=1, history="all", audit=False)
)
ckpt = everstep.Checkpointer(
    run, training.values, method="logged" if audits else method, every=3, keep=9,
    on_failure="warn", progress_timeout_s=100.0, **({} if method == "lazy" else {"log": log}),
)

def say():
    said = {"step": step, "whole": training.whole(), "digests": training.digests()}
    os.write(1, (json.dumps(said) + "\\n").encode())

step = ckpt.resume().step
if step:
    say()
while step < last:
    training.step()
    ckpt.step()
    step += 1
    say()
    if step in (1, 3, 6):
        ckpt.wait()
    if audits and step == 3:
        for _ in range(1000):
            if any(pathlib.Path(run).rglob("audit.json")):
                break
            time.sleep(0.1)
dist.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""

Said = list[dict[int, dict[str, Any]]]


def trained(run: Path, layout: str, world: int, last: int = LAST, method: str = "logged") -> Said:
    """What each rank had after each step of a job that is gone now, its keepers, too."""
    meet = str(run.parent / f"meet-{last}")
    about = (str(run), meet, layout)
    ranks = [
        start_trainer(TRAINING, *about, str(rank), str(world), str(last), method)
        for rank in range(world)
    ]
    ended = [finish_trainer(one, _HANGS_S) for one in ranks]
    end_keepers(run.parent)
    assert [status for status, _, _ in ended] == [-signal.SIGKILL] * world, ended
    lines = [[json.loads(line) for line in whole_lines(out)] for _, out, _ in ended]
    return [{one["step"]: one for one in said} for said in lines]


@pytest.fixture(scope="module", params=["ddp", "fsdp", "follows"])
def template(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Said]:
    """Two ranks, bases 1, 3 and 6, and all of the log from step 2 to 8."""
    run = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, run, trained(run, request.param, 2)


@pytest.fixture
def run(template: tuple[str, Path, Said], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[1], tmp_path / "run"))


def alone(path: Path, layout: str) -> tuple[Training, everstep.Recovery]:
    """What one process restores there."""
    training = MORE["follows" if layout == "follows" else "one"].build(0, 1)
    forget(path)
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(path, training.values, method="sync", keeper=keeper) as ckpt:
        return training, ckpt.resume()


@pytest.mark.thinned(3)
def test_the_ranks_themselves_come_back_to_all_of_it(
    template: tuple[str, Path, Said], run: Path
) -> None:
    """What is inside of DDP and follows what is trained, too: no rank restores another one's."""
    layout, _, said = template
    for rank, lines in enumerate(trained(run, layout, 2, LAST + 1)):
        assert min(lines) == LAST
        assert lines[LAST] == said[rank][LAST]


def whole_of(said: Said, step: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for lines in said:
        for name, digest in lines[step]["whole"].items():
            assert found.setdefault(name, digest) == digest
    return found


@pytest.mark.thinned(12)
@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_restore_gives_the_tensors_of_all_ranks(
    template: tuple[str, Path, Said], run: Path, tmp_path: Path, step: int
) -> None:
    layout, _, said = template
    found = document("restore", run, "--step", step, "--out", tmp_path / "new")
    base = max(base for base in BASES if base <= step)
    assert (found["base"]["step"], found["replayed"]) == (base, step - base)
    assert any(note.startswith("everstep/rng: that of rank 0") for note in found["notes"])
    assert document("verify", tmp_path / "new")["ok"]
    training, recovery = alone(tmp_path / "new", layout)
    assert (recovery.step, recovery.exact) == (step, False)
    assert training.whole() == whole_of(said, step)
    mine, first = training.digests(), said[0][step]["digests"]
    assert (mine["rest"], mine["torch"]) == (first["rest"], first["torch"])
    assert mine["generators"] == first["generators"]
    if layout != "fsdp":  # which holds all of it, and statistics of batches of its own
        assert mine["tensors"] == first["tensors"]


@pytest.mark.parametrize("step", [3, 8])
def test_load_gives_the_tensors_of_all_ranks(
    template: tuple[str, Path, Said], run: Path, step: int
) -> None:
    """Of a base, and of a step that only the log leads to; nothing of the run is touched."""
    layout, _, said = template
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    training = MORE["follows" if layout == "follows" else "one"].build(0, 1)
    told, found = everstep.peek(run), everstep.load(run, step)
    assert (told.step, told.exact, found.step, found.exact) == (LAST, True, step, False)
    assert any(note.startswith("everstep/rng: that of rank 0") for note in found.notes)
    found = everstep.load(run, step, into=training.values)
    assert not any(note.startswith("everstep/rng") for note in found.notes), "it is not given"
    assert found.exact == (not found.notes)
    assert training.whole() == whole_of(said, step)
    model = training.values["model"].state_dict()
    found = everstep.load(run, step, only="model/*")
    for name, tensor in found.state_dict("model").items():
        assert torch.equal(tensor, model[name])
    assert found.state_dict("model").keys() == model.keys()
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.parametrize("step", [3, 8])
def test_export_joins_the_shards_of_all_ranks(
    template: tuple[str, Path, Said], step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor by tensor from a base, from memory where the log is replayed."""
    monkeypatch.setattr("everstep.convert.selection._GROUP_BYTES", 1)
    _, run, _ = template
    out = tmp_path / "state.pt"
    done = export_state(run, out, "torch", step)
    loaded = everstep.load(run, step)
    assert (done.state.step, done.state.notes) == (step, loaded.notes)
    written = torch.load(out, weights_only=False)
    for part in ("model", "optimizer"):
        expected = loaded.state_dict(part)
        assert written[part].keys() == expected.keys()
        pairs = zip(tensors_in(written[part]), tensors_in(expected), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


BEGINNING = """
import json, os, sys
from datetime import timedelta
import torch, torch.distributed as dist
import everstep
from tests.support.ranks.parallel import MORE

run, meet, layout, rank, world, source = sys.argv[1:]
rank, world = int(rank), int(world)
dist.init_process_group(
    "gloo", init_method=f"file://{meet}", rank=rank, world_size=world,
    timeout=timedelta(seconds=200),
)
torch.manual_seed(77)
training = MORE[layout].build(rank, world)
with everstep.Checkpointer(run, training.values, progress_timeout_s=100.0) as ckpt:
    recovery = ckpt.resume(initial=source, only=["model"])
    said = {"exact": recovery.exact, "notes": recovery.notes, "whole": training.whole()}
    os.write(1, (json.dumps(said) + "\\n").encode())
    training.step()
    ckpt.step()
dist.destroy_process_group()
"""


@pytest.mark.thinned(3)
def test_several_ranks_begin_with_exported_weights(
    template: tuple[str, Path, Said], tmp_path: Path
) -> None:
    """Shards of other ranks are taken from the one file."""
    layout, run, said = template
    source = tmp_path / "model.safetensors"
    export_state(run, source, "safetensors", LAST, ExportOptions(only=["model"]))
    about = (str(tmp_path / "new"), str(tmp_path / "meet"), layout)
    ranks = [start_trainer(BEGINNING, *about, str(n), "2", str(source)) for n in range(2)]
    ended = [finish_trainer(one, _HANGS_S) for one in ranks]
    end_keepers(tmp_path)
    assert [status for status, _, _ in ended] == [0, 0], ended
    expected = whole_of(said, LAST)
    names = [f"stage 0/{name}" for name in load_file(source) if f"stage 0/{name}" in expected]
    assert len(names) > 3
    for _, out, _ in ended:
        found = json.loads(whole_lines(out)[0])
        assert found["exact"]
        assert str(source) in found["notes"][0]
        assert [found["whole"][name] for name in names] == [expected[name] for name in names]


# --- Base A and the log give base B -------------------------------------------------------


def edit_rank(run: Path, step: int, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes one rank's files of a base anew with other contents, with digests that vouch for
    them."""
    (base,) = [one for one in scan_run(FS, run).bases if one.id.step == step]
    assert base.manifest is not None
    ring = ChunkRing(4, 2)
    opened = OpenBase.open(FS, base, rank)
    try:
        (shard,) = opened.shards
        record, header = shard.record, shard.header
        data = bytearray(record.length - header.room_bytes)

        def keep(begin: int, piece: memoryview) -> None:
            data[begin : begin + piece.nbytes] = piece

        read_body(shard, ring, timeout_s=60.0, progress=silent, sink=keep)
        values: dict[str, Any] = {}
        for place in header.placed:
            found = bytes(data[place.begin : place.end])
            if not place.entry.name.startswith(OBJECT_PREFIX):
                tensor = empty_like_entry(place.entry)
                host_bytes(tensor)[:] = found
                values[place.entry.name] = tensor
            else:
                values[place.entry.name] = found
        change(values)
        entries = [p.entry for p in header.placed if not p.entry.name.startswith(OBJECT_PREFIX)]
        objects = {name: data for name, data in values.items() if name.startswith(OBJECT_PREFIX)}
        tensors = {name: item for name, item in values.items() if name not in objects}
        sizes = {name: len(item) for name, item in objects.items()}
        shards = plan_files(header.identity, entries, header.aliases, sizes)
        bodies = [LiveBody(shards[0].layout, tensors, objects)]
        slots = SlotStore(FS, timeline_dir(run, 1) / SLOTS_DIR)
        Path(shard.path).unlink()
        writer = ShardWriter(FS, run, ring, slots, timeout_s=60.0)
        written = writer.write(BasePlan(header.identity, shards), bodies, silent)
        marker = replace(opened.marker, files=tuple(one.record for one in written))
        markers = [marker if one.rank == rank else one for one in base.manifest.markers]
        Path(base.path / marker_name(rank)).write_bytes(marker.encode())
        Path(base.path / MANIFEST).write_bytes(Manifest(tuple(markers)).encode())
    finally:
        opened.close()
        ring.close()


def verdicts(found: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [
        (one["before"]["step"], one["after"]["step"], one["verdict"]) for one in found["replay"]
    ]


def names_of(run: Path, step: int, rank: int) -> list[str]:
    (base,) = [one for one in scan_run(FS, run).bases if one.id.step == step]
    opened = OpenBase.open(FS, base, rank)
    opened.close()
    return [place.entry.name for place in opened.placed()]


def test_every_entry_of_every_rank_is_computed_anew(run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    found = document("verify", run, "--replay")
    assert found["ok"]
    assert verdicts(found) == [(1, 3, "equal"), (3, 6, "equal")], found["replay"]
    assert [one["updates"] for one in found["replay"]] == [2, 3]
    count = sum(len(names_of(run, 6, rank)) for rank in range(2))
    assert {one["entries"] for one in found["replay"]} == {count}
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    text = invoke("verify", run, "--replay").stdout
    assert "2 of 2 bases equal what replay gives" in text
    assert "3 of 3 bases and 4 of 4 segments of the log good" in text


def some(names: list[str], part: str) -> str:
    return next(name for name in names if part in name)


def flip_last_bit(name: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        if isinstance(values[name], bytes):
            tree: Any = decode(values[name])
            tree["last_epoch"] += 1
            values[name] = encode(tree)
        else:
            byte_view(values[name])[-1] ^= 1

    return change


@pytest.mark.thinned(9)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", ["exp_avg", "running_var", "rng/torch", "objects/scheduler"])
def test_one_bit_in_any_ranks_file_that_every_digest_vouches_for(
    run: Path, rank: int, part: str
) -> None:
    name = some(names_of(run, 6, rank), part)
    edit_rank(run, 6, rank, flip_last_bit(name))
    assert document("verify", run)["ok"]
    found = document("verify", run, "--replay", status=1)
    assert verdicts(found) == [(1, 3, "equal"), (3, 6, "different")]
    assert found["replay"][1]["differing"] == [f"{name} of rank {rank}"]


def segment(run: Path, after: int, last: int, rank: int) -> Path:
    return run / f"timeline-00001/log/{after:012d}-{last:012d}" / shard_name(rank)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_in_any_ranks_log_is_found(run: Path, tmp_path: Path, rank: int) -> None:
    flip(segment(run, 4, 6, rank), 4096)
    found = document("verify", run, status=1)
    (bad,) = [one for one in found["segments"] if one["problem"]]
    assert shard_name(rank) in bad["problem"]
    found = document("verify", run, "--replay", status=1)
    assert verdicts(found) == [(1, 3, "equal"), (3, 6, "unchecked")]
    refused = document("restore", run, "--step", 5, "--out", tmp_path / "new", status=1)
    assert "no intact base and log lead to it" in refused["message"]
    assert not (tmp_path / "new").exists()


def test_a_log_that_one_rank_has_not_leads_nowhere(run: Path, tmp_path: Path) -> None:
    segment(run, 4, 6, 1).with_name(marker_name(1)).unlink()
    refused = document("restore", run, "--step", 5, "--out", tmp_path / "new", status=2)
    assert refused["hint"] == "existing steps: 1 to 4, 6 to 8"
    found = document("verify", run, "--replay")
    assert verdicts(found) == [(1, 3, "equal"), (3, 6, "unchecked")]
    log = document("ls", run)["timelines"][0]["log"]
    assert log["steps"] == [[2, 4], [7, 8]]
    assert log["gaps"] == [[5, 6]]
    assert log["segments"] == document("du", run)["timelines"][0]["log"]["segments"] == 4


def rewrite(
    run: Path, after: int, last: int, rank: int,
    change: Callable[[list[LogRecord]], list[LogRecord]],
) -> None:  # fmt: skip
    """Writes a rank's segment anew, with digests that vouch for it."""
    found = scan_log(FS, run, [1], rank=rank)
    (one,) = [each for each in found if (each.after, each.last) == (after, last)]
    assert one.marker is not None
    ring = ChunkRing(4, 2)
    try:
        records = change(read_segment(FS, one, ring, timeout_s=60.0))
        marker = one.marker
        identity = ShardIdentity(marker.run, 1, marker.step, marker.lsn, rank, 2, marker.exact)
        writer = SegmentWriter(Seams(), run, identity, ring, timeout_s=60.0)
        segment(run, after, last, rank).unlink()
        writer.write(records, after)
    finally:
        ring.close()


def with_other_gradient(record: LogRecord) -> LogRecord:
    """One element has the other sign, and the digest goes along."""
    place = next(p for p in record.layout.placed if p.entry.name.startswith(GRADIENT))
    view = memoryview(bytearray(record.data))
    values = np.frombuffer(view[place.begin : place.end], np.float32)
    values[np.abs(values).argmax()] *= -1
    return replace(record, data=view, digest=record_digest(view, record.objects))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rank", [0, 1])
def test_another_gradient_in_any_ranks_log_gives_another_base(run: Path, rank: int) -> None:
    """What DDP's ranks consume alike is in one's log and in all of their states."""

    def change(records: list[LogRecord]) -> list[LogRecord]:
        assert records[0].head.kind == "update"
        return [with_other_gradient(records[0]), *records[1:]]

    rewrite(run, 4, 6, rank, change)
    assert document("verify", run)["ok"]
    found = document("verify", run, "--replay", status=1)
    assert verdicts(found) == [(1, 3, "equal"), (3, 6, "different")]


def test_ls_says_what_can_be_reached(run: Path) -> None:
    found = document("ls", run)
    assert found["ok"]
    assert found["timelines"][0]["log"]["steps"] == [[2, 8]]
    assert (found["resume"]["step"], found["resume_replay"]["step"]) == (6, 8)


# --- The keeper's audits ------------------------------------------------------------------


def audited(run: Path) -> AuditRecord:
    found = audit_newest(FS, run, 1, ManualClock())
    assert isinstance(found, AuditRecord), found
    return found


def test_the_newest_base_of_all_ranks_is_audited(run: Path) -> None:
    found = audited(run)
    assert (found.before, found.step, found.verdict) == ((1, 3), 6, "equal")
    assert found.entries == sum(len(names_of(run, 6, rank)) for rank in range(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_audit_sees_a_bit_of_any_rank(run: Path, rank: int) -> None:
    name = some(names_of(run, 6, rank), "exp_avg_sq")
    edit_rank(run, 6, rank, flip_last_bit(name))
    found = audited(run)
    assert (found.verdict, found.differing) == ("different", (f"{name} of rank {rank}",))


def test_what_one_rank_has_not_logged_yet_is_not_audited(run: Path) -> None:
    """Nor is what comes before it said to be the newest."""
    segment(run, 4, 6, 1).with_name(marker_name(1)).unlink()
    assert audited(run).step == 3


@pytest.mark.slow
def test_keepers_audit_what_all_ranks_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's does, by the logs of both, of which the other one's is written for that."""
    (tmp_path / "sitecustomize.py").write_text(AT_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    trained(tmp_path / "run", "ddp", 2, method="audited")
    records = {path: json.loads(path.read_text()) for path in tmp_path.rglob(AUDIT_RECORD)}
    (found,) = records.values()
    assert (found["before"], found["step"], found["verdict"]) == ([1, 1], 3, "equal")


# --- Other ways to spread it --------------------------------------------------------------

OTHERS = [name for name in LAYOUTS if name not in ("one", "ddp", "fsdp")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_a_job_that_is_spread_in_any_way(tmp_path: Path, layout: str) -> None:
    """Stages of a pipeline have parameters of the same names: no process has them all."""
    run, world = tmp_path / "run", LAYOUTS[layout].ranks
    said = trained(run, layout, world)
    found = document("verify", run, "--replay")
    assert found["ok"]
    assert verdicts(found) == [(1, 3, "equal"), (3, 6, "equal")], found["replay"]
    step = 5
    if "pp" in layout or layout == "3d":
        refused = document("restore", run, "--step", step, "--out", tmp_path / "new", status=3)
        assert "ranks had different parameters of one name" in refused["message"]
        assert "model/net.up.weight" in refused["message"]
        assert not (tmp_path / "new").exists()
        return
    document("restore", run, "--step", step, "--out", tmp_path / "new")
    training, recovery = alone(tmp_path / "new", layout)
    assert recovery.step == step
    assert training.whole() == whole_of(said, step)


@pytest.mark.slow
def test_a_log_of_another_number_of_ranks_leads_on_from_their_own_base(tmp_path: Path) -> None:
    """Of ZeRO's ranks each has updated other parameters since: without that base, it is said."""
    run, last = tmp_path / "run", LAST + 2
    trained(run, "zero", 2)
    said = trained(run, "zero", 3, last)
    assert [min(lines) for lines in said] == [LAST] * 3
    document("restore", run, "--step", last, "--out", tmp_path / "new")
    training, recovery = alone(tmp_path / "new", "zero")
    assert recovery.step == last
    assert training.whole() == whole_of(said, last)
    for base in (run / "timeline-00002" / "base").iterdir():
        shutil.rmtree(base)
    refused = document("restore", run, "--step", last, "--out", tmp_path / "none", status=1)
    assert "the state has another composition" in refused["message"]
    assert not (tmp_path / "none").exists()
    document("restore", run, "--step", LAST, "--out", tmp_path / "before")


def test_parts_of_an_optimizer_come_together(tmp_path: Path) -> None:
    """Of bases alone."""
    run = tmp_path / "run"
    said = trained(run, "zero", 2, method="lazy")
    document("restore", run, "--step", 6, "--out", tmp_path / "new")
    training, recovery = alone(tmp_path / "new", "zero")
    assert recovery.step == 6
    assert training.whole() == whole_of(said, 6)
