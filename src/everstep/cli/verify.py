"""``everstep verify``: read everything back and report each damage."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.log import count_segments, run_log, segment_as_json
from everstep.cli.common.output import console, count_of, in_words, label, left_out, say, table
from everstep.cli.common.runs import RUN_ARGUMENT, filesystem_of, open_run, reading, select_bases
from everstep.cli.ls import STATUS_WORDS, look, problems_as_json, record_as_json
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError, NewerFormatError
from everstep.format.names import LOG_DIR, marker_name, parse_marker, timeline_dir
from everstep.seams.filesystem import FileSystem
from everstep.seams.progress import ProgressSink, progress

if TYPE_CHECKING:
    from everstep.format.writer import ChunkRing
    from everstep.restore.offline.audit import Audit
    from everstep.restore.offline.run_log import RunLog
    from everstep.run.scan import BaseFound, Inventory
    from everstep.run.segments import SegmentFound
    from everstep.run.verify import Damage


_DAMAGES_MAX = 200
_NAMES_MAX = 5
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Checked:
    """Result of reading one base back.

    Attributes:
        base: the base.
        read: True if its data were read; False if no record describes them.
        usable: True if ``resume()`` could use it; damage to a redundant record does not matter.
        entries: number of verified entries.
        size_bytes: number of verified bytes.
        damages: all damages found.
        note: remark that is no damage.
    """

    base: BaseFound
    read: bool = False
    usable: bool = False
    entries: int = 0
    size_bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    note: str | None = None

    @property
    def ok(self) -> bool:
        return not self.damages


def verify(
    run: Annotated[str, RUN_ARGUMENT],
    step: Annotated[int | None, typer.Option(help="Only the base of this step.")] = None,
    timeline: Annotated[int | None, typer.Option(help="Only bases of this timeline.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="With --step: in all timelines, not just the newest.")
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Also compute each base anew, from the one before and the log."
        ),
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Reads back every byte and names each damage.

    Checks every record, header and entry of all bases, or of one, and all segments of the log
    against their digests. Exit status 1 if anything is damaged, if the requested base cannot be
    used, if the log lacks a step that all later ones need (no base lies after it), or if a run that
    has had steps has no base left. An unfinished base left by a crash is reported, but is no
    damage. One that is being deleted is read as long as all its files exist. Writes nothing.

    Also reports the results of the keeper's own audits; exit status 1 if one has found a
    difference.

    With --replay the log between two consecutive bases is replayed on the first, and every entry
    compared with the second, bit for bit: this finds data that were wrong before they were
    digested. Exit status 1 also if any differs. A base that cannot be compared (the log does not
    lead to it, for example) is "not checked", which is no failure: status 0.
    """
    from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
    from everstep.run.scan import candidates

    filesystem = filesystem_of(run)
    inventory = open_run(filesystem, run)
    bases = select_bases(inventory, step=step, timeline=timeline)
    import everstep.restore.load.load  # noqa: F401  # load torch before the time measurement

    start_s = time.monotonic()
    if step is not None and not every:
        bases = bases[:1]
    log = run_log(filesystem, inventory)
    segments: list[SegmentFound] = []
    audits: list[Audit] = []
    with contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        with progress("verify", sum(map(bytes_to_read, bases))) as bar:
            checked = [check_base(filesystem, inventory, base, ring, bar) for base in bases]
        if log is not None and step is None:
            segments = _check_segments(filesystem, log, ring, timeline)
        read_s = time.monotonic() - start_s
        if replay:
            audits = _check_replay(filesystem, inventory, log, ring, {base.id for base in bases})
    if step is not None:
        _refuse_unusable(checked)
    elif timeline is None and not candidates(inventory).ordered:
        had = look(filesystem, run)[1].had
        inventory.problems += [] if had is None else [(inventory.path, had)]
    if log is not None and step is None and timeline is None:
        cut = log.cut_off(inventory) and log.cut_off(open_run(filesystem, run))
        if cut:
            first, problem = cut
            inventory.problems.append(
                (timeline_dir(inventory.path, first.timeline) / LOG_DIR, problem)
            )
    ok = not inventory.problems and all(item.ok for item in checked)
    ok = ok and all(segment.problem is None for segment in segments)
    ok = ok and all(found.verdict != "different" for found in audits)
    ok = ok and not any(base.audit and base.audit.verdict == "different" for base in bases)
    if json_output:
        more: dict[str, Any] = {"segments": [segment_as_json(segment) for segment in segments]}
        if replay:
            more["replay"] = audits
        emit({**_document(inventory, checked, ok, time.monotonic() - start_s), **more})
    else:
        _show(console(), inventory, checked, segments, read_s)
        if replay:
            _show_audits(console(), audits)
            if audits and log is None:
                hint = 'hint: bases are compared by replay of a log on disk: method="logged", '
                say(console(), f'  {hint}log=LogOptions(to="disk")')
    raise typer.Exit(ExitCode.OK if ok else ExitCode.DIFFERENT)


