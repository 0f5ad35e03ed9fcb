"""everstep itself, by its public interface: ``step()`` that takes a base, and ``resume()``.

The clock stops when the commit record's name is durable, which is seen at the file-system
seam. What a save does after that (retention, which reads the base back) is timed apart.
"""

from __future__ import annotations

import shutil
from pathlib import Path, PurePath
from typing import Any

from everstep.checkpointer import Checkpointer
from everstep.errors import EverstepError
from everstep.format.names import BASE_DIR, MANIFEST, parse_timeline
from everstep.seams import PosixFileSystem, Seams, WriteFile
from everstep_bench.harness.figures import Role
from everstep_bench.harness.gauges import Instant, Sample, now
from everstep_bench.harness.machine import drop_cache
from everstep_bench.harness.running import quiet
from everstep_bench.persist.arms import Arm, Column
from everstep_bench.persist.state import BenchState

_UNTIL_RECYCLED = 3  # the first base is kept, the second too until it is read back
_KEEP_ALL = 1_000_000


class CommitWatch(PosixFileSystem):
    """The real file system, which notes when a commit record became durable.

    Attributes:
        committed: when, of the newest one.
        reused: files that were overwritten so far instead of made anew.
    """

    def __init__(self) -> None:
        self.committed: Instant | None = None
        self.reused = 0
        self._written: PurePath | None = None

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Renames, and remembers where a commit record got its name."""
        super().rename(source, target)
        if target.name == MANIFEST:
            self._written = target.parent

    def sync_dir(self, path: PurePath) -> None:
        """Makes names durable; with that of a commit record the base is committed."""
        super().sync_dir(path)
        if path == self._written:
            self.committed = now()
            self._written = None

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        """Opens a file for overwriting, and counts it."""
        file = super().reuse(path, direct=direct)
        self.reused += file is not None
        return file


class OursWrite(Arm):
    """Saves the live state with ``method="sync"``.

    Args:
        column: ``fresh``: every base into new files. ``recycled``: ``keep=1``, so that each
            base is written over the files of the one before the last.
        run: the run folder; is kept, with its newest base, when the arm is closed.
    """

    role: Role = "ours"

    def __init__(self, column: Column, state: BenchState, run: Path) -> None:
        assert column in ("fresh", "recycled")
        self.column: Column = column
        self.name = "everstep"
        self.detail = 'method="sync", ' + ("keep=1" if column == "recycled" else "new files")
        self._run = run
        self._state = state
        self._watch = CommitWatch()
        self._checkpointer: Checkpointer | None = None

    def open(self) -> None:
        """Begins the run; saves until files are recycled, if they are to be."""
        recycled = self.column == "recycled"
        with quiet():
            self._checkpointer = Checkpointer(
                self._run,
                self._state.parts(),
                method="sync",
                every=1,
                keep=1 if recycled else _KEEP_ALL,
                seams=Seams(filesystem=self._watch),
            )
        for _ in range(_UNTIL_RECYCLED if recycled else 0):
            self._checkpointer.step()

    def run(self) -> Sample:
        """Saves once.

        Raises:
            EverstepError: also when files were recycled that should be new, or the reverse.
        """
        assert self._checkpointer is not None
        reused = self._watch.reused
        self._watch.committed = None
        begin = now()
        self._checkpointer.step()
        returned = now()
        stats = self._checkpointer.stats()
        if self._watch.committed is None or stats.durable_step != stats.step:
            raise EverstepError("the save came back and nothing was committed", step=stats.step)
        if (self._watch.reused > reused) != (self.column == "recycled"):
            raise EverstepError(f"the files of this save were not {self.column}", step=stats.step)
        return Sample.between(begin, self._watch.committed, returned)

    def clean(self) -> None:
        """Deletes fresh files."""
        if self.column == "fresh":
            self._delete_bases()

    def close(self) -> None:
        """Closes the run; its folder stays."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _delete_bases(self) -> None:
        for timeline in self._run.iterdir():
            if parse_timeline(timeline.name) is not None and (timeline / BASE_DIR).is_dir():
                for base in (timeline / BASE_DIR).iterdir():
                    shutil.rmtree(base)


class OursRead(Arm):
    """Resumes into the live tensors; every byte is verified on the way.

    Args:
        run: a run folder with a base of ``state``.
    """

    role: Role = "ours"
    column: Column = "read"
    name = "everstep"
    detail = "resume() into live tensors, verified"

    def __init__(self, state: BenchState, run: Path) -> None:
        self._state = state
        self._run = run
        self._checkpointer: Checkpointer | None = None

    def prepare(self) -> None:
        """A new Checkpointer, nothing in the cache, zeros in the tensors."""
        with quiet():
            self._checkpointer = Checkpointer(
                self._run, self._state.parts(), method="sync", every=None, keep=1
            )
        drop_cache(self._run)
        self._state.blank()

    def run(self) -> Sample:
        """Resumes once."""
        assert self._checkpointer is not None
        with quiet():
            begin = now()
            recovery: Any = self._checkpointer.resume()
            end = now()
        if recovery.source != "disk" or recovery.skipped:
            raise EverstepError(f"resumed from {recovery.source}, skipped {recovery.skipped}")
        self._state.check(self._state.flat(), self.name)
        return Sample.between(begin, end)

    def clean(self) -> None:
        """Closes the Checkpointer."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
