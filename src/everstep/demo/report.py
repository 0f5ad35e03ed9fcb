"""Result of a demo, as plain data.

Evidence of a kill: files on disk, seen in plain directory listings, and bases in memory.

A keeper that survived keeps writing during the survey. Then two facts stay true: the base that it
holds in memory, and that a file which was seen existed. Files that are missing prove nothing.

Verdict: both runs are compared, and each recovery with the evidence. Three witnesses, independent
of each other: the bytes of both final checkpoints, read with the safetensors library; the live
state as each process described it at its end; and every loss computed on the way, including those
computed twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from everstep.demo.plan import AFTER_CAPTURED, DemoPlan, Kill, logs
from everstep.errors import FormatError, RecoveryError
from everstep.format import MANIFEST
from everstep.format.names import (
    BASE_DIR,
    CONDEMNED,
    DELETING,
    TEMPORARY_SUFFIX,
    marker_name,
    parse_base,
    shard_name,
)
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.workloads.comparison import Difference


@dataclass(frozen=True, slots=True)
class Survey:
    """The bases of a run: on disk, by their file names, and in memory.

    Attributes:
        committed: newest step with a manifest, which must be recoverable; 0 if there is none.
        unfinished: a newer base without a manifest, whose write was interrupted, or None.
        files: names in that base's directory, sorted.
        held: step of the base in the memory of a keeper that survived, which must be
            recoverable, too; None without a keeper.
    """

    committed: int
    unfinished: int | None
    files: tuple[str, ...]
    held: int | None = None

    def describe(self) -> str:
        """Return the newest base on disk, the state of an unfinished one, the base in memory."""
        parts = [f"base {self.committed} on disk" if self.committed else "no base on disk"]
        if self.unfinished is not None and self.unfinished != self.held:
            found = {
                "temporary file": any(name.endswith(TEMPORARY_SUFFIX) for name in self.files),
                "data": shard_name(0) in self.files,
                "marker": marker_name(0) in self.files,
                "no manifest": True,
            }
            kinds = ", ".join(kind for kind, there in found.items() if there)
            parts.append(f"base {self.unfinished}: {kinds}")
        if self.held is not None:
            parts.append(f"base {self.held} in memory")
        return "; ".join(parts)


def survey(run: Path, held: int | None = None) -> Survey:
    """List the run folder ``run``, which may not exist yet; open no file.

    Args:
        held: step of the base that the keeper reports to have in memory.
    """
    committed = 0
    unfinished: int | None = None
    files: tuple[str, ...] = ()
    for step, folder in sorted(_bases(run)):
        try:
            names = tuple(sorted(item.name for item in folder.iterdir()))
        except FileNotFoundError:
            continue  # deleted by a living keeper, which has newer ones
        if MANIFEST in names:
            committed = max(committed, step)
        elif CONDEMNED not in names and DELETING not in names:
            unfinished = step
            files = names
    if unfinished is None or unfinished <= committed:
        # An older one was abandoned for a newer base, or is being deleted.
        return Survey(committed, None, (), held)
    return Survey(committed, unfinished, files, held)


def final_base(run: Path, step: int) -> Path:
    """Return the directory of the committed base of ``step`` in the newest timeline with one.

    Raises:
        RecoveryError: when there is none.
    """
    found = [folder for at, folder in _bases(run) if at == step and (folder / MANIFEST).is_file()]
    if not found:
        raise RecoveryError(f"{run} holds no committed base of step {step}", step=step)
    return max(found)


def _bases(run: Path) -> list[tuple[int, Path]]:
    folders = run.glob(f"timeline-*/{BASE_DIR}/*")
    return [(step, path) for path in folders if (step := parse_base(path.name)) is not None]


_SAME_IN_JSON = ("resume_s", "back_s", "exact", "evidence", "source")


@dataclass(frozen=True, slots=True)
class KillReport:
    """One kill and the resume after it.

    Attributes:
        kill: as it happened.
        left: bases on disk and in the memory of a surviving keeper, right after the kill.
        reached: last step that the process had finished.
        recovered: step from which the next process went on.
        resume_s: seconds spent in ``resume()``.
        back_s: seconds from the death to the end of ``resume()``, with the start of Python
            and torch.
        exact, evidence: the claim of the recovery.
        source: origin of the state: ``"memory"`` of the keeper, or ``"disk"``.
    """

    kill: Kill
    left: Survey
    reached: int
    recovered: int
    resume_s: float
    back_s: float
    exact: bool
    evidence: str
    source: str

    @property
    def lost(self) -> int:
        """Finished steps that had to be taken again."""
        return self.reached - self.recovered

    def as_json(self) -> dict[str, Any]:
        """Return the kill as plain data, for ``--json``."""
        return {
            "where": self.kill.where,
            "died": self.kill.died,
            "planned_step": self.kill.step,
            "planned_fraction": self.kill.fraction,
            "left": self.left.describe(),
            "files": list(self.left.files),
            "committed_step": self.left.committed,
            "held_step": self.left.held,
            "reached_step": self.reached,
            "recovered_step": self.recovered,
            "lost_steps": self.lost,
            **{name: getattr(self, name) for name in _SAME_IN_JSON},
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Result of a demo.

    Attributes:
        plan: as it was carried out.
        kills: in their order.
        compared: number of things of each kind that were compared, in words.
        differences: everything that differs, checkpoint entries first.
        loss_first, loss_last: of the undisturbed run.
        seconds: duration of everything.
    """

    plan: DemoPlan
    kills: tuple[KillReport, ...]
    compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    loss_first: float
    loss_last: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``."""
        plan = self.plan
        return {
            "identical": not self.differences,
            "seed": plan.training.seed,
            "steps": plan.training.steps,
            "every": plan.every,
            "method": plan.method,
            "params": plan.model.params,
            "kills": [row.as_json() for row in self.kills],
            "compared": list(self.compared),
            "differences": [dataclasses.asdict(item) for item in self.differences],
            **{name: getattr(self, name) for name in ("loss_first", "loss_last", "seconds")},
        }


LOST_STEPS_MAX = 1  # with a log: the step in flight


class StoredEntry(NamedTuple):
    """An entry as the safetensors library reads it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_base(folder: Path) -> dict[str, StoredEntry]:
    """Read all entries of a base's shards, with the safetensors library only.

    Raises:
        FormatError: when there is no shard, or one is no safetensors file.
    """
    entries: dict[str, StoredEntry] = {}
    for path in sorted(folder.glob("rank-*.safetensors")):
        try:
            found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise FormatError(f"no safetensors file: {error}", path=path) from error
        for name, view in found:
            entries[name] = StoredEntry(view["dtype"], tuple(view["shape"]), bytes(view["data"]))
    if not entries:
        raise FormatError("a base without entries", path=folder)
    return entries