def check_base(
    filesystem: FileSystem,
    inventory: Inventory,
    base: BaseFound,
    ring: ChunkRing,
    progress: ProgressSink,
) -> Checked:
    """Read one base back, including its records.

    Raises:
        NewerFormatError: it was written by a newer everstep.
        DeadlineError: the storage hangs.
    """
    from everstep.restore.load.load import check_contents
    from everstep.run.verify import Damage, verify_base

    checked = Checked(base)
    if base.status == "condemned" and not base.is_usable:
        checked.note = "being deleted: it no longer counts"
        return checked
    if base.status == "incomplete":
        checked.note = f"unfinished ({base.problem}): it counts for nothing"
    if base.status == "damaged":
        checked.damages.append(Damage(str(base.path), None, base.problem or "damaged"))
    if base.manifest is not None:
        mine = base.manifest.markers[0].run == inventory.run
        if not mine:
            checked.damages.append(Damage(str(base.path), None, "it belongs to another run"))
        checked.read = True
        with reading(base.path):
            verdict = verify_base(
                filesystem,
                base,
                ring,
                timeout_s=_TIMEOUT_S,
                progress=progress,
                contents=check_contents,
            )
        checked.entries = verdict.entries
        checked.size_bytes = verdict.size_bytes
        # Damage to redundant records is reported, but keeps nobody from the data.
        markers = {str(base.path / marker_name(item.rank)) for item in base.manifest.markers}
        checked.usable = mine and all(
            item.problem == base.problem or item.path in markers for item in verdict.damages
        )
        checked.damages += verdict.damages
        if base.status == "complete":
            checked.note = "no manifest yet: resume() would roll it forward"
        if base.status == "condemned":
            checked.note = "being deleted, but all there: resume() takes it where nothing newer is"
    if checked.damages and _was_deleted(filesystem, inventory, base):
        return Checked(base, note="deleted by a process at work while it was read")
    return checked


def _was_deleted(filesystem: FileSystem, inventory: Inventory, base: BaseFound) -> bool:
    """Return True if a running process has deleted a base, or begun to, while it was read."""
    from everstep.run.scan import scan_base

    try:
        now = scan_base(filesystem, inventory.path, base.id)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    # Deletion removes the manifest first: then the base is no longer committed.
    left = base.status == "committed" != now.status
    return left or (now.status == "condemned" and not now.is_usable)


def _check_segments(
    filesystem: FileSystem, log: RunLog, ring: ChunkRing, timeline: int | None
) -> list[SegmentFound]:
    """Read and verify every byte of all segments (or those of one timeline); damaged ones get a
    ``problem``.

    Raises:
        NewerFormatError: a segment was written by a newer everstep.
        DeadlineError: the storage hangs.
    """
    from everstep.run.segments import read_segment

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
    try:
        names = [entry.name for entry in filesystem.scan(segment.path)]
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return not any(parse_marker(name) is not None for name in names)


