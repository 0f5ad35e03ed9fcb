"""Describe the gradient log of a run: its segments, and the steps that it adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from everstep.cli.common.output import count_of, in_words, label, left_out, table
from everstep.cli.common.runs import reading
from everstep.format.names import LOG_DIR, LOSSY_DIR, parse_segment, timeline_dir
from everstep.seams.filesystem import FileSystem

if TYPE_CHECKING:
    from everstep.format.log import RecordHead
    from everstep.restore.offline.run_log import Reach, RunLog
    from everstep.run.scan import Inventory
    from everstep.run.segments import SegmentFound


_SPANS_MAX = 6
_ROWS_MAX = 100


def run_log(filesystem: FileSystem, inventory: Inventory) -> RunLog | None:
    """Return the log of a run on disk; None if it has no segments, which is checked first at little
    cost.
    """

    def has_segments(timeline: int, kind: str) -> bool:
        if not inventory.may_hold(timeline, kind):
            return False
        try:
            entries = filesystem.scan(timeline_dir(inventory.path, timeline) / kind)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return any(parse_segment(entry.name) is not None for entry in entries)

    with reading(inventory.path):
        kinds = (LOG_DIR, LOSSY_DIR)
        if not any(has_segments(number, kind) for number in inventory.timelines for kind in kinds):
            return None
        from everstep.restore.offline.run_log import RunLog

        return RunLog.of(filesystem, inventory)


def count_segments(segments: Iterable[SegmentFound]) -> int:
    """Return the number of segments in the folder; one if several ranks wrote the same steps."""
    return len({segment.path for segment in segments})


def steps_in_words(steps: Iterable[int]) -> str:
    """Return steps for people: ``"steps 2 to 10, 14"``; ``"no step"``."""
    from everstep.restore.log import spans

    return _spans_in_words(spans(steps))


def _spans_in_words(found: Sequence[tuple[int, int]]) -> str:
    if not found:
        return "no step"
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in found]
    if len(words) > _SPANS_MAX:
        words = [*words[: _SPANS_MAX // 2], "...", *words[-_SPANS_MAX // 2 :]]
    one = len(found) == 1 and found[0][0] == found[0][1]
    return ("step " if one else "steps ") + ", ".join(words)


def describe_reach(reach: Reach) -> str:
    """Describe in one line the steps that the log of one timeline adds."""
    lossy = count_segments(segment for segment in reach.segments if segment.lossy)
    of_which = f", {lossy} of them lossy" if lossy else ""
    gaps = f"; missing: {_spans_in_words(reach.gaps)}" if reach.gaps else ""
    return (
        f"log of timeline {reach.timeline}: {steps_in_words(reach.steps)} by replay "
        f"({count_of(count_segments(reach.segments), 'segment')}{of_which}, "
        f"{count_of(reach.records, 'record')}, "
        f"{in_words(reach.size_bytes)}){gaps}"
    )


def as_json(reach: Reach | None) -> dict[str, Any] | None:
    """Return the same as plain data; None for a timeline without segments."""
    if reach is None:
        return None
    from everstep.restore.log import spans

    return {
        "segments": count_segments(reach.segments),
        "records": reach.records,
        "size_bytes": reach.size_bytes,
        "steps": spans(reach.steps),
        "gaps": reach.gaps,
        "stopped": reach.stopped,
        "problems": [s.problem for s in reach.segments if s.problem is not None],
    }


def segment_as_json(segment: SegmentFound) -> dict[str, Any]:
    """Return one segment as plain data."""
    return {
        "timeline": segment.timeline,
        "first": segment.after + 1,
        "last": segment.last,
        "records": len(segment.heads),
        "size_bytes": segment.size_bytes,
        "lossy": segment.lossy,
        "path": segment.path,
        "problem": segment.problem,
    }


def show_segments(out: Console, segments: Sequence[SegmentFound]) -> None:
    """Show the segments of a run, one line each."""
    if not segments:
        return
    columns = ("log", "timeline", "records", "size", "note")
    made = table(columns, right=("timeline", "records", "size"))
    for segment in segments[-_ROWS_MAX:]:
        made.add_row(
            f"steps {segment.after + 1} to {segment.last}",
            str(segment.timeline),
            str(len(segment.heads)),
            in_words(segment.size_bytes),
            label(segment.problem or ("lossy" if segment.lossy else ""), "yellow"),
        )
    out.print(made)
    left_out(out, len(segments), _ROWS_MAX)


def show_records(out: Console, records: Sequence[RecordHead]) -> None:
    """Show the records of a segment, one line each."""
    if not records:
        return
    made = table(("record", "step", "update"), right=("step", "update"))
    for head in records[:_ROWS_MAX]:
        what = f"update of {head.declared}" if head.declared else str(head.kind)
        made.add_row(label(what), str(head.step), str(head.lsn))
    out.print(made)
    left_out(out, len(records), _ROWS_MAX)
