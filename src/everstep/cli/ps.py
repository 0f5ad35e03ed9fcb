"""``everstep ps``: list the keeper processes of this user and their activity.

``everstep stop``: end them after they have made captured state durable.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import (
    LINE_CHARS_MAX,
    console,
    count_of,
    in_words,
    label,
    plain,
    say,
    table,
)
from everstep.cli.common.runs import absolute, kind_of
from everstep.errors import KeeperError, KeeperTimeoutError, OptionError, UnavailableError
from everstep.seams.progress import progress

if TYPE_CHECKING:
    from everstep.link.registry import KeeperInfo
    from everstep.link.wire import Connection
    from everstep.seams.processes.processes import PidWatch


_ANSWER_S = 1.0
_ASKED_AT_ONCE = 32
_STEPS_MAX = 6


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a keeper, as it reports it.

    Attributes:
        trainer: PID of the attached training process; None if there is none.
        held: steps whose bases it has in memory.
        writing: steps that it is writing, or will write.
        durable_step: newest step that it has made durable.
        idle_s: seconds without a trainer.
        ends_in_s: seconds until it ends by itself; None while a trainer is attached.
        arena_bytes: shared memory for captured state, including copies for other ranks.
        copies: rank and step of each base that it holds for another node.
        logs: rank, and the newest step of its log that it holds.
        log_step: newest step of a log that no other process has.
    """

    trainer: int | None
    held: tuple[int, ...]
    writing: tuple[int, ...]
    durable_step: int | None
    idle_s: float
    ends_in_s: float | None
    arena_bytes: int
    copies: tuple[tuple[int, int], ...]
    logs: tuple[tuple[int, int], ...]
    log_step: int | None

    @property
    def unwritten(self) -> list[int]:
        """Steps in its memory that are not durable."""
        newest = -1 if self.durable_step is None else self.durable_step
        held = {*self.held, *(() if self.log_step is None else (self.log_step,))}
        return sorted({*self.writing, *(step for step in held if step > newest)})

    @property
    def logged(self) -> int | None:
        """Newest step that only a log in its memory leads to; None if there is none."""
        others = (-1, self.durable_step or -1, *self.held, *self.writing)
        return self.log_step if (self.log_step or -1) > max(others) else None


def ps(json_output: JsonFlag = False) -> None:
    """Lists the keepers of this user on this machine and their activity.

    A keeper is the process beside a training process that makes captured state durable. One that
    does not answer within a second is busy, or hangs; see its log.
    """
    with registry_errors():
        from everstep.seams.processes.processes import runtime_folder

        folder = runtime_folder(create=False)
        keepers = running_keepers()
        statuses = request_statuses(keepers)
    if json_output:
        emit(
            {
                "runtime_dir": folder,
                "keepers": [
                    {
                        **asdict(info),
                        "log": folder / f"{info.key}.log",
                        "answers": status is not None,
                        "status": status,
                    }
                    for info, status in zip(keepers, statuses, strict=True)
                ],
            }
        )
    else:
        _show(console(), str(folder), keepers, statuses)


# --- Requests ---------------------------------------------------------------------------


@contextlib.contextmanager
def registry_errors() -> Iterator[None]:
    """Turn errors of the keeper registry into errors of this machine's environment."""
    try:
        yield
    except KeeperTimeoutError:
        raise
    except KeeperError as error:
        raise UnavailableError(
            error.message, rank=error.rank, path=error.path, hint=error.hint
        ) from error


def running_keepers() -> list[KeeperInfo]:
    """Return the running keepers, by run and rank."""
    from everstep.link.registry import list_keepers

    return list_keepers()


def request_statuses(keepers: Sequence[KeeperInfo]) -> list[Status | None]:
    """Request the status of all keepers at once; None for those that do not answer."""
    if not keepers:
        return []
    with ThreadPoolExecutor(min(len(keepers), _ASKED_AT_ONCE)) as pool:
        return list(pool.map(request_status, keepers))


