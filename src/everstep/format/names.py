"""Names of the files of a run, and their parsing.

Numbers are written with leading zeros, so that names sort as numbers do. A name that does not parse
is not everstep's: such a file is left alone and never opened.
"""

from __future__ import annotations

import re
from pathlib import PurePath

FORMAT_VERSION = 1

RUN_RECORD = "run.json"
TIMELINE_RECORD = "timeline.json"
MANIFEST = "manifest.json"
AUDIT_RECORD = "audit.json"
ANNOTATIONS = "annotations.json"
PIN_RECORD = "pin.json"
CONDEMNED = "manifest.condemned"
DELETING = "manifest.deleting"
RECORDS_OF_BASE = (ANNOTATIONS, PIN_RECORD, AUDIT_RECORD, MANIFEST, CONDEMNED, DELETING)
"""Records in the directory of a base, beside markers, in the order in which they are deleted."""

BASE_DIR = "base"
LOG_DIR = "log"
LOSSY_DIR = "lossy"
SLOTS_DIR = "slots"
TEMPORARY_SUFFIX = ".tmp"

# ASCII: \d would match digits of all scripts, and int() accepts them.
_TIMELINE = re.compile(r"timeline-(\d{5,9})", re.ASCII)
# As a separate word: "database" or "logits" is not a renamed directory of everstep.
_PART = re.compile(rf"(?<![A-Za-z])({BASE_DIR}|{LOG_DIR}|{LOSSY_DIR})(?![A-Za-z])")
_STEP = re.compile(r"(\d{12,18})", re.ASCII)
_SEGMENT = re.compile(r"(\d{12,18})-(\d{12,18})", re.ASCII)
_SHARD = re.compile(r"rank-(\d{5,9})(?:-(\d{5,9}))?\.safetensors", re.ASCII)
_MARKER = re.compile(r"rank-(\d{5,9})\.done", re.ASCII)


def timeline_dir(run: PurePath, timeline: int) -> PurePath:
    """``RUN/timeline-00002``"""
    return run / f"timeline-{timeline:05d}"


def base_dir(run: PurePath, timeline: int, step: int) -> PurePath:
    """``RUN/timeline-00002/base/000000001200``"""
    return timeline_dir(run, timeline) / BASE_DIR / f"{step:012d}"


def segment_dir(
    run: PurePath, timeline: int, after: int, last: int, *, lossy: bool = False
) -> PurePath:
    """``RUN/timeline-00002/log/000000001200-000000001205``: steps (1200, 1205]

    Args:
        lossy: segment with approximate gradients. It lies under ``lossy`` instead, so that readers
            that do not know of them never take them for the gradients that training consumed.
    """
    kind = LOSSY_DIR if lossy else LOG_DIR
    return timeline_dir(run, timeline) / kind / f"{after:012d}-{last:012d}"


def shard_name(rank: int, part: int = 0) -> str:
    """``rank-00000.safetensors``; further files of a rank are ``rank-00000-00001.safetensors``."""
    return f"rank-{rank:05d}{f'-{part:05d}' if part else ''}.safetensors"


def marker_name(rank: int) -> str:
    """``rank-00000.done``"""
    return f"rank-{rank:05d}.done"


def parse_timeline(name: str) -> int | None:
    """Return the timeline of a directory name; None if it is not a timeline."""
    return _number(_TIMELINE, name, "timeline-{:05d}")


def parse_renamed_timeline(name: str) -> int | None:
    """Return the timeline whose directory was renamed (``timeline-00001.bak``).

    None for a name that contains no timeline's name, or is one.
    """
    match = _TIMELINE.search(name)
    return None if match is None or parse_timeline(name) is not None else int(match[1])


def parse_renamed_part(name: str) -> str | None:
    """Return the directory of a timeline that was renamed (``base.bak``).

    None for a name that contains no such directory's name, or is one.
    """
    match = _PART.search(name)
    return None if match is None or match[0] == name else match[0]


def parse_base(name: str) -> int | None:
    """Return the step of a base directory; None if it is not one."""
    return _number(_STEP, name, "{:012d}")


def parse_segment(name: str) -> tuple[int, int] | None:
    """Return ``(after, last)``, the steps of a log segment; None if it is not one."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    after = int(match[1])
    last = int(match[2])
    return (after, last) if name == f"{after:012d}-{last:012d}" and after < last else None


def parse_marker(name: str) -> int | None:
    """Return the rank of a marker; None if it is not one."""
    return _number(_MARKER, name, "rank-{:05d}.done")


def parse_shard(name: str) -> tuple[int, int] | None:
    """Return ``(rank, number)`` of a shard; None if it is not one."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    rank = int(match[1])
    part = int(match[2] or 0)
    return (rank, part) if shard_name(rank, part) == name else None


def parse_rank(name: str) -> int | None:
    """Return the rank of a shard or marker; None if it is neither."""
    shard = parse_shard(name)
    return parse_marker(name) if shard is None else shard[0]


def _number(pattern: re.Pattern[str], name: str, form: str) -> int | None:
    match = pattern.fullmatch(name)
    # One spelling per number: otherwise "timeline-000001" would be timeline 1 a second time.
    if match is None or form.format(int(match[1])) != name:
        return None
    return int(match[1])
