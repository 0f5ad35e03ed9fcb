"""Which base comes back: the newest good one along the history of the newest timeline."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Checkpointer
from everstep.commit.lineage import BaseId
from everstep.errors import (
    MismatchError,
    NewerFormatError,
    RecoveryError,
    StateError,
)
from everstep.format.records import Manifest, Marker, _encode
from everstep.format.writer import ChunkRing
from everstep.run.scan import scan_base
from everstep.run.verify import verify_base
from everstep.seams import PosixFileSystem
from everstep.seams.progress import silent
from tests.support.resuming import BIG, look, shard, train_on
from tests.support.world import (
    TIMEOUT_S,
    HookedFileSystem,
    assert_same,
    base_folder,
    flip,
    inventory_of,
    opened,
    raising,
)


def test_the_newest(run_folder: Path) -> None:
    train_on(run_folder, until=3)
    recovery, value = look(run_folder)
    assert (recovery.step, value, recovery.skipped) == (3, 3, ())


def test_time_travel_and_back(run_folder: Path) -> None:
    """A rewind opens a new timeline; what it turned away from does not come back by itself."""
    train_on(run_folder, until=5)
    assert look(run_folder, step=2)[1] == 2
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (2, 2)
    assert {(s.timeline, s.step) for s in recovery.skipped} == {(1, 3), (1, 4), (1, 5)}
    assert {s.reason for s in recovery.skipped} == {"not in the history of the newest timeline"}
    train_on(run_folder, until=4, value=100)
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (4, 104)
    recovery, value = look(run_folder, step=5)  # the abandoned branch is still there, by name
    assert (recovery.step, value) == (5, 5)
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (5, 5)


def test_a_step_in_two_branches_means_the_one_in_the_history(run_folder: Path) -> None:
    train_on(run_folder, until=4)
    look(run_folder, step=1)
    train_on(run_folder, until=4, value=100)
    assert look(run_folder, step=3)[1] == 103
    look(run_folder, step=1)
    assert look(run_folder, step=3)[1] in (3, 103)


def test_a_step_that_is_not_there_lists_those_that_are(run_folder: Path) -> None:
    train_on(run_folder, until=2)
    with pytest.raises(RecoveryError, match="no base of step 7") as error:
        look(run_folder, step=7)
    assert "step 2 of timeline 1, step 1 of timeline 1" in str(error.value)


def test_from_scratch(run_folder: Path) -> None:
    """resume(step=0) starts afresh, and stays so until there is something newer."""
    train_on(run_folder, until=3)
    recovery, value = look(run_folder, step=0)
    assert (recovery.step, recovery.source, value) == (0, "fresh", -1)
    recovery, value = look(run_folder)
    assert (recovery.step, recovery.source) == (0, "fresh")
    assert len(recovery.skipped) == 3
    train_on(run_folder, until=1, value=50)
    assert look(run_folder)[1] == 51
    assert look(run_folder, step=3)[1] == 3


def test_a_timeline_that_came_to_nothing_hides_nothing(run_folder: Path) -> None:
    """Its process chose base 1, which the older one deleted at that very moment for a newer
    one, and died before it could choose again."""
    train_on(run_folder, until=2)
    look(run_folder, step=1)
    shutil.rmtree(base_folder(run_folder, 1))
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (2, 2)


def test_each_resume_opens_a_timeline_with_its_parent(run_folder: Path) -> None:
    train_on(run_folder, until=2)
    train_on(run_folder, until=4)
    look(run_folder, step=1)
    records = inventory_of(run_folder).timelines
    parents = {n: (r.parent, r.fork_step, r.exact, r.world) for n, r in records.items() if r}
    assert parents == {1: (None, 0, True, 1), 2: (1, 2, True, 1), 3: (1, 1, True, 1)}
    assert all(r.fingerprint["torch"] == torch.__version__ for r in records.values() if r)
    assert len({r.run for r in records.values() if r}) == 1


# Damage: the next older one, with the reason.


def test_a_damaged_base_is_passed_over_with_the_reason(run_folder: Path) -> None:
    train_on(run_folder, until=3)
    flip(shard(run_folder, 3), 4096 + 500)
    recovery, value = look(run_folder)
    assert (recovery.step, value, recovery.exact) == (2, 2, True)
    ((skipped),) = recovery.skipped
    assert (skipped.timeline, skipped.step) == (1, 3)
    assert "rank-00000.safetensors: entry 't' is damaged" in skipped.reason


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "a directory", "unreadable header"])
def test_other_damage_to_a_shard(damage: str, run_folder: Path) -> None:
    train_on(run_folder, until=2)
    path = shard(run_folder, 2)
    data = path.read_bytes()
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(
            {"empty": b"", "cut": data[:-1], "unreadable header": b"x" * len(data)}[damage]
        )
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (1, 1)
    assert [s.step for s in recovery.skipped] == [2]


def test_all_damaged_is_an_error_never_a_fresh_start(run_folder: Path) -> None:
    train_on(run_folder, until=2)
    for step in (1, 2):
        flip(shard(run_folder, step), 4096 + 500)
    state = {"n": -1, "t": torch.zeros(BIG)}
    with opened(run_folder, state) as ckpt:
        with pytest.raises(RecoveryError) as error:
            ckpt.resume()
        assert "step 1, timeline 1" in str(error.value)
        assert "step 2, timeline 1" in str(error.value)
        with pytest.raises(StateError, match="partly overwritten"):
            ckpt.save()
        with pytest.raises(StateError, match="partly overwritten"):
            ckpt.step()
    assert len(inventory_of(run_folder).bases) == 2  # nothing is swept away


@pytest.mark.parametrize("steps", [1, 2])
def test_all_records_damaged_is_an_error_never_a_fresh_start(steps: int, run_folder: Path) -> None:
    """Neither manifest nor marker can be read: the base was there once, and its data still are."""
    train_on(run_folder, until=steps)
    for name in ("manifest.json", "rank-00000.done"):
        flip(base_folder(run_folder, steps) / name, 60)
    if steps == 1:
        with pytest.raises(RecoveryError, match="none can be used"):
            look(run_folder)
        state = {"n": -1, "t": torch.zeros(BIG)}
        with opened(run_folder, state) as ckpt, pytest.raises(StateError, match="not called"):
            ckpt.save()
    else:
        recovery, value = look(run_folder)
        assert (recovery.step, value) == (1, 1)
        assert "no readable manifest" in recovery.skipped[0].reason
    assert shard(run_folder, steps).is_file()


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.done"])
@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_one_of_two_records_is_enough(name: str, how: str, run_folder: Path) -> None:
    train_on(run_folder, until=2)
    path = base_folder(run_folder, 2) / name
    if how == "missing":
        path.unlink()
    else:
        flip(path, 60)
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (2, 2)


def test_a_base_without_manifest_is_rolled_forward(run_folder: Path) -> None:
    """Its process died between the marker and the manifest: recovery writes the same one."""
    train_on(run_folder, until=2)
    manifest = base_folder(run_folder, 2) / "manifest.json"
    before = manifest.read_bytes()
    manifest.unlink()
    assert scan_base(PosixFileSystem(), run_folder, BaseId(1, 2)).status == "complete"
    recovery, value = look(run_folder)
    assert (recovery.step, value, recovery.skipped) == (2, 2, ())
    assert manifest.read_bytes() == before


def test_a_base_without_marker_and_manifest_does_not_exist(run_folder: Path) -> None:
    train_on(run_folder, until=2)
    for name in ("manifest.json", "rank-00000.done"):
        (base_folder(run_folder, 2) / name).unlink()
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (1, 1)
    assert "no marker" in recovery.skipped[0].reason
    assert not base_folder(run_folder, 2).exists()  # swept


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_without_the_record_of_a_timeline(how: str, run_folder: Path) -> None:
    """Its bases are not lost with it, nor is the run started over."""
    train_on(run_folder, until=2)
    train_on(run_folder, until=4)
    for timeline in (1, 2):
        path = run_folder / f"timeline-{timeline:05d}" / "timeline.json"
        path.unlink() if how == "missing" else flip(path, 60)
    recovery, value = look(run_folder)
    assert (recovery.step, value, recovery.skipped) == (4, 4, ())
    assert len([note for note in recovery.notes if "timeline.json" in note]) == 2
    assert recovery.timeline == 3


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_without_the_record_of_the_run(how: str, run_folder: Path) -> None:
    train_on(run_folder, until=2)
    path = run_folder / "run.json"
    run_id = json.loads(path.read_bytes())["run"]
    path.unlink() if how == "missing" else flip(path, 20)
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (2, 2)
    if how == "damaged":
        assert any("run.json" in note for note in recovery.notes)
    assert {
        base.manifest.markers[0].run for base in inventory_of(run_folder).bases if base.manifest
    } == {run_id}


def test_a_base_of_another_run_is_refused(tmp_path: Path) -> None:
    """Copied in by hand: every digest is right, it just is not this training."""
    train_on(tmp_path / "a", until=1)
    train_on(tmp_path / "b", until=2, value=50)
    shutil.copytree(base_folder(tmp_path / "b", 2), base_folder(tmp_path / "a", 2))
    recovery, value = look(tmp_path / "a")
    assert (recovery.step, value) == (1, 1)
    assert "belongs to another run" in recovery.skipped[0].reason


def test_a_base_under_another_name_is_refused(run_folder: Path) -> None:
    train_on(run_folder, until=2)
    base_folder(run_folder, 2).rename(base_folder(run_folder, 9))
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (1, 1)


def test_a_shard_of_another_base_is_refused(run_folder: Path) -> None:
    train_on(run_folder, until=2)
    shutil.copy(shard(run_folder, 1), shard(run_folder, 2))
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (1, 1)


def test_files_that_are_not_what_the_manifest_of_more_ranks_says_are_refused(
    run_folder: Path,
) -> None:
    train_on(run_folder, until=1)
    folder = base_folder(run_folder, 1)
    marker = Marker.decode((folder / "rank-00000.done").read_bytes(), PurePath("x"))
    two = replace(marker, world=2)
    files = tuple(replace(f, name="rank-00001.safetensors") for f in marker.files)
    shutil.copy(folder / "rank-00000.safetensors", folder / "rank-00001.safetensors")
    manifest = Manifest((two, replace(two, rank=1, files=files)))
    (folder / "manifest.json").write_bytes(manifest.encode())
    with pytest.raises(RecoveryError, match="belongs to another base"):
        look(run_folder)


@pytest.mark.parametrize("where", ["run.json", "timeline.json", "manifest.json"])
def test_a_run_of_a_newer_everstep_is_left_alone(where: str, run_folder: Path) -> None:
    train_on(run_folder, until=1)
    (path,) = run_folder.rglob(where)
    text = path.read_text().replace('"format": 1', '"format": 2')
    fields = {key: value for key, value in json.loads(text).items() if key != "digest"}
    path.write_bytes(_encode(fields["kind"], {k: v for k, v in fields.items() if k != "kind"}))
    before = sorted(run_folder.rglob("*"))
    with pytest.raises(NewerFormatError, match="written in format 2"):
        look(run_folder)
    assert sorted(run_folder.rglob("*")) == before


# Half-read bases.


def test_what_a_damaged_base_overwrote_is_made_good_by_the_older_one(run_folder: Path) -> None:
    """The damage is at the end: everything before it had been read into live memory by then."""
    train_on(run_folder, until=2)
    path = shard(run_folder, 2)
    flip(path, path.stat().st_size - 1)
    recovery, value = look(run_folder)
    assert (recovery.step, value) == (1, 1)


def test_damage_in_objects_is_found_before_anything_is_touched(run_folder: Path) -> None:
    train_on(run_folder, until=1)
    path = shard(run_folder, 1)
    flip(path, path.stat().st_size - 1)
    state = {"n": -1, "t": torch.full((BIG,), -1.0)}
    with opened(run_folder, state) as ckpt:
        with pytest.raises(RecoveryError):
            ckpt.resume()
        assert (state["t"] == -1).all()  # type: ignore[attr-defined]
        with pytest.raises(StateError, match="not called"):
            ckpt.step()  # it is whole; but there is a run to be resumed


def model_run(run: Path) -> None:
    """Base 1 holds ``a`` alone, base 2 ``a`` and ``b``."""
    with opened(run, {"a": torch.full((BIG,), 1.0)}) as ckpt:
        ckpt.step()
        ckpt.save()
    state = {"a": torch.zeros(BIG), "b": torch.full((BIG,), 2.0)}
    with opened(run, state) as ckpt:
        ckpt.resume(strict=False)
        ckpt.step()
        ckpt.save()


def test_half_read_and_then_left_out_is_refused(run_folder: Path) -> None:
    """The damaged base wrote into ``b``, the older one does not have it: nobody's value."""
    model_run(run_folder)
    flip(shard(run_folder, 2, timeline=2), 4096 + 4 * BIG + 8)
    state = {"a": torch.zeros(BIG), "b": torch.zeros(BIG)}
    with opened(run_folder, state) as ckpt:
        with pytest.raises(RecoveryError, match="half-way"):
            ckpt.resume(strict=False)
        with pytest.raises(StateError, match="partly overwritten"):
            ckpt.step()