def request_status(info: KeeperInfo) -> Status | None:
    """Request the status of a keeper; None if it does not answer in time, or answers in an unknown
    format.
    """
    from everstep.link.spawn import connect
    from everstep.seams.sockets import close_descriptors

    deadline_s = time.monotonic() + _ANSWER_S
    try:
        with connect(info.key, timeout_s=_ANSWER_S, send_timeout_s=_ANSWER_S) as connection:
            connection.send({"kind": "status"})
            received = connection.receive(deadline_s - time.monotonic())
    except KeeperError:
        return None
    if received is None:
        return None
    message, descriptors = received
    close_descriptors(descriptors)
    try:
        return msgspec.convert(message, Status) if message.get("kind") == "status" else None
    except msgspec.ValidationError:
        return None


# --- Showing ----------------------------------------------------------------------------


def duration_in_words(seconds: float) -> str:
    """Return a duration for people: ``"35 s"``, ``"9 min"``, ``"2.5 h"``."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def steps_of(steps: Sequence[int]) -> str:
    """Return steps for people: ``"step 3"``, ``"steps 3, 4"``; only the newest of many."""
    shown = ", ".join(map(str, steps[-_STEPS_MAX:]))
    more = "..., " if len(steps) > _STEPS_MAX else ""
    return f"step{'' if len(steps) == 1 else 's'} {more}{shown}"


def activity_of(status: Status) -> str:
    """Describe the activity of a keeper in a few words."""
    if status.writing:
        return f"writing {steps_of(status.writing)}"
    if status.trainer is not None:
        return "waiting for the next base"
    ends = "" if status.ends_in_s is None else f", ends in {duration_in_words(status.ends_in_s)}"
    return f"without a trainer for {duration_in_words(status.idle_s)}{ends}"


def _copies(status: Status) -> str:
    """Describe copies for other ranks: ``"rank 1: step 20, log to 27; rank 3: step 20"``."""
    by_rank: dict[int, list[int]] = {}
    for rank, step in status.copies:
        by_rank.setdefault(rank, []).append(step)
    held = {rank: steps_of(steps) for rank, steps in by_rank.items()}
    for rank, step in status.logs:
        held[rank] = f"{held[rank]}, log to {step}" if rank in held else f"log to {step}"
    return "; ".join(f"rank {rank}: {text}" for rank, text in held.items()) or "-"


def _in_memory(status: Status) -> str:
    held = [steps_of(status.held)] if status.held else []
    log = [] if status.logged is None else [f"log to {status.logged}"]
    return ", ".join([*held, *log]) or "-"


def _show(
    out: Console, folder: str, keepers: Sequence[KeeperInfo], statuses: Sequence[Status | None]
) -> None:
    if not keepers:
        say(out, f"no keeper is running (none in {folder})")
        return
    numbers = ("pid", "rank", "trainer", "durable", "arena")
    columns = ["pid", "run", "rank", "trainer", "doing", "in memory", "durable", "arena"]
    peers = any(status is not None and (status.copies or status.logs) for status in statuses)
    columns += ["for other ranks"] if peers else []
    shown = table(columns, right=numbers)
    for info, status in zip(keepers, statuses, strict=True):
        pid = str(info.pid)
        run = label(info.run, chars_max=LINE_CHARS_MAX)
        rank = str(info.rank)
        if status is None:
            shown.add_row(
                pid, run, rank, "?", label("not answering", "yellow"), *["?"] * (4 if peers else 3)
            )
            continue
        shown.add_row(
            pid,
            run,
            rank,
            "-" if status.trainer is None else str(status.trainer),
            activity_of(status),
            _in_memory(status),
            "-" if status.durable_step is None else str(status.durable_step),
            in_words(status.arena_bytes),
            *((_copies(status),) if peers else ()),
        )
    out.print(shown)
    for info in (one for one, status in zip(keepers, statuses, strict=True) if status is None):
        line = f"process {info.pid} does not answer; its log: {folder}/{info.key}.log"
        say(out, line, "yellow")


_ROUND_S = 0.1
_EXIT_S = 5.0  # between giving the key up and the end of the process
_REQUEST_TIMEOUT_S = 2.0
_HINTED_MAX = 5


@dataclass(slots=True, eq=False)
class Stopping:
    """One keeper that is being ended.

    Attributes:
        status: status before the request; None if it did not answer.
        connection: connection of the request; None if it was killed, or the request failed.
        problem: reason why it has not ended.
    """

    info: KeeperInfo
    status: Status | None
    watch: PidWatch
    connection: Connection | None = None
    killed: bool = False
    gone: bool = False
    problem: str | None = None

    @property
    def lost(self) -> list[int] | None:
        """Steps that were only in its memory when it was killed; None if unknown."""
        if not self.killed:
            return []
        return None if self.status is None else self.status.unwritten


def stop(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Run folders.")
    ] = None,
    pid: Annotated[int | None, typer.Option("--pid", help="The keeper of this process id.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All keepers of this user.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Kill; state that is not durable yet is lost.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even while a training process is attached.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for the end.")
    ] = 60.0,
    json_output: JsonFlag = False,
) -> None:
    """Ends keepers after they have made captured state durable.

    Refuses while a training process is attached, unless forced: training would continue and start a
    new keeper. A keeper stays if it alone has the log of an ended process: resuming the run takes
    it over. Exit status 3 if a keeper is still running in the end.
    """
    if not runs and pid is None and not every:
        raise OptionError("no keeper given", hint="give a RUN, --pid or --all")
    if not timeout_s >= 0:
        raise OptionError(f"--timeout {timeout_s:g}: seconds, not negative")
    with registry_errors():
        keepers = running_keepers()
        chosen = keepers if every else _chosen(keepers, runs or [], pid)
        stopping = _stop(chosen, now=now, force=force, timeout_s=timeout_s)
    if json_output:
        emit({"ok": all(one.gone for one in stopping), "keepers": [*map(_record, stopping)]})
    else:
        _show_stopped(console(), stopping, runs or [])
    if not all(one.gone for one in stopping):
        raise typer.Exit(ExitCode.INFEASIBLE)


# --- Choosing ---------------------------------------------------------------------------


def _chosen(
    keepers: Sequence[KeeperInfo], runs: Sequence[str], pid: int | None
) -> list[KeeperInfo]:
    """Return the requested keepers; an existing run may have none, which is no error."""
    found: list[KeeperInfo] = []
    for run in runs:
        real = absolute(run, real=True)
        of_run = [info for info in keepers if PurePath(os.path.realpath(info.run)) == real]
        if not of_run and kind_of(real) != "directory":
            raise OptionError(
                f"there is no run {real}, and no keeper of one", hint=_hint_at_keepers(keepers)
            )
        found += of_run
    if pid is not None:
        of_pid = [info for info in keepers if info.pid == pid]
        if not of_pid:
            raise OptionError(f"process {pid} is no keeper", hint=_hint_at_keepers(keepers))
        found += of_pid
    return list(dict.fromkeys(found))


def _hint_at_keepers(keepers: Sequence[KeeperInfo]) -> str:
    if not keepers:
        return "no keeper is running"
    named = [f"{info.run} (process {info.pid})" for info in keepers[:_HINTED_MAX]]
    return "keepers are running of " + ", ".join(plain(name) for name in named)


# --- Stopping ---------------------------------------------------------------------------


def _stop(
    chosen: Sequence[KeeperInfo], *, now: bool, force: bool, timeout_s: float
) -> list[Stopping]:
    from everstep.seams.processes.processes import PidWatch

    statuses = request_statuses(chosen)
    if not force:
        _refuse_attached(chosen, statuses)
    stopping = [
        Stopping(info, status, PidWatch(info.pid))
        for info, status in zip(chosen, statuses, strict=True)
    ]
    try:
        for one in stopping:
            if now:
                _kill(one)
            elif (why := _has_log(one.status)) is not None:
                one.problem = why
            else:
                _request_end(one)
        wait_for_end(stopping, timeout_s)
    finally:
        for one in stopping:
            one.watch.close()
            if one.connection is not None:
                one.connection.close()
    return stopping


def _refuse_attached(chosen: Sequence[KeeperInfo], statuses: Sequence[Status | None]) -> None:
    for info, status in zip(chosen, statuses, strict=True):
        if status is not None and status.trainer is not None:
            raise OptionError(
                f"process {status.trainer} is training with the keeper of {info.run}: it would "
                "continue and start a new keeper",
                rank=info.rank,
                hint="end the training; or --force",
            )


def _has_log(status: Status | None) -> str | None:
    """Return the reason not to end a keeper: the log of an ended process that only it holds would
    be lost.
    """
    if status is None or status.trainer is not None or status.logged is None:
        return None
    left = "" if status.ends_in_s is None else f" within {duration_in_words(status.ends_in_s)}"
    return (
        f"nothing else has the steps up to {status.logged}, which are in a log in its memory; "
        f"resuming the run{left} takes them over"
    )


def _request_end(one: Stopping) -> None:
    from everstep.link.spawn import connect

    try:
        one.connection = connect(
            one.info.key, timeout_s=_REQUEST_TIMEOUT_S, send_timeout_s=_REQUEST_TIMEOUT_S
        )
        one.connection.send({"kind": "stop"})
    # If it has ended meanwhile, wait_for_end() clears the problem.
    except KeeperError as error:
        one.problem = f"the request failed: {error.message}"


def _kill(one: Stopping) -> None:
    from everstep.link.registry import kill_keeper

    try:
        one.killed = kill_keeper(one.info)
    except KeeperError as error:
        one.problem = error.message


def wait_for_end(stopping: Sequence[Stopping], timeout_s: float) -> None:
    """Wait until all have ended or refused, or until the timeout."""
    deadline_s = time.monotonic() + timeout_s
    what = f"waiting for {count_of(len(stopping), 'keeper')} to end"
    with progress(what, len(stopping)) as bar:
        waiting = list(stopping)
        while waiting:
            left_s = deadline_s - time.monotonic()
            for one in list(waiting):
                one.watch.ended(min(max(0.0, left_s), _ROUND_S / len(waiting)))
                if _has_ended(one):
                    one.gone = True
                    one.problem = None
                elif one.problem is None:
                    one.problem = _refusal(one)
                if one.gone or one.problem is not None:
                    waiting.remove(one)
                    bar.advance(1)
            bar.advance(0)
            if left_s <= 0:
                break
    for one in waiting:
        one.problem = f"it is still there after {duration_in_words(timeout_s)}"
        if one.killed:
            one.problem += ", though it was killed: the disk that it writes to hangs"


def _has_ended(one: Stopping) -> bool:
    """Return True if the keeper's lock is free. The lock proves its end; its PID may be in use
    again.
    """
    from everstep.link.registry import find_keeper

    if find_keeper(one.info.key) == one.info:
        return False
    one.watch.ended(_EXIT_S)
    return True


def _refusal(one: Stopping) -> str | None:
    """Return the keeper's reason for refusing, if it has sent one."""
    from everstep.link.wire import error_from_wire
    from everstep.seams.sockets import close_descriptors

    if one.connection is None:
        return None
    try:
        received = one.connection.receive(0.0)
    except KeeperError:  # not answered yet; or it has ended, and the connection is closed
        return None
    if received is None:
        return None
    close_descriptors(received[1])
    error = received[0].get("error")
    return f"it refuses: {error_from_wire(error).message}" if isinstance(error, dict) else None


