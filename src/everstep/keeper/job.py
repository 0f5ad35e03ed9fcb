"""This process among the ranks that train together: where they meet, and what they resume."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import msgpack

from everstep.commit.offers import Choice
from everstep.errors import EverstepError, OptionError, RecoveryError, StateError
from everstep.format.names import RUN_RECORD, TEMPORARY_SUFFIX
from everstep.format.records import RunRecord
from everstep.format.writer import ChunkRing
from everstep.keeper.seat import Seat, no_mailbox
from everstep.options import Options
from everstep.recover.folder import open_run_folder
from everstep.recover.held import HeldBase
from everstep.recover.loading import loader, needs_here
from everstep.recover.resume import Resumed
from everstep.recover.scan import scan_run
from everstep.recover.together import Meeting, resume_together
from everstep.seams import Seams
from everstep.seams.group import Group, group_of_job
from everstep.seams.peers import PeerMailbox
from everstep.state.image import State
from everstep.state.ranks import ONE_RANK, RankInfo
from everstep.tiers.disk import create_exclusive, ensure_dirs, remove_if_there, storage_errors
from everstep.tiers.options import TierOptions

__all__ = ["Job", "Listen", "job_of", "open_together", "refuse_unsupported"]

Listen = Callable[[str], tuple[str, int]]
"""Opens the mailbox of this rank's keeper at a host; returns its address."""


