"""``everstep watch``: a run while it trains, from its event log."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import (
    console,
    count_of,
    in_words,
    label,
    plain,
    seconds_in_words,
    table,
    when,
)
from everstep.cli.common.runs import RUN_ARGUMENT, open_run, reading
from everstep.errors import OptionError
from everstep.events import Event
from everstep.events.log import EVENTS_DIR, EventFollower
from everstep.seams import PosixFileSystem

if TYPE_CHECKING:
    from everstep.look.run_status import Loss, RunStatus, Survival

# Progress is reported every minute or more often.
_SILENT_S = 90.0
_LINES_MAX = 6
_DAY_S = 86_400.0
_RATES = {
    "written_bytes": "disk",
    "log_written_bytes": "log",
    "copied_bytes": "copies",
    "peered_bytes": "peers",
}
"""Counters of bytes in events of progress, by what they are shown as."""


def watch(
    run: Annotated[str, RUN_ARGUMENT],
    every: Annotated[float, typer.Option(help="Seconds between two updates.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the status, and end.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Shows a run while it trains: pace, stalls, and what each failure would cost now.

    Reads the event log in the run folder, and writes nothing. Ends when it is interrupted; in a
    pipe, and with --json, the status is shown once.
    """
    view = _View(open_run(PosixFileSystem(), run).path)
    if json_output:
        emit(view.document(time.time()))
        return
    out = console()
    if once or not _is_terminal():
        out.print(view.shown(time.time()))
        return
    _follow(out, view, every)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _follow(out: Console, view: _View, every_s: float) -> None:
    with Live(view.shown(time.time()), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            view.update()
            live.update(view.shown(time.time()), refresh=True)


class _View:
    """Status of one run, for people and as JSON.

    Raises:
        OptionError: the run has no event log.
    """

    def __init__(self, path: PurePath) -> None:
        from everstep.look.run_status import RunStatus, survival
        from everstep.tiers.options import survival_of

        self.path = path
        self.status: RunStatus = RunStatus()
        self._survival: Survival = survival(survival_of, str(path))
        self._follower = EventFollower(path)
        self.update()
        if not self.status.ranks:
            raise OptionError(
                f"{path} has no event log ({path / EVENTS_DIR})",
                path=path,
                hint="runs of everstep 0.1 write one while they train",
            )

    def update(self) -> None:
        """Read the events since the last update."""
        with reading(self.path):
            for event in self._follower.read():
                self.status.add(event)

    def losses(self, now_s: float) -> list[Loss]:
        """Return what each failure would have cost at the last progress."""
        return self.status.losses(self._survival, self._age_s(now_s))

    def _age_s(self, now_s: float) -> float:
        """Return the age of the figures."""
        return max(0.0, now_s - (self.status.as_of_unix_s or now_s))

    def state(self, now_s: float) -> str:
        """Return ``"training"``, ``"silent for 40 s"`` or ``"ended"``."""
        if self.status.is_closed:
            return "ended"
        silent_s = now_s - (self.status.last_unix_s or now_s)
        return "training" if silent_s < _SILENT_S else f"silent for {seconds_in_words(silent_s)}"

    def free_bytes(self) -> int:
        with reading(self.path):
            return PosixFileSystem().free_bytes(self.path)

    # --- As JSON ------------------------------------------------------------------------

    def document(self, now_s: float) -> dict[str, Any]:
        """Return the status as plain data."""
        status = self.status
        return {
            "path": self.path,
            "state": self.state(now_s),
            "timeline": status.timeline,
            "ranks": len(status.active),
            "step": status.step,
            "step_s": status.step_s,
            "stalled": status.stalled,
            "silent_ranks": status.silent_ranks,
            "as_of_unix_s": status.as_of_unix_s,
            "losses": [asdict(loss) for loss in self.losses(now_s)],
            "bytes_per_s": {shown: status.rate_of(name) for name, shown in _RATES.items()},
            "host_bytes": status.total_of("host_bytes"),
            "free_bytes": self.free_bytes(),
            "forecast_bytes_per_day": status.total_of("forecast_bytes_per_day"),
            "keepers_lost": sum(one.keepers_lost for one in status.active),
            "last": [_as_json(event) for event in status.messages[-_LINES_MAX:]],
        }

    # --- For people ---------------------------------------------------------------------

    def shown(self, now_s: float) -> RenderableType:
        """Return the screen."""
        lines: list[RenderableType] = [self._head(now_s), self._pace(), Text()]
        lines += [self._losses(now_s), Text(), self._bytes()]
        messages = self.status.messages[-_LINES_MAX:]
        if messages:
            lines += [Text(), *(_line(event) for event in messages)]
        return Group(*lines)

    def _head(self, now_s: float) -> Text:
        started = [one.started for one in self.status.active if one.started is not None]
        about = started[0].details if started else {}
        method = f"{about.get('method', '?')}, {about.get('every', '?')}"
        ranks = count_of(len(self.status.active), "rank")
        state = self.state(now_s)
        text = f"{self.path}: {method}; {ranks}, timeline {self.status.timeline}; {state}"
        return label(text, "bold" if state == "training" else "bold yellow")

    def _pace(self) -> Text:
        status = self.status
        step_s = status.step_s
        pace = (
            "" if not step_s else f", {seconds_in_words(step_s)} a step ({1 / step_s:.3g} a second)"
        )
        stalled = {cause: share for cause, share in status.stalled.items() if share > 0}
        causes = ", ".join(f"{cause} {share:.2%}" for cause, share in stalled.items())
        total = sum(stalled.values())
        causes = f" ({causes})" if causes else ""
        return label(f"step {status.step:,}{pace}; stalled {total:.2%}{causes}")

    def _losses(self, now_s: float) -> RenderableType:
        from everstep.look.run_status import FAILURES

        losses = self.losses(now_s)
        if not losses:
            count = count_of(self.status.silent_ranks, "rank")
            return label(f"what a failure would cost is unknown: {count} without progress yet")
        as_of = f"{seconds_in_words(self._age_s(now_s))} ago" if self._age_s(now_s) >= 1 else "now"
        columns = ("step", "lost", "time")
        made = table((f"if, as of {as_of},", "restored from", *columns), right=columns)
        for loss in losses:
            source = label("nothing", "red") if loss.place is None else label(_place(loss.place))
            made.add_row(
                label(FAILURES[loss.failure]),
                source,
                f"{loss.step:,}",
                f"{loss.lost_steps:,}" if loss.lost_steps else "the step in flight",
                "" if loss.lost_s is None or not loss.lost_steps else seconds_in_words(loss.lost_s),
            )
        return made

    def _bytes(self) -> Text:
        status = self.status
        rates = {shown: status.rate_of(name) for name, shown in _RATES.items()}
        flows = [f"{name} {in_words(round(rate))}/s" for name, rate in rates.items() if rate]
        host = status.total_of("host_bytes")
        parts = [f"written: {', '.join(flows) or 'nothing in the last minute'}"]
        if host is not None:
            parts.append(f"host memory {in_words(round(host))}")
        free = self.free_bytes()
        parts.append(f"disk {in_words(free)} free{self._forecast(free)}")
        return label("; ".join(parts))

    def _forecast(self, free_bytes: int) -> str:
        """Return when the disk would be full, if nothing were deleted."""
        per_day = self.status.total_of("forecast_bytes_per_day")
        if not per_day:
            return ""
        until = seconds_in_words(free_bytes / per_day * _DAY_S)
        return f", {in_words(round(per_day))} written a day (as much as is free in {until})"


def _place(name: str) -> str:
    return {"memory": "keeper's memory", "peer": "memory of the next node"}.get(name, name)


def _line(event: Event) -> Text:
    details = event.details
    if event.kind == "recovery":
        exact = "exact" if details.get("exact") else "not exact"
        text = f"resumed at step {event.step} from {details.get('source')}, {exact}"
        if details.get("source") == "fresh":
            text = "began at step 0"
    elif event.kind == "keeper":
        text = f"keeper replaced: {details.get('lost')}"
    else:
        text = f"{event.kind.replace('_', ' ')}: {details.get('message', '')}"
    moment = when(event.unix_s).split(" ")[-1]
    style = "red" if event.kind in ("failure", "base_failed") else ""
    return label(f"{moment} rank {event.rank}: {plain(text)}", style)


def _as_json(event: Event) -> dict[str, Any]:
    return {
        "event": event.kind,
        "unix_s": event.unix_s,
        "rank": event.rank,
        "timeline": event.timeline,
        "step": event.step,
        **event.details,
    }
