"""``everstep ls``: list timelines and bases of a run, and the base that a resume would choose."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.log import as_json, describe_reach, run_log
from everstep.cli.common.output import (
    console,
    count_of,
    in_words,
    label,
    say,
    table,
    when,
)
from everstep.cli.common.runs import RUN_ARGUMENT, filesystem_of, open_run, reading
from everstep.commit.lineage import BaseId, describe_missing_steps, history, split_by_history
from everstep.errors import DamageError, FormatError, NewerFormatError
from everstep.format.records import AuditRecord
from everstep.seams.filesystem import FileSystem

if TYPE_CHECKING:
    from everstep.restore.offline.run_log import Reach
    from everstep.run.scan import BaseFound, Inventory


_ROWS_MAX = 50
_PROBLEMS_MAX = 20
_ATTEMPTS = 8

STATUS_WORDS = {
    "committed": "committed",
    "complete": "complete (to be rolled forward)",
    "damaged": "damaged",
    "incomplete": "incomplete",
    "condemned": "being deleted",
}
"""The status of a base for people."""

AUDIT_WORDS = {"equal": "audited", "different": "AUDIT FAILED", "unchecked": "not audited"}
"""Result of the keeper's audit of a base, in two words."""


def record_as_json(record: AuditRecord | None) -> dict[str, Any] | None:
    """Return the result of the keeper's audit of a base as plain data."""
    if record is None:
        return None
    found = dataclasses.asdict(record)
    timeline, step = found.pop("before")
    return {**found, "before": {"timeline": timeline, "step": step}}


def annotations_as_json(base: BaseFound) -> dict[str, Any]:
    """Return metrics, note and pin of a base as plain data."""
    found = base.annotations
    return {
        "metrics": {} if found is None else dict(found.metrics),
        "note": None if found is None else found.note or None,
        "pinned": base.is_pinned,
    }


def annotations_in_words(base: BaseFound) -> list[str]:
    """Return metrics, note and pin of a base as short phrases."""
    found = base.annotations
    words = ["pinned"] if base.is_pinned else []
    if found is not None:
        words += [f"{name} {value:.6g}" for name, value in sorted(found.metrics.items())]
        words += [found.note] if found.note else []
    return words


def problems_as_json(inventory: Inventory) -> list[dict[str, Any]]:
    """Return what is wrong with a run's records as plain data."""
    return [{"path": path, "problem": problem} for path, problem in inventory.problems]


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision that ``resume()`` would take now, judged by records and headers.

    Attributes:
        base: base that it would read; None if none is usable.
        skipped: better bases with the reason why they are skipped.
        reason: reason why there is none.
        had: message that the run has had steps, but no base is left.
    """

    base: BaseFound | None
    skipped: dict[BaseId, str]
    reason: str | None = None
    had: str | None = None


def look(filesystem: FileSystem, run: str) -> tuple[Inventory, Choice]:
    """Return the inventory, and the choice of ``resume()``; errors as of :func:`.open_run`."""
    inventory = open_run(filesystem, run)
    with reading(inventory.path):
        return inventory, _would_resume(filesystem, inventory)


def _would_resume(filesystem: FileSystem, inventory: Inventory) -> Choice:
    """Return the base that ``resume()`` would choose if all data are good; reads headers only.

    Raises:
        NewerFormatError: as ``resume()`` would.
    """
    from everstep.run.open_base import OpenBase
    from everstep.run.scan import candidates

    found = candidates(inventory)
    skipped: dict[BaseId, str] = {}
    for base in found.ordered:
        assert base.manifest is not None
        marker = base.manifest.markers[0]
        if marker.run != inventory.run:
            skipped[base.id] = "it belongs to another run"
            continue
        try:
            for each in base.manifest.markers:
                OpenBase.open(filesystem, base, each.rank).close()
        except NewerFormatError:
            raise
        except (DamageError, FormatError) as error:
            skipped[base.id] = error.message
        except OSError as error:
            skipped[base.id] = f"{error.filename or base.path}: {error.strerror or error}"
        else:
            return Choice(base, skipped)
    skipped.update({BaseId(one.timeline, one.step): one.reason for one in found.damaged})
    if found.ordered or found.damaged:
        return Choice(None, skipped, "there are bases, but none can be used: it would fail")
    if had := describe_missing_steps(inventory.timelines, inventory.branches):
        reason = f"{had}: it would fail, unless a keeper has one in memory"
        return Choice(None, skipped, reason, had)
    return Choice(None, skipped, "there is no base: it would start afresh")


@dataclass(frozen=True, slots=True)
class _Listing:
    """Contents of a run, and what is wrong with it.

    Attributes:
        reaches: steps that the log adds, by timeline.
        end: last step that the log adds to the chosen base.
        notes: problems of each base, one sentence each.
        problems: everything that is wrong, in sentences.
    """

    inventory: Inventory
    choice: Choice
    reaches: dict[int, Reach]
    end: BaseId | None
    notes: dict[BaseId, list[str]]
    problems: list[str]


def ls(
    run: Annotated[str, RUN_ARGUMENT],
    every: Annotated[bool, typer.Option("--all", help="List all bases.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Lists timelines, bases, steps that the log on disk adds, and the choice of resume().

    Reads records and headers, no data: use `everstep verify` to check the data. Exit status 1 if
    records or headers are damaged, files are missing, or a run that has had steps has no base left.
    Unfinished bases, and bases being deleted, are no damage. Neither are steps missing in the log,
    which are reported: perhaps they were never written. Writes nothing.
    """
    filesystem = filesystem_of(run)
    seen: list[str] = []
    # A running process may delete bases and segments meanwhile: believe what is seen twice.
    for _ in range(_ATTEMPTS):
        found = _list(filesystem, run)
        if found.problems == seen:
            break
        seen = found.problems
    if json_output:
        emit({"ok": not found.problems, **_document(found)})
    else:
        _show(console(), run, found, every)
    raise typer.Exit(ExitCode.DIFFERENT if found.problems else ExitCode.OK)


