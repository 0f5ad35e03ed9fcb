"""Complete a multi-step base: replay the updates that each of its parts has not seen.

*State at LSN v = each entry e at its LSN v_e + the records v_e + 1 .. v that concern e* (a fuzzy
checkpoint; GoCkpt section 4.3.1). Live objects are completed by their own optimizers, on their own
devices; without the program it is done on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from everstep.errors import AuditError, FormatError, ReplayError
from everstep.format import TimelineRecord
from everstep.format.log import LogRecord
from everstep.restore.load import LoadedBase, Reads, rank_contents
from everstep.restore.offline.memory import HostMemory
from everstep.restore.redo import (
    LiveMemory,
    ReplayDriver,
    Step,
    fingerprint_difference,
    parameter_names,
)
from everstep.restore.redo.driver import Memory
from everstep.run import OpenBase
from everstep.run.open_base import RedoRecords, read_redo_file
from everstep.state.layout import GRADIENT
from everstep.state.providers import OptimizerProvider
from everstep.state.training_state import State
from everstep.state.values.tree import references


def complete_live_base(
    opened: OpenBase,
    loaded: LoadedBase,
    state: State,
    reads: Reads,
    trained: TimelineRecord | None,
) -> tuple[LoadedBase, str]:
    """Bring a live state to the step of the multi-step base that was just loaded into it.

    Args:
        opened: files of the base.
        loaded: result of loading the base.
        state: live state.
        reads: how to read.
        trained: record of its timeline, which names the conditions of training.

    Returns:
        The updated result; and the reason why the state is inexact, "" if it is exact.

    Raises:
        DamageError, FormatError: the updates cannot be read, or are not of this base.
        ReplayError: they do not fit the state, or give other values than training had.
    """
    step = opened.marker.step
    if loaded.mismatches:
        raise ReplayError(
            "a multi-step base can only be restored completely: "
            f"{loaded.mismatches[0][0]!r} was left out",
            step=step,
            hint="resume() without strict=False, or from a base captured in one step",
        )
    if loaded.tied:
        raise ReplayError(
            "a multi-step base can only be restored if tensors are tied as they were: "
            f"{loaded.tied[0]}",
            step=step,
            hint="build the model with the same tied weights as when it was saved",
        )
    memory = LiveMemory(state, loaded.restrided, loaded.aliases, loaded.names)
    records = _records(opened, loaded.shape, reads)
    inexact = fingerprint_difference([trained]) if records.updates else ""
    notes, why = _complete(memory, records, inexact)
    notes = [*loaded.notes, *notes]
    return replace(loaded, notes=tuple(notes), redone=len(records.updates)), why


def complete_offline_base(
    opened: OpenBase, memory: HostMemory, reads: Reads, inexact: str
) -> tuple[int, str]:
    """Bring a state in host memory to the step of the multi-step base that was read into it; of a
    base of several ranks the share of one of them.

    Args:
        opened: files of the rank.
        memory: state that was read from them.
        reads: how to read.
        inexact: why replay here need not give the bits of training; "" if it must.

    Returns:
        The number of updates that some part had not seen; and the reason why the state is inexact,
        "" if it is exact.

    Raises:
        DamageError, FormatError: the updates cannot be read, or are not of this base.
        ReplayError, UnsupportedStateError: they do not fit the state, or give other values than
            training had.
    """
    records = _records(opened, memory.state.shape, reads)
    _, why = _complete(memory, records, inexact, own=opened.marker.world > 1)
    if not records.updates:
        return 0, ""
    return len(records.updates), why or next(iter(memory.surprises), "")


def _complete(
    memory: Memory, records: RedoRecords, inexact: str, *, own: bool = False
) -> tuple[list[str], str]:
    """Replay the records of a redo file; return notes, and the reason why the state is inexact."""
    driver = ReplayDriver(memory)
    driver.step(Step.of(records.updates, records.mark, own=own))
    notes = driver.finish()
    # The samples show a write that bypassed the optimizers between the capture of two parts.
    if not inexact:
        try:
            driver.compare()
        except AuditError as error:
            raise ReplayError(
                f"its parts cannot be brought to one step: {error.message}", step=error.step
            ) from error
    return notes, inexact or driver.exactness.why


def _records(opened: OpenBase, shape: str, reads: Reads) -> RedoRecords:
    assert opened.redo is not None
    path = opened.redo.path
    records = read_redo_file(
        opened.redo, reads.ring, timeout_s=reads.timeout_s, progress=reads.progress
    )
    if records.mark.head.shape != shape:
        raise FormatError(
            f"{path}: its updates belong to a state of another composition", path=path
        )
    _check_seen(opened, records.updates)
    return records


def _check_seen(opened: OpenBase, updates: Iterable[LogRecord]) -> None:
    """Refuse an update of a parameter that was captured after it, which would be applied twice, and
    a parameter that was captured at another update than its optimizer's state."""
    trees, entries = rank_contents(opened)
    lsns = {name: entry.lsn for name, entry in entries.items()}
    named = {
        name: entries_of
        & lsns.keys()  # trees of several ranks also name entries that other ranks wrote
        for name, entries_of in parameter_names(
            trees, lambda name: entries[name].name if name in entries else name
        ).items()
    }
    for tree in trees.values():
        if OptimizerProvider.groups_of(tree) is not None:
            _check_together(tree["state"], named, lsns, opened)
    # An update applied twice gives a wrong state that no digest reveals.
    for record in updates:
        for place in record.layout.placed:
            if not place.entry.name.startswith(GRADIENT):
                continue
            for entry in named.get(place.entry.name.removeprefix(GRADIENT), ()):
                if lsns[entry] >= record.head.lsn:
                    raise FormatError(
                        f"{opened.shards[0][3].parent}: {record.head} has a gradient for {entry!r},"
                        f" which was captured after update {lsns[entry]}",
                        path=opened.shards[0][3],
                    )


def _check_together(
    held: object,
    named: Mapping[str, set[str]],
    lsns: Mapping[str, int],
    opened: OpenBase,
) -> None:
    for name, values in held.items() if isinstance(held, Mapping) else ():
        mine = lsns.keys() & {*named.get(name, ()), *references(values)}
        if len({lsns[entry] for entry in mine}) > 1:
            raise FormatError(
                f"{opened.shards[0][3].parent}: the parameter {name!r} and its optimizer's state "
                "were captured at different updates",
                path=opened.shards[0][3],
            )
