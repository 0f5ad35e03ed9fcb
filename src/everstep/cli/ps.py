"""``everstep ps``: list the keeper processes of this user and their activity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import LINE_CHARS_MAX, console, in_words, label, table
from everstep.errors import KeeperError, KeeperTimeoutError, UnavailableError

if TYPE_CHECKING:
    from everstep.link.registry import KeeperInfo


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
                "runtime_dir": str(folder),
                "keepers": [
                    {
                        **asdict(info),
                        "log": str(folder / f"{info.key}.log"),
                        "answers": status is not None,
                        "status": status and asdict(status),
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


def _doing(status: Status) -> str:
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
        line = f"no keeper is running (none in {folder})"
        out.print(label(line, chars_max=LINE_CHARS_MAX), soft_wrap=True)
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
            _doing(status),
            _in_memory(status),
            "-" if status.durable_step is None else str(status.durable_step),
            in_words(status.arena_bytes),
            *((_copies(status),) if peers else ()),
        )
    out.print(shown)
    silent = [info for info, status in zip(keepers, statuses, strict=True) if status is None]
    for info in silent:
        line = f"process {info.pid} does not answer; its log: {folder}/{info.key}.log"
        out.print(label(line, "yellow", LINE_CHARS_MAX), soft_wrap=True)