def _list(filesystem: FileSystem, run: str) -> _Listing:
    inventory, choice = look(filesystem, run)
    log = run_log(filesystem, inventory)
    reaches: dict[int, Reach] = {}
    end = None
    if log is not None:
        with reading(inventory.path):
            reaches = log.reaches()
            if choice.base is not None:
                end = log.newest_end(choice.base)
    notes = {base.id: _notes(base, choice) for base in inventory.bases}
    problems = _problems(inventory, notes, reaches)
    problems += [] if choice.had is None else [choice.had]
    return _Listing(inventory, choice, reaches, end, notes, problems)


def _document(found: _Listing) -> dict[str, Any]:
    inventory = found.inventory
    choice = found.choice
    here = _in_history(inventory)
    return {
        "path": inventory.path,
        "run": inventory.run,
        "timelines": [
            {**row, "log": as_json(found.reaches.get(row["timeline"]))}
            for row in _timelines(inventory)
        ],
        "bases": [
            {
                "timeline": base.id.timeline,
                "step": base.id.step,
                "status": base.status,
                "in_history": base.id in here,
                "size_bytes": base.size_bytes,
                "files": len(base.files),
                "exact": _exact(base),
                "created_unix_s": _created(base),
                "audit": record_as_json(base.audit),
                **annotations_as_json(base),
                "problems": found.notes[base.id],
                "path": base.path,
            }
            for base in sorted(inventory.bases, key=lambda base: base.id)
        ],
        "resume": choice.base and choice.base.id,
        "resume_replay": found.end,
        "resume_reason": choice.reason,
        "problems": problems_as_json(inventory),
    }


def _timelines(inventory: Inventory) -> list[dict[str, Any]]:
    branches = inventory.branches
    here = {number for number, _ in history(max(branches), branches)} if branches else set()
    found = []
    for number in sorted([*inventory.timelines, *inventory.abandoned]):
        record = inventory.timelines.get(number)
        status = "ok"
        if record is None:
            status = "unreadable" if number in inventory.timelines else "never opened"
        found.append(
            {
                "timeline": number,
                "status": status,
                "in_history": number in here,
                "parent": record and record.parent,
                "fork_step": record.fork_step if record and record.parent is not None else None,
                "exact": record and record.exact,
                "world": record and record.world,
                "created_unix_s": record and record.created_unix_s,
                "fingerprint": record and dict(record.fingerprint),
            }
        )
    return found


def _in_history(inventory: Inventory) -> set[BaseId]:
    here, _ = split_by_history((base.id for base in inventory.bases), inventory.branches)
    return set(here)


def _exact(base: BaseFound) -> bool | None:
    return None if base.manifest is None else base.manifest.exact


def _created(base: BaseFound) -> float | None:
    """When the manifest was written; without one, when anything was written last."""
    times = {file.name: file.mtime_s for file in base.files}
    return times.get("manifest.json", max(times.values(), default=None))


