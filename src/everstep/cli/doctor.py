"""``everstep doctor``: check the abilities of this machine and of a directory, with advice.

It uses the operating system directly, not the file-system seam, because it tests the real system.
It writes a few kilobytes into its own temporary folder and removes them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Literal

import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console, in_words, label, plain
from everstep.cli.common.runs import absolute, kind_of
from everstep.errors import OptionError
from everstep.seams import PosixFileSystem
from everstep.seams.machine import is_in_memory, is_on_network, mounted_as
from everstep.version import is_too_old

_PAGE_BYTES = 4096
_FREE_FAIL_BYTES = 64 << 20
_FREE_WARN_BYTES = 5 << 30
_MEMORY_FAIL_BYTES = 64 << 20
_MEMORY_WARN_BYTES = 1 << 30
_SYNC_WARN_S = 0.5

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        found: finding.
        advice: advice; empty if all is well.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def doctor(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="Directory for runs.")] = ".",
    json_output: JsonFlag = False,
) -> None:
    """Checks this machine and a directory for runs.

    Each line is ok, warn or fail, and says what to do.
    Exit status 4 if anything fails. Writes a few kilobytes into the directory and removes them.
    """
    if "://" in directory:
        hint = "a directory on this machine; copies of a run are checked by everstep verify URL"
        raise OptionError(f"{directory!r} is no directory", hint=hint)
    asked = Path(absolute(directory))
    place = _nearest_directory(asked)
    checks = [*_machine(), *_directory(place)]
    failed = any(check.verdict == "fail" for check in checks)
    if json_output:
        emit(
            {
                "ok": not failed,
                "directory": asked,
                "checked_directory": place,
                "checks": checks,
            }
        )
    else:
        _show(console(), asked, place, checks)
    raise typer.Exit(ExitCode.ENVIRONMENT if failed else ExitCode.OK)


def _nearest_directory(asked: Path) -> Path:
    """Return ``asked``, or the existing directory in which it would be made.

    Raises:
        OptionError: it can never exist, or a file is in its place.
        PermissionDeniedError, StorageError: the directory cannot be examined.
    """
    for place in (asked, *asked.parents):
        kind = kind_of(place)
        if kind == "directory":
            # The missing components may be invalid names: check each.
            for name in asked.relative_to(place).parts:
                kind_of(place / name)
            return place
        if kind is not None:
            hint = "choose a directory, or one that is not there yet"
            raise OptionError(f"{place} is no directory", path=place, hint=hint)
    raise AssertionError("the root is a directory")


# --- The machine ------------------------------------------------------------------------


def _machine() -> list[Check]:
    checks = (_platform, _torch, _cores, _memory, _locked_memory, _memfd)
    return [check() for check in checks]


def _platform() -> Check:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "win32":
        return Check("platform", "fail", found, "use Linux, or WSL 2")
    if not sys.platform.startswith("linux"):
        return Check("platform", "warn", found, "Linux is the platform; here the CPU only works")
    return Check("platform", "ok", found)


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", "fail", plain(str(error)), "install torch 2.6 or newer")
    version = str(torch.__version__)
    device = "CPU only"
    if torch.cuda.is_available():
        device = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)"
    found = f"{version}, {device}"
    if is_too_old(version):
        return Check("torch", "fail", found, "torch 2.6 or newer")
    return Check("torch", "ok", found)


def _cores() -> Check:
    from everstep.seams.processes.processes import available_cores

    cores = float(len(available_cores()))
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, int(quota) / int(period))
    found = f"{cores:g}"
    if cores < 2:
        advice = "checkpointing takes time from training; two cores or more"
        return Check("cores", "warn", found, advice)
    return Check("cores", "ok", found)


def _memory() -> Check:
    from everstep.seams.machine import memory_available_bytes

    free_bytes = memory_available_bytes()
    found = f"{in_words(free_bytes)} available"
    if free_bytes < _MEMORY_FAIL_BYTES:
        return Check("memory", "fail", found, "end other programs, or raise the container's limit")
    if free_bytes < _MEMORY_WARN_BYTES:
        advice = 'method="async" needs memory for a copy of the state; method="sync" does not'
        return Check("memory", "warn", found, advice)
    return Check("memory", "ok", found)


def _locked_memory() -> Check:
    name = "locked memory"
    try:
        import resource
    except ImportError:
        return Check(name, "warn", "unknown on this platform")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name, "ok", "no limit")
    found = f"at most {in_words(soft)} (ulimit -l)"
    import torch

    if torch.cuda.is_available():
        advice = (
            "pinned memory makes copies from a GPU fast, and more than this may be refused: "
            "ulimit -l unlimited, or for a container --ulimit memlock=-1"
        )
        return Check(name, "warn", found, advice)
    return Check(name, "ok", found + "; it limits pinned memory, which only a GPU needs")


def _memfd() -> Check:
    """Check the memory that trainer and keeper share; a sandbox may forbid it."""
    from everstep.seams.memory import PAGE_BYTES, SharedMemory

    name = "memfd_create"
    try:
        SharedMemory.create("everstep-doctor", PAGE_BYTES)
    except OSError as error:
        advice = (
            "a keeper process needs it: Linux 3.17, glibc 2.27, a sandbox (seccomp) that allows "
            "it; or KeeperOptions(process=False)"
        )
        # On Linux a start would be refused; elsewhere the keeper is a thread anyway.
        verdict: Verdict = "fail" if sys.platform == "linux" else "warn"
        return Check(name, verdict, _why("refused here", error), advice)
    return Check(name, "ok", "works")


# --- The directory ----------------------------------------------------------------------


def _directory(place: Path) -> list[Check]:
    checks = [_file_system(place), _free_space(place)]
    try:
        probe = Path(tempfile.mkdtemp(prefix=".everstep-doctor-", dir=place))
    except OSError as error:
        advice = "choose a directory that this user may write"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space (or inodes: df -i)"
        checks.append(Check("permissions", "fail", _why("cannot be written", error), advice))
        return checks
    try:
        checks.append(_permissions(place))
        checks += [_trial(name, trial, probe) for name, trial in _TRIALS.items()]
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return checks


def _trial(name: str, trial: Callable[[PurePath], Check], probe: PurePath) -> Check:
    try:
        return trial(probe)
    except OSError as error:
        advice = "look at the disk or the network file system (dmesg, df, mount)"
        return Check(name, "fail", _why("trying it failed", error), advice)


def _file_system(place: Path) -> Check:
    name = "file system"
    kind = mounted_as(place)
    if kind is None:
        return Check(name, "ok", "of unknown kind")
    if is_in_memory(kind):
        advice = "it is in memory: files are lost when the machine restarts"
        return Check(name, "warn", kind, advice)
    if is_on_network(kind) or kind.startswith("fuse"):
        return Check(name, "warn", kind, "a network file system: slower, and it may hang")
    if kind == "overlay":
        advice = "files of a container's own layer are deleted with it: mount a volume for runs"
        return Check(name, "warn", kind, advice)
    return Check(name, "ok", kind)


def _free_space(place: Path) -> Check:
    name = "free space"
    try:
        info = os.statvfs(place)
    except OSError as error:
        return Check(name, "fail", _why("unknown", error), "look at the mount")
    free_bytes = info.f_bavail * info.f_frsize
    found = f"{in_words(free_bytes)} of {in_words(info.f_blocks * info.f_frsize)}"
    if info.f_files and info.f_favail < 1000:
        return Check(name, "warn", f"{info.f_favail} inodes", "delete files: df -i")
    if free_bytes < _FREE_FAIL_BYTES:
        return Check(name, "fail", found, "free some space, or choose another directory")
    if free_bytes < _FREE_WARN_BYTES:
        advice = "a run needs space for keep + 1 bases; one base is about the size of the state"
        return Check(name, "warn", found, advice)
    return Check(name, "ok", found)


def _permissions(place: Path) -> Check:
    mode = stat.S_IMODE(place.stat().st_mode)
    found = f"writable (mode {mode:04o})"
    if (place / "run.json").exists() and mode & 0o077:
        advice = f"others may look into this run: chmod 700 {plain(str(place))}"
        return Check("permissions", "warn", found, advice)
    return Check("permissions", "ok", found)


def _direct(probe: PurePath) -> Check:
    """Write a page past the cache and read it back the same way."""
    refused = Check(
        "O_DIRECT",
        "warn",
        "refused here",
        "writes go through the page cache: slower, and they cost CPU time",
    )
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return refused
    written = mmap.mmap(-1, _PAGE_BYTES)
    read = mmap.mmap(-1, _PAGE_BYTES)
    written[:] = os.urandom(_PAGE_BYTES)
    try:
        with _opened(probe / "direct", os.O_RDWR | os.O_CREAT | os.O_EXCL | flag) as descriptor:
            os.pwrite(descriptor, written, 0)
            os.fsync(descriptor)
            got = os.preadv(descriptor, [read], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return refused
        raise
    if got != _PAGE_BYTES or written[:] != read[:]:
        advice = "do not use this file system: it does not return the data that were written"
        return Check("O_DIRECT", "fail", "a page came back changed", advice)
    return Check("O_DIRECT", "ok", "works")


def _recycling(probe: PurePath) -> Check:
    """Check that leases reveal other open files: only then may files be overwritten."""
    name = "recycling"
    filesystem = PosixFileSystem()
    path = probe / "slot"
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
        os.write(descriptor, bytes(_PAGE_BYTES))
    alone = filesystem.reuse(path)
    if alone is None:
        advice = "no leases on this file system: every base goes to fresh files, which is slower"
        return Check(name, "warn", "refused here", advice)
    alone.close()
    with _opened(path, os.O_RDONLY):
        shared = filesystem.reuse(path)
    if shared is not None:
        shared.close()
        advice = "report this, with the file system: a reader could see a base change under it"
        return Check(name, "fail", "a lease was given on a file that is open", advice)
    return Check(name, "ok", "works (write leases)")


def _sync(probe: PurePath) -> Check:
    with _opened(probe / "synced", os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
        os.write(descriptor, bytes(_PAGE_BYTES))
        start_s = time.perf_counter()
        os.fsync(descriptor)
        PosixFileSystem().sync_dir(probe)
        took_s = time.perf_counter() - start_s
    found = f"file and directory in {1000 * took_s:.1f} ms"
    if took_s > _SYNC_WARN_S:
        return Check("fsync", "warn", found, "a slow disk, or a busy one: bases take long")
    return Check("fsync", "ok", found)


def _links(probe: PurePath) -> Check:
    with _opened(probe / "first", os.O_RDWR | os.O_CREAT | os.O_EXCL):
        pass
    try:
        os.link(probe / "first", probe / "second")
    except OSError as error:
        advice = "a crash while a run is being opened may leave a torn record, which is skipped"
        return Check("hard links", "warn", _why("refused here", error), advice)
    return Check("hard links", "ok", "work")


@contextlib.contextmanager
def _opened(path: PurePath, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _why(what: str, error: OSError) -> str:
    return f"{what}: {error.strerror or error}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # not Linux, or not mounted
        return ""


_TRIALS: dict[str, Callable[[PurePath], Check]] = {
    "O_DIRECT": _direct,
    "recycling": _recycling,
    "fsync": _sync,
    "hard links": _links,
}

# --- Showing ----------------------------------------------------------------------------

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _show(out: Console, asked: Path, place: Path, checks: list[Check]) -> None:
    where = str(place) if place == asked else f"{place} (where {asked.name} would be made)"
    out.print(label(f"everstep doctor: {where}"), soft_wrap=True)
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = label(f"{check.verdict:4}", _STYLES[check.verdict])
        line.append(f"  {check.name:{width}}  {plain(check.found)}", "default")
        out.print(line)
        if check.advice:
            out.print(label(f"{'':{width + 8}}{check.advice}", "dim"))
    failed = sum(check.verdict == "fail" for check in checks)
    warned = sum(check.verdict == "warn" for check in checks)
    out.print(f"{len(checks) - failed - warned} ok, {warned} warned, {failed} failed")