def compare_entries(
    expected: Mapping[str, StoredEntry], found: Mapping[str, StoredEntry]
) -> list[Difference]:
    """Compare names, dtypes, shapes and bytes of two checkpoints."""
    return [
        Difference("checkpoint", name, _detail(expected.get(name), found.get(name)))
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    ]


def _detail(a: StoredEntry | None, b: StoredEntry | None) -> str:
    if a is None or b is None:
        return "only in the " + ("killed" if a is None else "uninterrupted") + " run"
    if (a.dtype, a.shape, len(a.data)) != (b.dtype, b.shape, len(b.data)):
        return f"{a.dtype} {list(a.shape)} != {b.dtype} {list(b.shape)}"
    width = DTYPE_BYTES.get(a.dtype, 1)
    pairs = [(a.data[i : i + width], b.data[i : i + width]) for i in range(0, len(a.data), width)]
    differing = [index for index, (left, right) in enumerate(pairs) if left != right]
    left, right = pairs[differing[0]]
    return (
        f"{len(differing)} of {len(pairs)} elements; element {differing[0]}: "
        f"0x{left[::-1].hex()} != 0x{right[::-1].hex()}"
    )


def broken_promises(kills: Sequence[KillReport], method: str) -> list[Difference]:
    """List the kills after which a committed or captured base did not come back from its place."""
    details = [(number, _broken_promise(report, method)) for number, report in enumerate(kills, 1)]
    return [Difference("recovery", f"kill {number}", text) for number, text in details if text]


def _broken_promise(report: KillReport, method: str) -> str | None:
    left = report.left
    back = f"step {report.recovered} came back, from {report.source}"
    captured = report.kill.where == AFTER_CAPTURED and not logs(method)
    if left.held is None and report.source == "memory":
        return f"{back}, but no keeper had it in memory"
    if logs(method) and report.lost > LOST_STEPS_MAX:
        return f"every step was logged and step {report.reached} was reached, but {back}"
    # Right after a capture, memory is the only certain place of the newest base.
    from_elsewhere = captured and report.source != "memory"
    if left.held is not None and (report.recovered < left.held or from_elsewhere):
        return f"base {left.held} was in the memory of a keeper that survived, but {back}"
    if report.recovered < left.committed:
        return f"base {left.committed} was committed, but {back}"
    if report.recovered > report.reached:
        return f"step {report.reached} was the last, but {back}"
    return None