def _check_replay(
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


def _refuse_unusable(checked: Collection[Checked]) -> None:
    """Count a requested base that cannot be used as damage."""
    from everstep.run.verify import Damage

    for item in checked:
        if not item.read and not item.damages:
            item.damages.append(Damage(str(item.base.path), None, item.note or "unfinished"))


def bytes_to_read(base: BaseFound) -> int:
    """Return the size of the files that :func:`check_base` reads."""
    if base.manifest is None or not base.is_usable:
        return 0
    there = {file.name: file.size_bytes for file in base.files}
    files = [file for marker in base.manifest.markers for file in marker.files]
    return sum(there.get(file.name, 0) for file in files)


# --- Showing ----------------------------------------------------------------------------


def _document(
    inventory: Inventory, checked: list[Checked], ok: bool, seconds: float
) -> dict[str, Any]:
    return {
        "path": inventory.path,
        "run": inventory.run,
        "ok": ok,
        "bases": [
            {
                "timeline": item.base.id.timeline,
                "step": item.base.id.step,
                "status": item.base.status,
                "read": item.read,
                "ok": item.ok,
                "entries": item.entries,
                "size_bytes": item.size_bytes,
                "damages": [
                    {name: getattr(damage, name) for name in ("path", "entry", "problem")}
                    for damage in item.damages
                ],
                "note": item.note,
                "audit": record_as_json(item.base.audit),
            }
            for item in checked
        ],
        "problems": problems_as_json(inventory),
        "size_bytes": sum(item.size_bytes for item in checked),
        "seconds": seconds,
    }


def _show(
    out: Console,
    inventory: Inventory,
    checked: list[Checked],
    segments: list[SegmentFound],
    seconds: float,
) -> None:
    from everstep.run.verify import describe_audit

    columns = ("step", "timeline", "status", "entries", "size", "verdict")
    made = table(columns, right=("step", "timeline", "entries", "size"))
    for item in checked:
        verdict = label("good", "green") if item.ok else label("DAMAGED", "bold red")
        if not item.read and item.ok:
            verdict = label("not a base", "yellow")
        made.add_row(
            str(item.base.id.step),
            str(item.base.id.timeline),
            STATUS_WORDS[item.base.status],
            str(item.entries) if item.read else "-",
            in_words(item.size_bytes) if item.read else "-",
            verdict,
        )
    if checked:
        out.print(made)
    for item in checked:
        if item.note:
            out.print(label(f"note: {item.base.id}: {item.note}", "yellow"))
        if audit := item.base.audit:
            line = f"the keeper, of {item.base.id}: {describe_audit(audit)}"
            say(out, line, "red" if audit.verdict == "different" else "")
    lines = [_sentence(damage.path, damage.problem) for item in checked for damage in item.damages]
    lines += [_sentence(str(path), problem) for path, problem in inventory.problems]
    broken = [segment for segment in segments if segment.problem is not None]
    lines += [_sentence(str(segment.path), segment.problem or "") for segment in broken]
    for line in lines[:_DAMAGES_MAX]:
        say(out, f"damage: {line}", "red")
    left_out(out, len(lines), _DAMAGES_MAX)
    read = [item for item in checked if item.read]
    size_bytes = sum(item.size_bytes for item in read)
    size_bytes += sum(segment.size_bytes for segment in segments)
    good = sum(item.ok for item in read)
    of_log = ""
    if segments:
        count = count_segments(segments)
        whole = count - count_segments(broken)
        of_log = f" and {whole} of {count_of(count, 'segment')} of the log"
    out.print(
        f"{good} of {count_of(len(read), 'base')}{of_log} good, {in_words(size_bytes)} read in "
        f"{seconds:.1f} s" + (f"; {count_of(len(lines), 'damage')}" if lines else "")
    )
    bad = [item for item in checked if item.damages and not item.usable]
    if lost := [item.base.id for item in bad]:
        where = "the disk or the store may be failing"
        if all(damage.unfit for item in bad for damage in item.damages):
            where = "the disk is not to blame: give every rank the same state, so that shards fit"
        hint = f"  hint: resume() skips damaged bases; {where}"
        if "://" not in str(inventory.path):
            hint += f"; everstep rm {inventory.path} --step {lost[0].step} deletes a damaged base"
        say(out, hint)


def _sentence(path: str, problem: str) -> str:
    """Return ``problem`` with its file named once."""
    return problem if path in problem else f"{path}: {problem}"


# --- Replay -----------------------------------------------------------------------------


def _show_audits(out: Console, audits: list[Audit]) -> None:
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
            say(out, _difference(found), "red")
        elif found.reason:
            how = "not checked" if found.verdict == "unchecked" else "equal nevertheless"
            say(out, f"{found.after}: {how}: {found.reason}", "yellow")
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
