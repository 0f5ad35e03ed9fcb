"""Static entries are written once, and later bases link to the file (``adr/050``): each base stays
whole in its own folder, and nothing is linked to but what has the same bytes."""

from __future__ import annotations

import errno
import functools
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import safetensors
import torch
from torch import nn

import everstep
import everstep.tiers.durable_files
from everstep.errors import AuditError, DamageError
from everstep.format.names import SLOTS_DIR
from everstep.format.reader import read_header
from everstep.keeper.persist.shard_writer import StaticFiles
from everstep.run.open_base import check_identity
from everstep.seams import PosixFileSystem
from tests.support.command import document, invoke
from tests.support.keeper_process import finish, keepers_gone, start
from tests.support.ranks.together import on_all, rank_seams
from tests.support.world import (
    TIMEOUT_S,
    HookedFileSystem,
    base_folder,
    flip,
    forget_open_runs,
    freeze,
    inventory_of,
    opened,
    verdict_of,
)

STATIC = ["model/0.*"]
MAIN, APART = "rank-00000.safetensors", "rank-00000-00001.safetensors"
APART_1 = "rank-00001-00001.safetensors"
FROZEN_BYTES = 64 * 500 * 4 + 500 * 4


class World:
    """A frozen layer, as of a pretrained model, and a small one that is trained."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 500), nn.Tanh(), nn.Linear(500, 2))
        self.frozen = self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model[2].parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self, ckpt: everstep.Checkpointer) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 64)).square().mean().backward()
        self.optimizer.step()
        ckpt.step()

    def base(self, ckpt: everstep.Checkpointer) -> Any:
        """A base behind one more step; returns what is in it."""
        self.step(ckpt)
        ckpt.save()
        ckpt.wait()
        return self.snapshot()

    def snapshot(self) -> Any:
        return freeze({"m": self.model.state_dict(), "o": self.optimizer.state_dict()})


def restored(run: Path, step: int | None = None, **options: Any) -> Any:
    world = World(seed=99)
    with opened(run, world.state, **options) as ckpt:
        recovery = ckpt.resume(step)
        assert recovery.exact
        assert not recovery.skipped
    return world.snapshot()


def file_of(run: Path, step: int, name: str = APART, timeline: int = 1) -> int:
    return (base_folder(run, step, timeline) / name).stat().st_ino


def all_good(run: Path) -> bool:
    return all(not verdict_of(base).damages for base in inventory_of(run).bases)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "async", "lazy", "checkfreq", "logged", "checkflow"])
def test_they_are_written_once(method: str, run_folder: Path) -> None:
    world = World()
    options: dict[str, Any] = {"method": method, "keeper": everstep.KeeperOptions(process=False)}
    if method == "checkflow":
        del options["keeper"]
    with opened(run_folder, world.state, static=STATIC, **options) as ckpt:
        wanted = {step: world.base(ckpt) for step in (1, 2, 3)}
        stats = ckpt.stats()
    (file,) = {file_of(run_folder, step) for step in wanted}
    for step in wanted:
        folder = base_folder(run_folder, step)
        assert (folder / APART).stat().st_ino == file
        assert (folder / APART).stat().st_nlink == len(wanted)
        assert (folder / MAIN).stat().st_size < FROZEN_BYTES
    size_bytes = (base_folder(run_folder, 1) / APART).stat().st_size
    assert stats.linked_bytes == 2 * size_bytes
    assert size_bytes < stats.written_bytes < 2 * size_bytes + 3 * 14_000
    assert all_good(run_folder)
    for step, snapshot in wanted.items():
        assert restored(run_folder, step) == snapshot


def test_a_state_without_them_has_one_file(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state) as ckpt:
        world.base(ckpt)
        world.base(ckpt)
    names = sorted(path.name for path in base_folder(run_folder, 2).iterdir())
    assert names == ["manifest.json", "rank-00000.done", MAIN]
    assert file_of(run_folder, 1, MAIN) != file_of(run_folder, 2, MAIN)


def test_a_state_of_nothing_else(run_folder: Path) -> None:
    model = nn.Linear(30, 30).requires_grad_(False)
    wanted = freeze(model.state_dict())
    with opened(run_folder, {"model": model}, static=["model/*"]) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.save()
    assert file_of(run_folder, 1) == file_of(run_folder, 2)
    other = nn.Linear(30, 30)
    with opened(run_folder, {"model": other}) as ckpt:
        assert ckpt.resume().step == 2
    assert freeze(other.state_dict()) == wanted


def test_each_base_is_whole_in_its_folder(run_folder: Path, tmp_path: Path) -> None:
    """Copied without links, read with safetensors, and when the first base is long gone."""
    world = World()
    with opened(run_folder, world.state, static=STATIC, keep=1) as ckpt:
        for _ in range(3):
            last = world.base(ckpt)
    (base,) = inventory_of(run_folder).bases
    assert base.id.step == 3
    assert (base.path / APART).stat().st_nlink == 1
    assert not verdict_of(base).damages
    with safetensors.safe_open(base.path / APART, "pt") as file:
        assert torch.equal(file.get_tensor("model/0.weight"), world.frozen.weight)
    shutil.copytree(run_folder, tmp_path / "copy")
    assert restored(tmp_path / "copy") == restored(run_folder) == last


def test_files_with_several_names_are_not_recycled(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everstep.tiers.durable_files, "_WORTH_BYTES", 1)
    world, fs = World(), HookedFileSystem()
    with opened(run_folder, world.state, static=STATIC, keep=1, fs=fs) as ckpt:
        for _ in range(5):
            last = world.base(ckpt)
            assert all_good(run_folder)
        parked = [path for op, path in fs.seen if op == "rename" and path.parent.name == SLOTS_DIR]
        assert len(parked) == 4  # of each base that was deleted the other file
    assert restored(run_folder) == last


def test_the_next_process_links_to_what_it_finds(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state, static=STATIC) as ckpt:
        world.base(ckpt)
    again = World(seed=8)
    with opened(run_folder, again.state, static=STATIC) as ckpt:
        assert ckpt.resume().step == 1
        wanted = again.base(ckpt)
    assert file_of(run_folder, 2, timeline=2) == file_of(run_folder, 1)
    assert restored(run_folder) == wanted


def test_of_another_program(run_folder: Path) -> None:
    """One that does not say static= any more, one that does again, and one that says it of more."""
    snapshots: list[Any] = []
    for number, static in enumerate((STATIC, (), STATIC, ["model/0.weight"]), 1):
        world = World(seed=number)
        with opened(run_folder, world.state, static=static, keep=9) as ckpt:
            assert ckpt.resume().step == number - 1
            if snapshots:
                assert world.snapshot() == snapshots[-1]
            snapshots.append(world.base(ckpt))
    assert not (base_folder(run_folder, 2, 2) / APART).exists()
    assert file_of(run_folder, 3, timeline=3) == file_of(run_folder, 1)
    assert file_of(run_folder, 4, timeline=4) != file_of(run_folder, 1)  # another layout
    assert all_good(run_folder)
    for step, snapshot in enumerate(snapshots, 1):
        assert restored(run_folder, step) == snapshot


# --- What is not linked to --------------------------------------------------------------


def test_a_change_is_refused_and_what_was_there_stays(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state, method="lazy", static=STATIC, on_failure="warn") as ckpt:
        first, before = world.base(ckpt), world.frozen.bias.clone()
        with torch.no_grad():
            world.frozen.bias[17] += 1
        world.step(ckpt)
        error = ckpt.save().durable.exception(TIMEOUT_S)
        assert isinstance(error, AuditError)
        assert "'model/0.bias' was declared static but has changed" in str(error)
        with pytest.warns(RuntimeWarning):
            ckpt.wait()
        with torch.no_grad():
            world.frozen.bias.copy_(before)
        third = world.base(ckpt)
    assert [base.id.step for base in inventory_of(run_folder).bases] == [1, 3]
    assert file_of(run_folder, 1) == file_of(run_folder, 3)
    assert restored(run_folder, 1) == first
    assert restored(run_folder, 3) == third


def test_a_change_that_no_audit_looks_for_is_in_the_base(run_folder: Path) -> None:
    """Where all is copied at the mark nobody compares bases: what counts is what was there."""
    world = World()
    with opened(run_folder, world.state, static=STATIC) as ckpt:
        first = world.base(ckpt)
        with torch.no_grad():
            world.frozen.weight[3, 3] += 1
        second = world.base(ckpt)
        third = world.base(ckpt)
    assert file_of(run_folder, 1) != file_of(run_folder, 2) == file_of(run_folder, 3)
    for step, wanted in enumerate((first, second, third), 1):
        assert restored(run_folder, step) == wanted


def test_damage_is_named(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state, static=STATIC) as ckpt:
        for _ in range(2):
            world.base(ckpt)
    path = base_folder(run_folder, 2) / APART
    flip(path, path.stat().st_size - 1)
    other = World(seed=7)
    with (
        opened(run_folder, other.state, static=STATIC) as ckpt,
        pytest.raises(everstep.errors.RecoveryError, match=f"{APART}.*model/0.bias"),
    ):
        ckpt.resume()


def test_what_is_damaged_is_not_linked_to(run_folder: Path) -> None:
    """By a process that has read it whole once, and finds it damaged when it reads it back."""
    world = World()
    with opened(run_folder, world.state, static=STATIC, keep=1, on_failure="warn") as ckpt:
        world.base(ckpt)
        path = base_folder(run_folder, 1) / APART
        flip(path, path.stat().st_size - 1)
        with pytest.warns(RuntimeWarning, match=r"is damaged when read back.*model/0\.bias"):
            world.base(ckpt)
        wanted = world.base(ckpt)
    (base,) = inventory_of(run_folder).bases  # the damaged ones may go now
    assert base.id.step == 3
    assert not verdict_of(base).damages
    assert restored(run_folder) == wanted


def test_what_another_process_wrote_is_read_before(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was restored may have been a copy of it."""
    world = World()
    with opened(run_folder, world.state, static=STATIC) as ckpt:
        world.base(ckpt)
    again = World(seed=8)
    with opened(run_folder, again.state, static=STATIC) as ckpt:
        ckpt.resume()
        path = base_folder(run_folder, 1) / APART
        flip(path, path.stat().st_size - 1)
        with caplog.at_level(logging.WARNING):
            wanted = again.base(ckpt)
    assert "entry 'model/0.bias' is damaged" in caplog.text
    assert file_of(run_folder, 2, timeline=2) != file_of(run_folder, 1)
    assert restored(run_folder) == wanted