def test_a_base_of_another_model_stops_the_search(run_folder: Path) -> None:
    """An older base that would fit is not what the user means without saying so."""
    model_run(run_folder)
    with opened(run_folder, {"a": torch.zeros(BIG)}) as ckpt, pytest.raises(MismatchError):
        ckpt.resume()


# Exactness is inherited.


def test_what_descends_from_an_inexact_state_is_inexact(run_folder: Path) -> None:
    model_run(run_folder)  # base 2 was saved after a resume that left something out
    inventory = inventory_of(run_folder)
    exact = {base.id: base.manifest.markers[0].exact for base in inventory.bases if base.manifest}
    assert exact == {BaseId(1, 1): True, BaseId(2, 2): False}
    state = {"a": torch.zeros(BIG), "b": torch.zeros(BIG)}
    for _ in range(2):
        with opened(run_folder, state, keep=9) as ckpt:
            recovery = ckpt.resume()
            assert not recovery.exact
            assert recovery.mismatched == ()
            ckpt.step()
            ckpt.save()
    assert not [r for n, r in inventory_of(run_folder).timelines.items() if r and n > 1 and r.exact]
    with opened(run_folder, {"a": torch.zeros(BIG)}) as ckpt:
        assert ckpt.resume(step=1).exact


def test_generators_that_are_not_here_make_it_inexact(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.state.values.generators import RngStates

    now = RngStates.now

    def with_cuda() -> RngStates:
        return now()._replace(cuda=[torch.zeros(16, dtype=torch.uint8)] * 2)

    with monkeypatch.context() as patched:
        patched.setattr(RngStates, "now", with_cuda)
        with opened(run_folder, {"n": 1}) as ckpt:
            ckpt.save()
    if torch.cuda.device_count():
        pytest.skip("there are CUDA devices here")
    with opened(run_folder, {"n": 0}) as ckpt:
        recovery = ckpt.resume()
    assert recovery.notes == ("RNG of 2 CUDA device(s) that this machine does not have",)
    assert not recovery.exact


# Retention and cleaning, as seen from outside.


def test_so_many_are_kept(run_folder: Path) -> None:
    state = {"n": 0}
    with opened(run_folder, state, keep=2) as ckpt:
        for _ in range(5):
            ckpt.step()
            ckpt.save()
    assert [base.id.step for base in inventory_of(run_folder).bases] == [4, 5]


def test_abandoned_branches_go_as_new_bases_come(run_folder: Path) -> None:
    train_on(run_folder, until=4)
    state = {"n": -1, "t": torch.zeros(BIG)}
    with opened(run_folder, state, keep=2) as ckpt:
        ckpt.resume(step=1)
        ids = []
        for _ in range(3):
            ckpt.step()
            ckpt.save()
            ids.append([tuple(map(int, str_id(b.id))) for b in inventory_of(run_folder).bases])
    assert ids == [[(1, 1), (2, 2)], [(2, 2), (2, 3)], [(2, 3), (2, 4)]]


def str_id(base: BaseId) -> tuple[int, int]:
    return base.timeline, base.step


def test_a_new_base_that_is_damaged_deletes_nothing(run_folder: Path) -> None:
    """Read back before anything older goes: the bytes on disk count, not what was written."""
    fs, state = HookedFileSystem(), {"t": torch.ones(BIG)}
    told: list[Any] = []

    def damage(op: str, path: PurePath) -> None:
        if op == "sync_dir" and Path(path, "manifest.json").exists() and "0003" in path.name:
            flip(Path(path, "rank-00000.safetensors"), 4096 + 100)
            fs.hook = lambda op, path: None

    with opened(run_folder, state, fs=fs, keep=1, on_failure=told.append) as ckpt:
        for number in range(1, 4):
            fs.hook = damage if number == 3 else fs.hook
            ckpt.step()
            ckpt.save()
        assert "is damaged when read back" in str(told[0])
        assert told[0].entry == "t"
        assert [base.id.step for base in inventory_of(run_folder).bases] == [2]
        ckpt.step()
        ckpt.save()
    assert [base.id.step for base in inventory_of(run_folder).bases] == [4]


def test_a_base_that_cannot_be_read_back_is_not_called_damaged(run_folder: Path) -> None:
    """An error of the moment: nothing is deleted, and the next time all is well."""
    fs, told = HookedFileSystem(), list[Any]()
    with opened(run_folder, {"t": torch.ones(BIG)}, fs=fs, keep=1, on_failure=told.append) as ckpt:
        for number in range(1, 5):
            if number == 3:
                error = OSError(5, "Input/output error")
                fs.hook = raising(error, "open", "*000000000003/rank-00000.safetensors")
            ckpt.step()
            ckpt.save()
            if number == 3:
                assert "could not be read back" in str(told[0])
                assert [base.id.step for base in inventory_of(run_folder).bases] == [2, 3]
    assert len(told) == 1
    assert [base.id.step for base in inventory_of(run_folder).bases] == [4]


def test_leftovers_of_a_crash_are_removed(run_folder: Path) -> None:
    train_on(run_folder, until=1)
    for path in (
        base_folder(run_folder, 2) / "rank-00000.safetensors.tmp",
        base_folder(run_folder, 1) / "manifest.json.tmp",
        run_folder / "run.json.77-ab.tmp",
        run_folder / "timeline-00001" / "timeline.json.9-cd.tmp",
        run_folder / "timeline-00001" / "slots" / "slot-00000",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"torn")
    look(run_folder)
    assert not list(run_folder.rglob("*.tmp"))
    assert not (run_folder / "timeline-00001" / "slots").exists()
    assert not base_folder(run_folder, 2).exists()


def test_other_peoples_files_are_left_alone(run_folder: Path) -> None:
    train_on(run_folder, until=1)
    mine = [
        run_folder / "notes.txt",
        run_folder / "notes.tmp.txt",
        run_folder / "timeline-00001" / "plot.png",
        base_folder(run_folder, 1) / "README",
        base_folder(run_folder, 7) / "half" / "x",
        base_folder(run_folder, 8) / "plot.png",
        run_folder / "timeline-backup" / "timeline.json",
        run_folder / "timeline-00001" / "base" / "best" / "manifest.json",
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (base_folder(run_folder, 8) / "rank-00000.safetensors").write_text("torn")
    train_on(run_folder, until=2)
    state = {"n": -1, "t": torch.zeros(BIG)}
    with opened(run_folder, state, keep=1) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    assert all(path.read_text() == "mine" for path in mine)


def test_a_resume_that_matters_most(run_folder: Path) -> None:
    """Everything of a small training, across three resumes, is bit for bit what it was."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    expected = None
    for _ in range(3):
        with opened(run_folder, {"m": model, "o": optimizer}) as ckpt:
            ckpt.resume()
            if expected is not None:
                assert_same([model.state_dict(), optimizer.state_dict()], expected)
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.save()
            expected = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        torch.manual_seed(9)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())


def test_a_file_of_more_chunks_than_the_reader_has_is_read(run_folder: Path) -> None:
    with Checkpointer(run_folder, {"t": torch.arange(3 << 20)}, method="sync", every=None) as ckpt:
        ckpt.step()
        ckpt.save()
    (base,) = inventory_of(run_folder).bases
    ring = ChunkRing(2, 1)
    try:
        verdict = verify_base(PosixFileSystem(), base, ring, timeout_s=TIMEOUT_S, progress=silent)
    finally:
        ring.close()
    assert verdict.size_bytes > 24 << 20
    assert not verdict.damages