class Job:
    """One rank's part in a job of several, from the making of a Checkpointer on.

    Args:
        group: all ranks; whatever is called here, every one of them calls.
        timeout_s: a rank that says nothing for so long is reported.

    Attributes:
        info: which rank this is.
        seat: its place in the start of the job that was agreed on last.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self.info = RankInfo(group.rank, group.world)
        self.seat: Seat | None = None
        self.resumed_durable = True
        self._group, self._timeout_s = group, timeout_s
        self._disks: tuple[str, ...] = ()

    def open_run(self, seams: Seams, run: PurePath) -> str:
        """Makes the folder of each rank a run, the same one; returns its id.

        Raises:
            ForeignDirectoryError, StorageError: a folder cannot be used.
            RecoveryError: the folders are of different runs.
            DeadlineError: not all ranks are there.
        """
        what, rank = "make a Checkpointer", self.info.rank
        filesystem = seams.filesystem
        mine: dict[str, Any] = {"name": uuid.uuid4().hex, "run": None, "error": None}
        mine["host"] = platform.node()
        failed: EverstepError | None = None
        try:
            with storage_errors("open the run folder", run, rank=rank):
                ensure_dirs(filesystem, run)
                mine["run"] = scan_run(filesystem, run).run
        except EverstepError as error:
            failed, mine["error"] = error, error.message
        found = self._say(what, mine)
        if failed is not None:
            raise failed
        self._refuse_errors(found)
        run_id = self._same_run(found)
        with storage_errors("open the run folder", run, rank=rank):
            self._disks = self._find_disks(seams, run, found[0]["name"])
            unique = f"{mine['name'][:8]}-{rank}"
            create_exclusive(filesystem, run / RUN_RECORD, RunRecord(run_id).encode(), unique)
        self.info = replace(self.info, here=sum(said["host"] == mine["host"] for said in found))
        if len(set(self._disks)) > 1:
            here = [r for r, disk in enumerate(self._disks) if disk == self._disks[rank]]
            self.info = replace(self.info, near=tuple(here))
        return run_id

    def resume(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        ring: ChunkRing,
        held: HeldBase | None,
        listen: Listen,
        *,
        step: int | None,
        strict: bool,
        timeout_s: float,
        on_touch: Callable[[], None],
    ) -> Resumed:
        """As :func:`everstep.recover.resume.resume`, with all ranks.

        Raises:
            RecoveryError, MismatchError, DeadlineError
        """
        load = loader(
            seams,
            state,
            needs_here(state, self._disks),
            ring,
            strict=strict,
            timeout_s=timeout_s,
            on_touch=on_touch,
        )
        return self._start(seams, run, state, held, listen, load, step)

    def start_fresh(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        held: HeldBase | None,
        listen: Listen,
    ) -> Resumed:
        """Begins without a resume.

        Raises:
            StateError: there is something to resume.
        """
        return self._start(seams, run, state, held, listen, None, None)

    def _start(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        held: HeldBase | None,
        listen: Listen,
        load: Any,
        step: int | None,
    ) -> Resumed:
        what = (
            "take the first step"
            if load is None
            else f"call resume({'' if step is None else step})"
        )
        try:
            mailbox = PeerMailbox(self._group.host)
        except OSError as error:
            raise no_mailbox(self._group.host, 0, error) from error
        try:
            mine = {
                "name": uuid.uuid4().hex,
                "what": what,
                "trainer": mailbox.address,
                "keeper": listen(self._group.host),
                "error": None,
            }
            found = self._say(what, mine)
            self._refuse_different(found)
            session = found[0]["name"]
            mailbox.open(session, self.info.rank, [_address(said["trainer"]) for said in found])
            resumed, choice = resume_together(
                seams,
                run,
                state,
                Meeting(session, self.info.rank, self._disks, mailbox),
                held,
                load,
                step=step,
                needs=needs_here(state, self._disks),
                timeout_s=self._timeout_s,
            )
        finally:
            mailbox.close()
        keepers = tuple(_address(said["keeper"]) for said in found)
        self.seat = self._seat(session, keepers, choice)
        return resumed

    def _seat(self, session: str, keepers: tuple[tuple[str, int], ...], choice: Choice) -> Seat:
        durable = choice.base if choice.durable else None
        spare = None if choice.durable else choice.base
        self.resumed_durable = choice.durable or choice.base is None
        return Seat(
            session, self.info.rank, self._disks, keepers, durable, spare, choice.unreadable
        )

    def _find_disks(self, seams: Seams, run: PurePath, name: str) -> tuple[str, ...]:
        """Which ranks see the same folder: each puts a file there, and looks whose it sees."""
        filesystem, what = seams.filesystem, "look at the run folder"
        mine = run / _probe(name, self.info.rank)
        filesystem.create(mine).close()
        try:
            self._say(what, {})
            there = {entry.name for entry in filesystem.scan(run)}
            seen = [r for r in range(self.info.world) if _probe(name, r) in there]
            found = self._say(what, {"seen": min(seen, default=self.info.rank)})
        finally:
            remove_if_there(filesystem, mine)
        return tuple(str(said["seen"]) for said in found)

    def _say(self, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        data: bytes = msgpack.packb(mine)
        return [msgpack.unpackb(said) for said in self._group.exchange(what, data)]

    def _same_run(self, found: Sequence[dict[str, Any]]) -> str:
        runs = {said["run"]: rank for rank, said in enumerate(found) if said["run"] is not None}
        if len(runs) > 1:
            where = ", ".join(f"rank {rank}: run {run}" for run, rank in sorted(runs.items()))
            raise RecoveryError(
                f"the ranks see different runs ({where})",
                rank=self.info.rank,
                hint="give every rank the same run folder, or remove those of other runs",
            )
        return str(next(iter(runs), found[0]["name"]))

    def _refuse_errors(self, found: Sequence[dict[str, Any]]) -> None:
        for rank, said in enumerate(found):
            if said["error"] is not None:
                raise StateError(
                    f"rank {rank} cannot open its run folder: {said['error']}",
                    rank=self.info.rank,
                    hint="look at what that rank prints",
                )

    def _refuse_different(self, found: Sequence[dict[str, Any]]) -> None:
        if len({said["what"] for said in found}) > 1:
            calls = "; ".join(f"rank {rank}: {said['what']}" for rank, said in enumerate(found))
            raise StateError(
                f"the ranks do different things ({calls})",
                rank=self.info.rank,
                hint="every rank calls resume() with the same step, or none does",
            )


def job_of(seams: Seams, timeout_s: float) -> Job | None:
    """The job that this process is a rank of; None: it trains alone.

    Raises:
        StateError: it was started as one of several, and cannot know the others yet.
        DeadlineError: not all ranks make a Checkpointer.
    """
    group = seams.group(timeout_s) if seams.group is not None else group_of_job(timeout_s)
    return None if group is None else Job(group, timeout_s)


def refuse_unsupported(job: Job | None, options: Options, tiers: Sequence[TierOptions]) -> None:
    """Raises:
    OptionError: for what several ranks cannot do together.
    """
    if job is None:
        return
    every, method = options.every, options.method
    why = ""
    if method.base not in ("sync", "async", "lazy"):
        why = f"base={method.base!r} is for one rank; with several: 'sync', 'async' or 'lazy'"
    elif options.logs:
        why = f"log={method.log!r} is for one rank; with several: log='none'"
    elif every.auto or every.seconds is not None:
        why = "every= must be a number of steps: ranks would not agree on when a time is over"
    elif tiers:
        why = "tiers= is for one rank: copies are made of whole bases"
    if why:
        raise OptionError(
            f"this job has {job.info.world} ranks: {why}",
            rank=job.info.rank,
            hint='method="lazy", every=100 (steps), without tiers=',
        )


def open_together(
    job: Job | None, seams: Seams, run: PurePath
) -> tuple[RankInfo, Callable[[], str]]:
    """Which rank this process is, and what makes the folder a run and gives its id. Several ranks
    do that first: what each of them writes depends on whose folders are the same.

    Raises:
        StorageError, RecoveryError, DeadlineError: of :meth:`Job.open_run`.
    """
    if job is None:
        return ONE_RANK, lambda: open_run_folder(seams.filesystem, run).run or ""
    run_id = job.open_run(seams, run)
    return job.info, lambda: run_id


def _address(said: Sequence[Any]) -> tuple[str, int]:
    return str(said[0]), int(said[1])


def _probe(name: str, rank: int) -> str:
    return f"run.{name}-{rank:05d}{TEMPORARY_SUFFIX}"