# --- Showing ----------------------------------------------------------------------------


def _record(one: Stopping) -> dict[str, object]:
    return {
        "pid": one.info.pid,
        "run": one.info.run,
        "rank": one.info.rank,
        "gone": one.gone,
        "killed": one.killed,
        "lost_steps": one.lost,
        "problem": one.problem,
    }


def _show_stopped(out: Console, stopping: Sequence[Stopping], runs: Sequence[str]) -> None:
    for one in stopping:
        who = f"keeper {one.info.pid} of {one.info.run}, rank {one.info.rank}"
        if not one.gone:
            say(out, f"not stopped: {who}: {one.problem}", "yellow")
        elif one.killed:
            say(out, f"killed: {who}; {_loss(one)}")
        else:
            say(out, f"stopped: {who}")
    if any(not one.gone and not one.killed for one in stopping):
        out.print("everstep ps shows what it does; --now ends it at once")
    found = {os.path.realpath(one.info.run) for one in stopping}
    for run in runs:
        if os.path.realpath(run) not in found:
            say(out, f"no keeper of {run} is running")
    if not stopping and not runs:
        out.print("no keeper is running")


def _loss(one: Stopping) -> str:
    if one.lost is None or one.status is None:
        return "the state in its memory is lost; it did not answer which steps that was"
    durable = one.status.durable_step
    newest = "" if durable is None else f"; step {durable} is durable"
    if not one.lost:
        had = "all that it had in memory was durable" if one.status.held else "its memory was empty"
        return had + newest
    return f"lost with it: {steps_of(one.lost)}, captured and not durable" + newest