def refuses_links(op: str, path: PurePath, code: int = errno.EPERM) -> None:
    if op == "link" and ".safetensors" in path.name:
        raise OSError(code, "no hard links here")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_links(
    code: int, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    fs = HookedFileSystem(functools.partial(refuses_links, code=code))
    with (
        caplog.at_level(logging.WARNING),
        opened(run_folder, world.state, static=STATIC, fs=fs) as ckpt,
    ):
        wanted = [world.base(ckpt) for _ in range(3)]
        assert ckpt.stats().linked_bytes == 0
    assert len({file_of(run_folder, step) for step in (1, 2, 3)}) == 3
    assert caplog.text.count("refuses hard links") == 1
    assert all_good(run_folder)
    for step, snapshot in enumerate(wanted, 1):
        assert restored(run_folder, step) == snapshot


def test_another_file_in_the_place_of_what_is_linked_to(run_folder: Path) -> None:
    """It is looked at under its new name, when nobody can exchange it any more."""
    world = World()
    first = base_folder(run_folder, 1) / APART

    def exchange(op: str, path: PurePath) -> None:
        if op == "link" and path.name.startswith(APART):
            first.unlink()
            first.write_bytes(b"something else")

    fs = HookedFileSystem(exchange)
    with opened(run_folder, world.state, static=STATIC, fs=fs) as ckpt:
        world.base(ckpt)
        wanted = world.base(ckpt)
    (good,) = (base for base in inventory_of(run_folder).bases if base.id.step == 2)
    assert not verdict_of(good).damages
    names = sorted(path.name for path in good.path.iterdir())
    assert names == ["manifest.json", APART, "rank-00000.done", MAIN]
    assert restored(run_folder) == wanted


def test_a_save_that_failed_is_taken_again(run_folder: Path) -> None:
    """With its files there already: linked to the file that has both names."""
    world = World()
    fs = HookedFileSystem()
    with opened(run_folder, world.state, static=STATIC, fs=fs) as ckpt:
        world.base(ckpt)
        world.step(ckpt)

        def fails(op: str, path: PurePath) -> None:
            if op == "create" and path.name.startswith("rank-00000.done"):
                fs.hook = lambda op, path: None
                raise OSError(errno.EIO, "no")

        fs.hook = fails
        with pytest.raises(everstep.errors.StorageError):
            ckpt.save()
        assert not base_folder(run_folder, 2).exists()
        wanted = world.snapshot()
        ckpt.save()
    assert file_of(run_folder, 1) == file_of(run_folder, 2)
    assert restored(run_folder) == wanted


def test_a_file_that_has_the_name_already(run_folder: Path) -> None:
    """As a keeper leaves it that is killed before the marker: to rename one name of a file to
    another one of it does nothing."""
    world, folder, names = World(), base_folder(run_folder, 2), list[str]()

    def look(op: str, path: PurePath) -> None:
        if op == "create" and path.name.startswith("rank-00000.done") and path.parent == folder:
            names.extend(sorted(found.name for found in folder.iterdir()))

    fs = HookedFileSystem(look)
    with opened(run_folder, world.state, static=STATIC, fs=fs) as ckpt:
        world.base(ckpt)
        folder.mkdir()
        (folder / APART).hardlink_to(base_folder(run_folder, 1) / APART)
        wanted = world.base(ckpt)
    assert names == [APART, MAIN]
    assert file_of(run_folder, 1) == file_of(run_folder, 2)
    assert restored(run_folder) == wanted


def test_only_a_static_file_may_be_of_another_base(run_folder: Path) -> None:
    world, fs = World(), PosixFileSystem()
    with opened(run_folder, world.state, static=STATIC) as ckpt:
        for _ in range(2):
            world.base(ckpt)
    found = {base.id.step: base for base in inventory_of(run_folder).bases}
    one, two = found[1].manifest, found[2].manifest
    assert one is not None
    assert two is not None
    headers = []
    for record in one.markers[0].files:
        path = found[1].path / record.name
        file = fs.open(path)
        headers.append(read_header(file, record, path))
        file.close()
    main, static = headers
    with pytest.raises(DamageError, match="belongs to another base"):
        check_identity(main, two.markers[0], found[1].path / MAIN)
    taken = check_identity(static, two.markers[0], found[1].path / APART)
    assert (static.identity.step, taken.identity.step) == (1, 2)
    assert {place.entry.lsn for place in taken.placed} == {two.markers[0].lsn}
    others = {"run": "another", "rank": 1, "world": 2}
    for field, value in others.items():
        header = replace(static, identity=replace(static.identity, **{field: value}))
        with pytest.raises(DamageError, match="belongs to another base"):
            check_identity(header, two.markers[0], found[1].path / APART)


# --- Several ranks, processes, the command ----------------------------------------------


def rank_job(
    run: Path,
    steps: int,
    at: int = 0,
    *,
    keep: int = 9,
    before: Callable[[int, int], None] = lambda rank, step: None,
) -> list[Any]:
    """Two ranks with a model each go on from step ``at``; returns what each ends with."""

    def train(rank: int, seams: Any) -> Any:
        world = World(seed=50 if at else rank)
        with everstep.Checkpointer(
            run,
            world.state,
            seams=seams,
            static=STATIC,
            method="sync",
            every=None,
            keeper=everstep.KeeperOptions(process=False),
            keep=keep,
            on_failure="warn",
        ) as ckpt:
            forget_open_runs()
            assert ckpt.resume().step == at
            for step in range(at + 1, at + steps + 1):
                before(rank, step)
                for parameter in world.model[2].parameters():
                    parameter.grad = torch.full_like(parameter, 1.0 + rank)
                world.optimizer.step()
                ckpt.step()
                ckpt.save()
                ckpt.wait()
            return world.snapshot()

    seams = rank_seams(2)
    return on_all(*(functools.partial(train, rank, seams[rank]) for rank in range(2)))


def test_each_rank_has_its_own(run_folder: Path) -> None:
    rank_job(run_folder, 2)
    ended = rank_job(run_folder, 1, at=2)
    for name in (APART, APART_1):
        found = {file_of(run_folder, step, name) for step in (1, 2)}
        assert found == {file_of(run_folder, 3, name, timeline=2)}
    assert file_of(run_folder, 1) != file_of(run_folder, 1, APART_1)
    assert all_good(run_folder)
    assert rank_job(run_folder, 0, at=3) == ended


def test_a_rank_does_not_link_to_what_is_damaged(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten, forget = threading.Event(), StaticFiles.forget

    def told(files: StaticFiles) -> None:
        forget(files)
        forgotten.set()

    monkeypatch.setattr(StaticFiles, "forget", told)

    def damage(rank: int, step: int) -> None:
        if (rank, step) == (0, 2):
            path = base_folder(run_folder, 1) / APART_1
            flip(path, path.stat().st_size - 1)
        if step == 3:
            assert forgotten.wait(TIMEOUT_S)

    with pytest.warns(RuntimeWarning, match=f"is damaged when read back.*{APART_1}"):
        rank_job(run_folder, 3, keep=1, before=damage)
    newest = max(inventory_of(run_folder).bases, key=lambda base: base.id)
    assert newest.id.step == 3
    assert not verdict_of(newest).damages


PROCESS = """
os.environ.pop("EVERSTEP_FAILPOINTS", None)
frozen = torch.nn.Linear(300, 300).requires_grad_(False)
state["frozen"] = frozen

def digest():
    h = hashlib.sha256()
    for module in (model, frozen):
        for t in module.state_dict().values():
            h.update(t.numpy().tobytes())
    for p in model.parameters():
        for t in optimizer.state.get(p, {}).values():
            h.update(t.numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()

ckpt = everstep.Checkpointer(run, state, method="logged", every=3, static=["frozen/*"])
recovery = ckpt.resume()
say(step=recovery.step, exact=recovery.exact, digest=digest())
for step in range(recovery.step + 1, 11):
    train_step()
    ckpt.step()
    say(at=step, digest=digest())
ckpt.close()
"""


def test_killed_and_resumed(tmp_path: Path) -> None:
    status, said, err = finish(start(tmp_path / "alone", PROCESS))
    assert status == 0, err
    undisturbed = {one["at"]: one["digest"] for one in said if "at" in one}
    run = tmp_path / "run"
    status, said, err = finish(start(run, PROCESS, EVERSTEP_FAILPOINTS="log.after_record=kill:15"))
    assert status == -9, err
    status, said, err = finish(start(run, PROCESS))
    assert status == 0, err
    assert said[0]["step"] > 0
    assert said[0]["exact"], err
    assert said[0]["digest"] == undisturbed[said[0]["step"]]
    assert said[-1]["digest"] == undisturbed[10]
    keepers_gone()
    bases = inventory_of(run).bases
    assert len(bases) > 1
    assert len({(base.path / APART).stat().st_ino for base in bases}) == 1
    assert all_good(run)


def test_the_command_counts_them_once(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state, static=STATIC) as ckpt:
        for _ in range(3):
            world.base(ckpt)
    size_bytes = (base_folder(run_folder, 1) / APART).stat().st_size
    files = {path.stat().st_ino: path.stat() for path in run_folder.rglob("*") if path.is_file()}
    found = document("du", run_folder)
    assert found["size_bytes"] == sum(file.st_size for file in files.values())
    assert found["allocated_bytes"] == sum(file.st_blocks * 512 for file in files.values())
    assert [base["files"] for base in found["timelines"][0]["bases"]] == [4, 4, 4]
    assert f"{3 * size_bytes / 1024:.1f} KiB" not in invoke("ls", run_folder).stdout
    gone = document("rm", run_folder, "--step", "1")
    assert gone["kept_bytes"] == size_bytes
    assert all_good(run_folder)
    assert [base.id.step for base in inventory_of(run_folder).bases] == [2, 3]
