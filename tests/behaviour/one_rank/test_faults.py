"""Disks that are full, broken, slow or gone; interrupted saves; and what is left of them."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep.capture import lane as lane_module
from everstep.errors import (
    DeadlineError,
    EverstepError,
    ForeignDirectoryError,
    OutOfSpaceError,
    PermissionDeniedError,
    StateError,
    StorageError,
)
from everstep.seams import ManualClock, Seams
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from everstep.trainer.base import saver as saver_module
from everstep.trainer.base.prepared_base import PreparedBase
from tests.support.world import (
    TIMEOUT_S,
    Gate,
    HookedFileSystem,
    assert_same,
    base_folder,
    forget,
    inventory_of,
    no_space,
    opened,
    raising,
    verdict_of,
)


def leftovers(run: Path) -> list[str]:
    return [str(path) for path in run.rglob("*.tmp")]


def save_and_wait(ckpt: everstep.Checkpointer) -> None:
    ckpt.save()
    ckpt.wait()


def until_written(ckpt: everstep.Checkpointer) -> None:
    """All bases that were taken are durable or have failed, and that was reported; nobody has been
    told yet."""
    keeper, waited = inspect(ckpt).keeper, threading.Event()
    assert isinstance(keeper, ThreadKeeper)
    deadline_s = time.monotonic() + TIMEOUT_S
    while keeper.waiting:
        assert time.monotonic() < deadline_s
        waited.wait(0.005)


def step_and_wait(ckpt: everstep.Checkpointer) -> None:
    ckpt.step()
    ckpt.wait()


def check_usable(run: Path, state: dict[str, Any], step: int) -> None:
    """The run resumes at ``step``, with the value of that step, and every base is whole."""
    assert not leftovers(run)
    for base in inventory_of(run).bases:
        assert base.status == "committed"
        assert not verdict_of(base).damages
    live: dict[str, Any] = dict.fromkeys(state)
    with opened(run, live) as ckpt:
        assert ckpt.resume().step == step
    assert_same(live, state)


# Every kind of operation of a save, as (operation, path); of several the first and the last.
SAVE_OPERATIONS = [
    ("scan", "*/run", 1),
    ("free_bytes", "*", 1),
    ("make_dir", "*/base/*", 1),
    ("create", "*.safetensors.tmp", 1),
    ("write", "*.safetensors.tmp", 1),
    ("write", "*.safetensors.tmp", 2),
    ("truncate", "*.safetensors.tmp", 1),
    ("sync", "*.safetensors.tmp", 1),
    ("sync", "*.safetensors.tmp", 2),
    ("rename", "*.safetensors", 1),
    ("sync_dir", "*/base/*", 1),
    ("create", "*.done.tmp", 1),
    ("write", "*.done.tmp", 1),
    ("sync", "*.done.tmp", 1),
    ("rename", "*.done", 1),
    ("create", "*/manifest.json.tmp", 1),
    ("write", "*/manifest.json.tmp", 1),
    ("sync", "*/manifest.json.tmp", 1),
    ("rename", "*/manifest.json", 1),
]
IDS = [f"{op} {path} {nth}" for op, path, nth in SAVE_OPERATIONS]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "async"])
@pytest.mark.parametrize(("op", "path", "nth"), SAVE_OPERATIONS, ids=IDS)
def test_a_full_disk_at_any_moment(
    op: str, path: str, nth: int, method: str, run_folder: Path
) -> None:
    """The base is lost and said to be; nothing of it is left; the next one works."""
    fs, state = HookedFileSystem(), {"t": torch.zeros(2000), "n": [0]}
    with opened(run_folder, state, fs=fs, method=method) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        state["n"][0] = 2
        ckpt.step()
        fs.hook = raising(no_space(), op, path, nth=nth)
        with pytest.raises(OutOfSpaceError) as error:
            save_and_wait(ckpt)
        assert error.value.step in (2, None)
        assert "free some space" in str(error.value)
        assert not leftovers(run_folder)
        assert not base_folder(run_folder, 2).exists()
        assert ckpt.stats().failed == 1
        assert ckpt.stats().durable_step == 1
        assert state["n"] == [2]
        assert ckpt.save().durable.result(TIMEOUT_S) > 0  # the same step again
    check_usable(run_folder, state, 2)


@pytest.mark.parametrize("then", ["retry", "give up"])
def test_an_error_after_the_commit_harms_nothing(then: str, run_folder: Path) -> None:
    """The manifest was there, its directory could not be synced: the base is as good as it was,
    and saving the step again does not write over it."""
    fs, state = HookedFileSystem(), {"n": 1}

    def fail_after_manifest(op: str, path: PurePath) -> None:
        if op == "sync_dir" and Path(path, "manifest.json").exists():
            raise OSError(errno.EIO, "Input/output error")

    with opened(run_folder, state, fs=fs) as ckpt:
        ckpt.step()
        fs.hook = fail_after_manifest
        with pytest.raises(StorageError):
            ckpt.save()
        state["n"] = 2
        fs.hook = raising(no_space(), "write", "*.done.tmp")
        if then == "retry":
            ckpt.save().durable.result(TIMEOUT_S)
    check_usable(run_folder, {"n": 1}, 1)


@pytest.mark.parametrize("method", ["sync", "async"])
def test_retention_that_fails_keeps_the_base(method: str, run_folder: Path) -> None:
    fs, state = HookedFileSystem(), {"n": [0]}
    with opened(run_folder, state, fs=fs, method=method, keep=1) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        state["n"][0] = 2
        ckpt.step()
        fs.hook = raising(OSError(errno.EIO, "Input/output error"), "unlink", "*/000000000001/*")
        with pytest.raises(StorageError, match="could not clean up"):
            save_and_wait(ckpt)
        assert ckpt.stats().durable_step == 2
        state["n"][0] = 3
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        state["n"][0] = 4
        ckpt.step()
        ckpt.save()
    check_usable(run_folder, state, 4)
    assert len(inventory_of(run_folder).bases) == 1


@pytest.mark.parametrize("method", ["sync", "async"])
def test_warnings_instead_of_errors(method: str, run_folder: Path) -> None:
    fs = HookedFileSystem()
    with opened(run_folder, {"n": 1}, fs=fs, method=method, on_failure="warn", every=1) as ckpt:
        fs.hook = raising(no_space(), "write", "*.safetensors.tmp")
        with pytest.warns(RuntimeWarning, match="could not write the base"):
            step_and_wait(ckpt)
        step_and_wait(ckpt)
        assert (ckpt.stats().committed, ckpt.stats().failed) == (1, 1)


@pytest.mark.parametrize("method", ["sync", "async"])
def test_a_function_instead_of_errors(method: str, run_folder: Path) -> None:
    fs, told = HookedFileSystem(), list[EverstepError]()
    with opened(run_folder, {"n": 1}, fs=fs, method=method, on_failure=told.append) as ckpt:
        fs.hook = raising(no_space(), "write", "*.safetensors.tmp")
        ckpt.step()
        save = ckpt.save()
        ckpt.wait()
    (error,) = told
    assert isinstance(error, OutOfSpaceError)
    assert save.durable.exception(0) is error


def test_each_error_is_raised_once(run_folder: Path) -> None:
    fs = HookedFileSystem()
    with opened(run_folder, {"n": 1}, fs=fs, method="async") as ckpt:
        ckpt.step()
        fs.hook = raising(no_space(), "write", "*.safetensors.tmp")
        save = ckpt.save()
        assert isinstance(save.durable.exception(TIMEOUT_S), OutOfSpaceError)
        until_written(ckpt)  # it is reported behind that
        with pytest.raises(OutOfSpaceError):
            ckpt.step()
        ckpt.step()
        ckpt.wait()


@pytest.mark.parametrize("method", ["sync", "async"])
def test_a_step_counts_even_if_it_has_an_error_to_tell(method: str, run_folder: Path) -> None:
    """Who goes on training after it must not find every later base under the wrong step."""
    fs, state = HookedFileSystem(), {"n": [0]}
    with opened(run_folder, state, fs=fs, method=method, every=2) as ckpt:
        fs.hook = raising(no_space(), "write", "*.safetensors.tmp")
        errors = 0
        for number in range(1, 7):
            state["n"][0] = number
            try:
                step_and_wait(ckpt)
            except OutOfSpaceError:
                errors += 1
        assert errors == 1
        assert ckpt.stats().step == 6
    check_usable(run_folder, {"n": [6]}, 6)


def test_errors_do_not_hide_the_users_own(run_folder: Path) -> None:
    fs = HookedFileSystem(raising(no_space(), "write", "*.safetensors.tmp"))

    def train() -> None:
        with opened(run_folder, {"n": 1}, fs=fs, method="async") as ckpt:
            ckpt.step()
            ckpt.save()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_written(code: int, run_folder: Path) -> None:
    """Found out when the Checkpointer is made, not at the first save."""

    def refuse(op: str, path: PurePath) -> None:
        if op == "create":
            raise OSError(code, os.strerror(code))

    fs = HookedFileSystem(refuse)
    with pytest.raises(PermissionDeniedError) as error, opened(run_folder, {"n": 1}, fs=fs):
        pass
    assert str(run_folder) in str(error.value)
    assert "this user may write" in str(error.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionDeniedError), opened(tmp_path / "run", {"n": 1}):
        pass
    tmp_path.chmod(0o700)


def test_a_tilde_is_the_home_folder(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell, which does that for the command line: both must mean the same run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with opened(Path("~/runs/a"), {"n": 1}) as ckpt:
        ckpt.save()
    assert (tmp_path / "home" / "runs" / "a" / "run.json").exists()
    assert not (tmp_path / "~").exists()


def test_a_folder_of_somebody_else(run_folder: Path) -> None:
    run_folder.mkdir()
    (run_folder / "thesis.tex").write_text("precious")
    with pytest.raises(ForeignDirectoryError, match=r"thesis\.tex"), opened(run_folder, {"n": 1}):
        pass
    assert [path.name for path in run_folder.iterdir()] == ["thesis.tex"]


def test_a_file_where_the_folder_should_be(run_folder: Path) -> None:
    run_folder.write_text("precious")
    with pytest.raises(StorageError), opened(run_folder, {"n": 1}):
        pass
    with pytest.raises(StorageError), opened(run_folder / "below", {"n": 1}):
        pass
    assert run_folder.read_text() == "precious"


def test_too_little_room_is_found_before_writing(run_folder: Path) -> None:
    fs = HookedFileSystem()
    fs.free_bytes = lambda path: 10_000  # type: ignore[method-assign]
    with opened(run_folder, {"t": torch.ones(10_000)}, fs=fs) as ckpt:
        with pytest.raises(OutOfSpaceError, match="10000 are free"):
            ckpt.save()
        assert not any(op == "create" and "safetensors" in str(path) for op, path in fs.seen)
        fs.free_bytes = lambda path: 10**9  # type: ignore[method-assign]
        ckpt.save()


# Hanging storage: every wait ends, and says so.


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["raise", "warn", "call"])
@pytest.mark.parametrize("op", ["sync", "rename", "scan"])
def test_storage_that_hangs_is_reported_and_never_waited_for(
    op: str, policy: str, run_folder: Path
) -> None:
    """An operation that never returns: step() says so once, close() does not wait for ever."""
    gate, fs, clock, told = Gate(), HookedFileSystem(), ManualClock(), list[EverstepError]()
    on_failure: Any = told.append if policy == "call" else policy
    ckpt = everstep.Checkpointer(
        run_folder,
        {"n": 1},
        every=None,
        on_failure=on_failure,
        progress_timeout_s=60,
        seams=Seams(filesystem=fs, clock=clock),
    )
    ckpt.resume()
    fs.hook = raising(gate.wait_at, op, "*/run" if op == "scan" else "*.safetensors*")
    ckpt.step()
    save = ckpt.save()
    assert gate.reached.wait(TIMEOUT_S)
    clock.advance(59)
    ckpt.step()
    clock.advance(2)
    if policy == "raise":
        with pytest.raises(DeadlineError, match="no progress for 61 s") as error:
            ckpt.step()
        assert error.value.step == 1
    elif policy == "warn":
        with pytest.warns(RuntimeWarning, match="no progress for 61 s"):
            ckpt.step()
    else:
        ckpt.step()
        assert [type(error) for error in told] == [DeadlineError]
    ckpt.step()  # reported once
    ended = threading.Event()
    raised: list[BaseException] = []

    def close() -> None:
        try:
            ckpt.close()
        except EverstepError as error:
            raised.append(error)
        ended.set()

    closing = threading.Thread(target=close)
    closing.start()
    came_back = ended.wait(TIMEOUT_S / 2)
    gate.open()
    closing.join(TIMEOUT_S)
    assert came_back, "close() waits for storage that hangs"
    assert [type(error) for error in raised] == [DeadlineError]
    save.durable.result(TIMEOUT_S)  # it went through in the end


@pytest.mark.parametrize("method", ["sync", "async"])
def test_a_write_that_hangs(method: str, run_folder: Path) -> None:
    gate, fs = Gate(), HookedFileSystem()
    options: dict[str, Any] = {"method": method, "progress_timeout_s": TIMEOUT_S}
    with opened(run_folder, {"n": 1}, fs=fs, **options) as ckpt:
        ckpt.step()
        keeper = inspect(ckpt).keeper
        assert isinstance(keeper, ThreadKeeper)
        writer = keeper.committer.writer
        assert writer.timeout_s == TIMEOUT_S
        fs.hook = raising(gate.wait_at, "write", "*.safetensors.tmp")
        writer.timeout_s = 0.1
        with pytest.raises(DeadlineError, match="storage hangs"):
            save_and_wait(ckpt)
        gate.open()
        writer.timeout_s = TIMEOUT_S  # a disk that is slow is another matter
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    with opened(run_folder, {"n": 0}) as ckpt:
        assert ckpt.resume().step == 2


def test_a_read_that_hangs(run_folder: Path) -> None:
    with opened(run_folder, {"n": 1, "t": torch.ones(5000)}) as ckpt:
        ckpt.step()
        ckpt.save()
    gate, fs = Gate(), HookedFileSystem()
    real = fs.open

    class Slow:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.size_bytes = inner.size_bytes
            self.close = inner.close

        def read_into(self, buffer: memoryview, offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                gate.wait_at()
            return int(self._inner.read_into(buffer, offset))

    fs.open = lambda path, *, direct=False: Slow(real(path, direct=direct))  # type: ignore[method-assign, assignment]
    state = {"n": 0, "t": torch.zeros(5000)}
    with opened(run_folder, state, fs=fs, progress_timeout_s=TIMEOUT_S) as ckpt:
        assert inspect(ckpt).starter.timeout_s == TIMEOUT_S
        inspect(ckpt).starter.timeout_s = 0.1
        with pytest.raises(DeadlineError, match="a read took longer"):
            ckpt.resume()
        with pytest.raises(StateError, match="partly overwritten"):
            ckpt.step()
        gate.open()
        inspect(ckpt).starter.timeout_s = TIMEOUT_S  # a disk that is slow is another matter
        fs.open = real  # type: ignore[method-assign]
        assert ckpt.resume().step == 1
        ckpt.step()


# Ctrl-C.


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("op", "path", "nth"), SAVE_OPERATIONS, ids=IDS)
def test_interrupted_while_saving(op: str, path: str, nth: int, run_folder: Path) -> None:
    """No lock, no half-saved base; the next save works, of the same step or the next."""
    fs, state = HookedFileSystem(), {"t": torch.zeros(2000), "n": [1]}
    with opened(run_folder, state, fs=fs) as ckpt:
        ckpt.step()
        ckpt.save()
        state["n"][0] = 2
        ckpt.step()
        fs.hook = raising(KeyboardInterrupt(), op, path, nth=nth)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save()
        assert not leftovers(run_folder)
        assert not base_folder(run_folder, 2).exists()
        ckpt.save()
    check_usable(run_folder, state, 2)


def test_interrupted_in_retention(run_folder: Path) -> None:
    fs, state = HookedFileSystem(), {"n": [1]}
    with opened(run_folder, state, fs=fs, keep=1) as ckpt:
        for number in (1, 2):
            state["n"][0] = number
            ckpt.step()
            if number == 1:
                ckpt.save()
            else:
                fs.hook = raising(KeyboardInterrupt(), "unlink", "*/000000000001/*")
                with pytest.raises(KeyboardInterrupt):
                    ckpt.save()
                state["n"][0] = -1
                ckpt.save()  # committed already: nothing is written over it
    check_usable(run_folder, {"n": [2]}, 2)


@pytest.mark.parametrize(
    ("method", "of", "name"),
    [
        ("sync", lane_module.LiveBody, "_bytes"),
        ("async", lane_module.CpuLane, "copy_now"),
        ("lazy", PreparedBase, "copies"),
        ("lazy", saver_module, "Incoming"),
    ],
    ids=["sync", "async", "lazy, while it is planned", "lazy, before it begins"],
)
def test_interrupted_while_copying(
    method: str, of: Any, name: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times over: neither host memory nor chunks are lost."""
    state = {"t": torch.zeros(2000)}
    with opened(run_folder, state, method=method, progress_timeout_s=TIMEOUT_S) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        held = ckpt.stats().host_bytes

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        for _ in range(12):
            ckpt.step()
            with monkeypatch.context() as patched:
                patched.setattr(of, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ckpt.save()
            ckpt.wait()
            inspect(ckpt).lane.run(lambda: None).result(
                TIMEOUT_S
            )  # what it took is given back there
        assert ckpt.stats().host_bytes == held
        ckpt.save()
    check_usable(run_folder, state, 13)


def test_the_pages_of_every_copy_are_taken_before_the_first(run_folder: Path) -> None:
    """A block is whole pages: those of the second copy in flight, too."""
    state = {"t": torch.zeros(2000)}
    with opened(run_folder, state, method="async", progress_timeout_s=TIMEOUT_S) as ckpt:
        ckpt.step()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        pool = inspect(ckpt).keepers.pool
        assert pool is not None
        before = pool.touched_bytes
        size_bytes = sum(entry.size_bytes for entry in inspect(ckpt).state.survey().shape.entries)
        rooms = [pool.acquire(size_bytes, timeout_s=TIMEOUT_S) for _ in range(2)]
        assert pool.touched_bytes == before
        for room in rooms:
            pool.release(room)
        ckpt.save()


def test_interrupted_while_the_keeper_is_told(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for a base that is withdrawn."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    state = {"t": torch.zeros(2000)}
    with opened(run_folder, state, method="async", progress_timeout_s=TIMEOUT_S) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        ckpt.step()
        keeper = inspect(ckpt).keeper
        with monkeypatch.context() as patched:
            patched.setattr(keeper, "captured", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save()
            ckpt.wait(TIMEOUT_S / 4)
        ckpt.save()
    check_usable(run_folder, state, 2)


def test_interrupted_while_resuming(run_folder: Path) -> None:
    """Half-restored state is refused until a resume succeeds."""
    with opened(run_folder, {"t": torch.ones(5000)}) as ckpt:
        ckpt.step()
        ckpt.save()
    fs, state = HookedFileSystem(), {"t": torch.zeros(5000)}
    with opened(run_folder, state, fs=fs) as ckpt:
        fs.hook = raising(KeyboardInterrupt(), "link")
        with pytest.raises(KeyboardInterrupt):
            ckpt.resume()
        with pytest.raises(StateError, match="partly overwritten"):
            ckpt.save()
        fs.hook = lambda op, path: None
        assert ckpt.resume().step == 1
        ckpt.step()
        ckpt.save()


def test_a_function_that_fails_for_no_reason_of_ours(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the background is reported like any other failure, not swallowed."""
    from everstep.keeper.persist.committer import OneRankCommitter

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("a bug")

    with opened(run_folder, {"n": 1}, method="async") as ckpt:
        ckpt.step()
        monkeypatch.setattr(OneRankCommitter, "persist", broken)
        with pytest.raises(EverstepError, match=r"internal error.*a bug"):
            ckpt.save()
            ckpt.wait()
        monkeypatch.undo()
        ckpt.step()
        ckpt.save()
    check_usable(run_folder, {"n": 1}, 2)


# A notebook cell that is run again.


@pytest.mark.parametrize("method", ["sync", "async"])
def test_a_second_one_on_the_same_run_closes_the_first(method: str, run_folder: Path) -> None:
    gate, fs = Gate(), HookedFileSystem()
    first = everstep.Checkpointer(
        run_folder, {"n": 1}, method=method, every=None, seams=Seams(filesystem=fs)
    )
    first.step()
    if method == "async":
        fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
        threading.Thread(target=lambda: gate.reached.wait(TIMEOUT_S) and gate.open()).start()
    save = first.save()
    live = {"n": 0}
    with opened(run_folder, live) as second:
        assert save.durable.done()
        with pytest.raises(StateError, match="closed"):
            first.step()
        assert second.resume().step == 1
    assert live == {"n": 1}


def test_the_first_ones_error_does_not_stop_the_second(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fs = HookedFileSystem(raising(no_space(), "write", "*.safetensors.tmp"))
    first = everstep.Checkpointer(run_folder, {"n": 1}, every=None, seams=Seams(filesystem=fs))
    first.step()
    first.save().durable.exception(TIMEOUT_S)
    with opened(run_folder, {"n": 1}) as second:
        second.step()
    assert "the earlier Checkpointer" in capsys.readouterr().err


REFUSED: list[Callable[[Path], Any]] = [
    lambda run: everstep.Checkpointer(run, {"n": lambda: None}),
    lambda run: everstep.Checkpointer(run, {"n": 1}, keep=0),
]


@pytest.mark.parametrize("make", REFUSED)
def test_one_that_is_refused_leaves_the_first_alone(
    make: Callable[[Path], Any], run_folder: Path
) -> None:
    with opened(run_folder, {"n": 1}) as first:
        with pytest.raises(EverstepError):
            make(run_folder)
        first.step()
        first.save()


@pytest.mark.parametrize("at", ["rename", "unlink"])
def test_whoever_resumes_while_a_failed_base_is_cleaned_up(at: str, run_folder: Path) -> None:
    """All of it was there but the manifest. It is made whole by one, or deleted by the other."""
    state, there, failed = {"n": [0]}, list[Any](), list[PurePath]()
    marker = "*/000000000002/rank-00000.done"

    def hook(op: str, path: PurePath) -> None:
        if op == "create" and fnmatch(str(path), "*/000000000002/manifest.json.tmp"):
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        away = op == at and fnmatch(str(path), f"{marker}*")
        if away and failed and not there:
            there.append(None)
            forget(run_folder)
            there.append(everstep.Checkpointer(run_folder, {"n": [9]}, method="sync", every=None))
            there.append(there[1].resume())

    fs = HookedFileSystem(lambda op, path: None)
    with contextlib.suppress(EverstepError), opened(run_folder, state, fs=fs) as ckpt:
        ckpt.resume()
        for number in (1, 2):
            state["n"][0] = number
            ckpt.step()
            fs.hook = hook if number == 2 else fs.hook
            with contextlib.suppress(EverstepError):
                ckpt.save()
    recovery = there[2]
    assert recovery.step in (1, 2)
    there[1].close()
    check_usable(run_folder, {"n": [recovery.step]}, recovery.step)


def test_a_checkpointer_is_not_handed_to_another_process(run_folder: Path) -> None:
    """It said that some lock of it cannot be pickled."""
    with opened(run_folder, {"n": [1]}) as ckpt:
        for hand_over in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(StateError, match="cannot be pickled or copied"):
                hand_over(ckpt)
