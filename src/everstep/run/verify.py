"""Verification of a base: read back every byte, and check records, digests and contents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.errors import DamageError, FormatError
from everstep.format.names import marker_name
from everstep.format.reader import read_body, read_record_bytes
from everstep.format.writer import ChunkRing
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.progress import ProgressSink

__all__ = ["Damage", "Verdict", "verify_base"]


_UNFIT = (
    "the bytes are as they were written, but when the ranks wrote the base they disagreed about "
    "the tensors that they share"
)


@dataclass(frozen=True, slots=True)
class Damage:
    """A problem found in a base.

    Attributes:
        path: the file.
        entry: the damaged entry; None if the problem concerns the whole file.
        unreadable: the file system returned no bytes, so their condition is unknown.
        unfit: all bytes are as written, but the files of the ranks contradict each other.
    """

    path: str
    entry: str | None
    problem: str
    unreadable: bool = False
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of reading a base back; the base is good if ``damages`` is empty."""

    entries: int
    size_bytes: int
    damages: tuple[Damage, ...]


def verify_base(
    filesystem: FileSystem,
    base: BaseFound,
    ring: ChunkRing,
    *,
    timeout_s: float,
    progress: ProgressSink,
    contents: Callable[[Sequence[OpenBase]], object] = lambda opened: None,
) -> Verdict:
    """Read and verify every byte of a base that has a manifest, or whose markers yield one.

    Args:
        contents: called with the files of all ranks, to check the meaning of the bytes as well
            (:func:`everstep.restore.load.load.check_contents`, which needs torch); raises the same
            errors as :class:`OpenBase`.
    """
    assert base.manifest is not None
    damages = [Damage(str(base.path), None, base.problem)] if base.problem else []
    entries = size_bytes = 0

    def note(path: str, error: Exception) -> None:
        entry = error.entry if isinstance(error, DamageError) else None
        if isinstance(error, OSError):
            message = error.strerror or str(error)
        else:
            message = error.message if isinstance(error, FormatError | DamageError) else str(error)
        damages.append(Damage(path, entry, message, isinstance(error, OSError)))

    for marker in base.manifest.markers:
        record_path = base.path / marker_name(marker.rank)
        try:
            if read_record_bytes(filesystem, record_path) != marker.encode():
                raise DamageError(f"{record_path}: differs from the marker listed in the manifest")
        except (DamageError, FormatError, OSError) as error:
            note(str(record_path), error)
        try:
            opened = OpenBase.open(filesystem, base, marker.rank)
        except (DamageError, FormatError, OSError) as error:
            of = error.filename if isinstance(error, OSError) else error.path
            note(str(of or base.path), error)
            continue
        try:
            for file, record, header, path in opened.files:
                entries += len(header.placed)
                size_bytes += record.length
                found: list[DamageError] = []
                try:
                    read_body(
                        file,
                        header,
                        record,
                        path,
                        ring,
                        timeout_s=timeout_s,
                        progress=progress,
                        on_damage=found.append,
                    )
                except (DamageError, FormatError, OSError) as error:
                    note(str(path), error)
                for damage in found:
                    note(str(path), damage)
        except (DamageError, FormatError, OSError) as error:
            note(str(base.path), error)
        finally:
            opened.close()
    if not damages:
        try:
            with contextlib.ExitStack() as stack:
                ranks = []
                for marker in base.manifest.markers:
                    ranks.append(OpenBase.open(filesystem, base, marker.rank))
                    stack.callback(ranks[-1].close)
                contents(ranks)
        except (DamageError, FormatError, OSError) as error:
            if len(base.manifest.markers) == 1 or isinstance(error, OSError):
                note(str(base.path), error)
            else:
                problem = f"{_UNFIT}: {error.message}"
                damages.append(
                    Damage(str(base.path), getattr(error, "entry", None), problem, unfit=True)
                )
    return Verdict(entries, size_bytes, tuple(damages))
