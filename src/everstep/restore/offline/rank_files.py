"""Read one rank's files of a base into host memory, every byte verified.

The parts of a multi-step base (``docs/design/multistep.md``) are brought to the step of the base by
replay of the updates that each has not seen: *state at LSN v = each entry e at its LSN v_e + the
records v_e + 1 .. v that concern e* (a fuzzy checkpoint; GoCkpt section 4.3.1). Live objects are
completed by their own optimizers, on their own devices; without the program, the files of each rank
are completed by themselves, on the CPU, as its keeper would have done. A rank's files hold the
parameters that it writes, their state and the gradients of these, so neither the present number of
ranks nor their layout matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from everstep.errors import (
    AuditError,
    FormatError,
    ReplayError,
    UnavailableError,
    UnsupportedStateError,
)
from everstep.format import TimelineRecord
from everstep.format.log import LogRecord
from everstep.replay import ReplayOptions
from everstep.restore.load import LoadedBase, Reads, contents, rank_contents
from everstep.restore.load.targets import Fill
from everstep.restore.offline.memory import HostMemory, OfflineState
from everstep.restore.redo import (
    LiveMemory,
    ReplayDriver,
    Step,
    fingerprint_difference,
    parameter_names,
    replay_conditions,
)
from everstep.restore.redo.driver import Memory
from everstep.run import OpenBase
from everstep.run.open_base import RedoRecords, read_redo_file
from everstep.run.tensors import shape_of_base
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes import available_cores
from everstep.state.layout import GRADIENT, OBJECT_PREFIX, Entry, Placed
from everstep.state.layout.shards import overlaps
from everstep.state.providers import OptimizerProvider
from everstep.state.training_state import State
from everstep.state.values.tensors import empty_like_entry, host_bytes
from everstep.state.values.tree import references

_ALIVE_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class CompletedFiles:
    """State in one rank's files of a base, all of it at the step of the base.

    Attributes:
        memory: tensors and objects, ready for replay.
        updates: number of updates that some part had not seen; 0 for a base captured in one step.
        doubt: reason why the state is inexact; "" if it is exact.
    """

    memory: HostMemory
    updates: int = 0
    doubt: str = ""

    def digests(self) -> dict[str, str]:
        """Return the digests of all entries, by name."""
        return self.memory.state.digests()

    def fill(self, fills: Iterable[Fill]) -> set[str]:
        """Copy pieces of these files to their targets; return the names of their entries."""
        names = set()
        for one in fills:
            one.copy(self.memory.state.bytes_of(one.piece.entry.name))
            names.add(one.piece.entry.name)
        return names


def complete_rank_files(
    opened: OpenBase,
    reads: Reads,
    trained: TimelineRecord | None,
    alive: Callable[[], None] = lambda: None,
) -> CompletedFiles:
    """Read one rank's files of a multi-step base, and replay the updates that its parts have not
    seen, in another thread.

    Args:
        opened: files of the rank, with a redo file.
        reads: how to read.
        trained: record of its timeline, which names the conditions of training.
        alive: called every half second.

    Raises:
        DamageError, FormatError: the files cannot be read or completed.
        UnavailableError: there is not enough memory.
        OSError: the files cannot be read.
    """
    marker = opened.marker
    options = ReplayOptions(min(2, len(available_cores())))
    # Leaving the block waits for the thread, also after an error of alive(): nothing reads on in
    # the background.
    with ThreadPoolExecutor(1, "everstep-complete") as thread:
        found = thread.submit(read_rank_files, opened, reads, trained, options)
        # The thread reads and replays; this one reports that the rank is alive.
        while wait([found], _ALIVE_S).not_done:
            alive()
    try:
        return found.result()
    except (ReplayError, UnsupportedStateError) as error:
        raise FormatError(
            f"the files of rank {marker.rank}: {error.message}",
            step=marker.step,
            rank=marker.rank,
            path=opened.shards[0][3],
        ) from error


def read_rank_files(
    opened: OpenBase,
    reads: Reads,
    trained: TimelineRecord | None,
    options: ReplayOptions,
    wanted: Callable[[str], bool] | None = None,
) -> CompletedFiles:
    """Read one rank's files, and bring the parts of a multi-step base to the step of the base.

    Args:
        opened: files of the rank.
        reads: how to read.
        trained: record of the base's timeline, which names the conditions of training.
        options: options of the replay.
        wanted: predicate on names that selects tensors; nothing can be replayed on the others.
            None: all tensors, as for multi-step bases in any case.

    Raises:
        DamageError, FormatError: the files are damaged or invalid.
        ReplayError, UnsupportedStateError: a multi-step base cannot be completed.
        UnavailableError: there is not enough memory.
        OSError: the files cannot be read.
    """
    # Trees of one of several ranks also refer to entries in other ranks' files.
    trees, _ = contents(opened) if opened.marker.world == 1 else rank_contents(opened)
    # Completing a multi-step base replays updates of all its parameters.
    if opened.redo is not None:
        wanted = None
    chosen = [_chosen(h.placed, h.aliases, wanted) for _, _, h, _ in opened.shards]
    placed = [
        [header.placed[index] for index in some]
        for (_, _, header, _), some in zip(opened.shards, chosen, strict=True)
    ]
    # Before anything is allocated: an overcommitted machine would kill a process instead.
    require_memory(opened, sum(place.end - place.begin for places in placed for place in places))
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Entry] = {}
    objects: dict[str, bytearray] = {}
    aliases: dict[str, str] = {}
    for shard, some, places in zip(opened.shards, chosen, placed, strict=True):
        aliases.update(shard[2].aliases)
        targets: dict[str, memoryview] = {}
        for place in places:
            name = place.entry.name
            if name.startswith(OBJECT_PREFIX):
                objects[name] = bytearray(place.end - place.begin)
                targets[name] = memoryview(objects[name])
                continue
            entries[name] = place.entry
            tensors[name] = empty_like_entry(place.entry)
            targets[name] = host_bytes(tensors[name])
        wanted_here = None if wanted is None else some
        reads.body(shard, sink=_into(places, targets), wanted=wanted_here)
    encoded = {name: bytes(data) for name, data in objects.items()}
    shape = shape_of_base(opened.placed(), aliases, trees)
    state = OfflineState(opened.marker, entries, tensors, aliases, encoded, shape)
    if opened.redo is None:
        return CompletedFiles(HostMemory(state, trees, options))
    training_threads, inexact = replay_conditions([trained])
    memory = HostMemory(state, trees, replace(options, training_threads=training_threads))
    return CompletedFiles(memory, *complete_offline_base(opened, memory, reads, inexact))


def require_memory(opened: OpenBase, need_bytes: int) -> None:
    """Refuse to read more of a base than fits in memory.

    Raises:
        UnavailableError: it does not fit.
    """
    free_bytes = memory_available_bytes()
    if need_bytes > free_bytes:
        raise UnavailableError(
            f"the base of step {opened.marker.step} takes {need_bytes} bytes of memory; "
            f"{free_bytes} are available",
            step=opened.marker.step,
            path=opened.shards[0][3].parent,
        )


def _chosen(
    placed: Sequence[Placed],
    aliases: Mapping[str, str],
    wanted: Callable[[str], bool] | None,
) -> Sequence[int]:
    """Return the indices of the entries to read: all objects, and the tensors that are wanted under
    any of their names."""
    if wanted is None:
        return range(len(placed))
    names: dict[str, list[str]] = {}
    for other, name in aliases.items():
        names.setdefault(name, []).append(other)
    return [
        index
        for index, name in enumerate(place.entry.name for place in placed)
        if name.startswith(OBJECT_PREFIX) or any(map(wanted, (name, *names.get(name, ()))))
    ]


def _into(
    entries: Sequence[Placed], targets: Mapping[str, memoryview]
) -> Callable[[int, memoryview], None]:
    """Return a sink that copies the bytes of a body to their targets."""
    # overlaps() searches by end offsets, and requires entries with bytes.
    placed = [place for place in entries if place.end > place.begin]
    ends = [place.end for place in placed]

    def put(begin: int, piece: memoryview) -> None:
        for place, start, stop in overlaps(placed, ends, begin, piece.nbytes):
            target = targets[place.entry.name]
            target[start - place.begin : stop - place.begin] = piece[start - begin : stop - begin]

    return put


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
