"""Verification of the gradient log: read it back, replay it, compare with the bases."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rich.console import Console

from everstep.cli.common.output import LINE_CHARS_MAX, count_of, label, table
from everstep.errors import DamageError, FormatError, NewerFormatError

if TYPE_CHECKING:
    from everstep.commit.lineage import BaseId
    from everstep.format.records import AuditRecord
    from everstep.format.writer import ChunkRing
    from everstep.restore.offline.audit import Audit
    from everstep.restore.offline.run_log import RunLog
    from everstep.run.scan import Inventory
    from everstep.run.segments import SegmentFound
    from everstep.seams.filesystem import FileSystem


AUDIT_WORDS = {"equal": "audited", "different": "AUDIT FAILED", "unchecked": "not audited"}
"""Result of the keeper's audit of a base, in two words."""

_TIMEOUT_S = 120.0
_NAMES_MAX = 5


def check_segments(
    filesystem: FileSystem, log: RunLog, ring: ChunkRing, timeline: int | None
) -> list[SegmentFound]:
    """Read and verify every byte of all segments (or those of one timeline); damaged ones get a
    ``problem``.

    Raises:
        NewerFormatError: a segment was written by a newer everstep.
        DeadlineError: the storage hangs.
    """
    from everstep.run.segments import read_segment
    from everstep.seams.progress import progress

    wanted = [one for one in log.segments if timeline in (None, one.timeline)]
    checked = []
    with progress("verify the log", sum(one.size_bytes for one in wanted)) as bar:
        for segment in wanted:
            if segment.problem is None:
                try:
                    read_segment(filesystem, segment, ring, timeout_s=_TIMEOUT_S, progress=bar)
                except NewerFormatError:
                    raise
                except (DamageError, FormatError) as error:
                    segment = dataclasses.replace(segment, problem=error.message)
                except FileNotFoundError:
                    segment = dataclasses.replace(segment, problem="its file is missing")
                except OSError as error:
                    problem = f"cannot be read: {error.strerror or error}"
                    segment = dataclasses.replace(segment, problem=problem)
            if segment.problem is None or not _is_deleted(segment.files or filesystem, segment):
                checked.append(segment)
    return checked


def _is_deleted(filesystem: FileSystem, segment: SegmentFound) -> bool:
    """Return True if a running process has deleted a segment: its markers are removed first."""
    from everstep.format.names import parse_marker

    try:
        names = [entry.name for entry in filesystem.scan(segment.path)]
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return not any(parse_marker(name) is not None for name in names)


def check_replay(
    filesystem: FileSystem,
    inventory: Inventory,
    log: RunLog | None,
    ring: ChunkRing,
    bases: Collection[BaseId],
) -> list[Audit]:
    """Compute each of ``bases`` from the preceding base and the log, and compare."""
    from everstep.restore.offline.audit import audit, pairs
    from everstep.restore.offline.rebuild import Rebuilder
    from everstep.restore.offline.run_log import RunLog
    from everstep.seams.processes.processes import available_cores

    threads = len(available_cores())
    found = log or RunLog(filesystem, inventory, {})
    rebuilder = Rebuilder(filesystem, found, ring, timeout_s=_TIMEOUT_S, threads=threads)
    return [audit(rebuilder, pair) for pair in pairs(rebuilder) if pair.after.id in bases]


def audit_as_json(found: Audit) -> dict[str, Any]:
    """Return one comparison as plain data."""
    return {
        "before": {"timeline": found.before.timeline, "step": found.before.step},
        "after": {"timeline": found.after.timeline, "step": found.after.step},
        "verdict": found.verdict,
        "reason": found.reason,
        "steps": found.steps,
        "updates": found.updates,
        "entries": found.entries,
        "differing": list(found.differing),
    }


def record_as_json(record: AuditRecord | None) -> dict[str, Any] | None:
    """Return the result of the keeper's audit of a base as plain data."""
    if record is None:
        return None
    found = dataclasses.asdict(record)
    timeline, step = found.pop("before")
    return {**found, "before": {"timeline": timeline, "step": step}}


def show_audits(out: Console, audits: list[Audit]) -> None:
    """Show the result of replay for each base."""
    made = table(("replay", "onto base", "updates", "verdict"), right=("updates",))
    styles = {"equal": "green", "different": "bold red", "unchecked": "yellow"}
    words = {"equal": "equal, bit for bit", "different": "DIFFERENT", "unchecked": "not checked"}
    for found in audits:
        made.add_row(
            f"steps {found.before.step + 1} to {found.after.step}",
            str(found.before.step),
            str(found.updates) if found.steps else "-",
            label(words[found.verdict], styles[found.verdict]),
        )
    if audits:
        out.print(made)
    for found in audits:
        if found.verdict == "different":
            out.print(label(_difference(found), "red", LINE_CHARS_MAX), soft_wrap=True)
        elif found.reason:
            how = "not checked" if found.verdict == "unchecked" else "equal nevertheless"
            line = f"{found.after}: {how}: {found.reason}"
            out.print(label(line, "yellow", LINE_CHARS_MAX), soft_wrap=True)
    count = {verdict: sum(one.verdict == verdict for one in audits) for verdict in words}
    summary = f"{count['equal']} of {count_of(len(audits), 'base')} equal what replay gives"
    summary += f", {count['different']} different" if count["different"] else ""
    summary += f", {count['unchecked']} not checked" if count["unchecked"] else ""
    out.print(summary if audits else "no base follows another: there is nothing to replay")


def _difference(found: Audit) -> str:
    names = ", ".join(map(repr, found.differing[:_NAMES_MAX]))
    more = len(found.differing) - _NAMES_MAX
    names += f" and {more} more" if more > 0 else ""
    line = (
        f"different: steps {found.before.step + 1} to {found.after.step}: base "
        f"{found.before.step} and the log do not give base {found.after.step}"
    )
    if found.differing:
        line += f" in {count_of(len(found.differing), 'entry', 'entries')}: {names}"
    return line + (f" ({found.reason})" if found.reason else "")