def _notes(base: BaseFound, choice: Choice) -> list[str]:
    """Return the problems of a base, one sentence each."""
    from everstep.run.verify import describe_audit

    if base.status in ("condemned", "incomplete"):  # the status says it all
        return []
    notes = [base.problem] if base.problem else []
    if (missing := base.missing_file) is not None:
        notes.append(f"{missing} is missing, or has another length")
    if not notes and base.id in choice.skipped:
        notes = [choice.skipped[base.id]]
    if base.audit is not None and base.audit.verdict == "different":
        notes.append(describe_audit(base.audit))
    return notes


def _problems(
    inventory: Inventory, notes: dict[BaseId, list[str]], reaches: dict[int, Reach]
) -> list[str]:
    """All that is wrong with the run, in sentences."""
    problems = [f"{path.name}: {problem}" for path, problem in inventory.problems]
    if inventory.run is None:
        problems.append("no record tells the id of the run")
    problems += [f"{base}: {note}" for base, found in notes.items() for note in found]
    segments = [segment for reach in reaches.values() for segment in reach.segments]
    return problems + [one.problem for one in segments if one.problem is not None]


def _show(out: Console, run: str, found: _Listing, every: bool) -> None:
    inventory = found.inventory
    choice = found.choice
    files = [file for base in inventory.bases for file in base.files]
    linked = {file.file: file.size_bytes for file in files if file.links > 1}  # once, each
    size_bytes = sum(file.size_bytes for file in files if file.links == 1) + sum(linked.values())
    count = count_of(len(inventory.bases), "base")
    out.print(label(f"{run}: {count}, {in_words(size_bytes)}; run {inventory.run or 'unknown'}"))
    _show_timelines(out, inventory, every)
    _show_bases(out, inventory, choice, found.notes, every)
    for reach in list(found.reaches.values())[0 if every else -_ROWS_MAX :]:
        out.print(label(describe_reach(reach)), soft_wrap=True)
    prefix = f"{inventory.path}{os.sep}"  # names of files are clear without it
    for problem in found.problems[:_PROBLEMS_MAX]:
        say(out, f"problem: {problem.replace(prefix, '')}", "yellow")
    if len(found.problems) > _PROBLEMS_MAX:
        out.print(f"... and {count_of(len(found.problems) - _PROBLEMS_MAX, 'more problem')}")
    if choice.base is not None:
        further = "" if found.end is None else f", and replay the log up to {found.end}"
        out.print(f"resume() would choose {choice.base.id} (if its data verify){further}")
    else:
        out.print(label(f"resume(): {choice.reason}"))


def _show_timelines(out: Console, inventory: Inventory, every: bool) -> None:
    shown = table(("timeline", "forked from", "opened", "notes"), right=("timeline",))
    rows = _timelines(inventory)
    for row in rows if every else rows[-_ROWS_MAX:]:
        origin = "?" if row["status"] != "ok" else "a fresh start"
        if row["parent"] is not None:
            origin = f"step {row['fork_step']} of timeline {row['parent']}"
        notes = [] if row["in_history"] else ["abandoned"]
        notes += ["not exact"] if row["exact"] is False else []
        notes += [] if row["status"] == "ok" else [f"record {row['status']}"]
        shown.add_row(
            str(row["timeline"]),
            origin,
            when(row["created_unix_s"]),
            label(", ".join(notes), "yellow"),
        )
    if rows:
        out.print(shown)
    _show_left_out(out, len(rows), "timeline", every)


def _show_bases(
    out: Console,
    inventory: Inventory,
    choice: Choice,
    problems: dict[BaseId, list[str]],
    every: bool,
) -> None:
    columns = ("", "step", "timeline", "status", "size", "created", "notes")
    shown = table(columns, right=("step", "timeline", "size"))
    here = _in_history(inventory)
    bases = sorted(inventory.bases, key=lambda base: base.id)
    for base in bases if every else bases[-_ROWS_MAX:]:
        chosen = choice.base is not None and base.id == choice.base.id
        notes = [] if base.id in here else ["abandoned"]
        notes += ["not exact"] if _exact(base) is False else []
        notes += [AUDIT_WORDS[base.audit.verdict]] if base.audit else []
        notes += annotations_in_words(base)
        notes += ["see below"] if problems[base.id] else []
        shown.add_row(
            ">" if chosen else "",
            str(base.id.step),
            str(base.id.timeline),
            STATUS_WORDS[base.status],
            in_words(base.size_bytes),
            when(_created(base)),
            label(", ".join(notes), "yellow"),
            style="bold" if chosen else "",
        )
    if bases:
        out.print(shown)
    _show_left_out(out, len(bases), "base", every)


def _show_left_out(out: Console, count: int, what: str, every: bool) -> None:
    if not every and count > _ROWS_MAX:
        out.print(f"... {count_of(count - _ROWS_MAX, 'older ' + what)}: --all lists them")
