"""State of a step whose tensors are read when they are needed: it may be larger than memory."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from everstep.errors import RecoveryError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.look.load import TIMEOUT_S, Built, Loaded, Patterns, Place, build, reading_run
from everstep.restore.load import Reads, contents
from everstep.restore.offline.load import load_job
from everstep.run import BaseFound
from everstep.run.open_base import open_ranks
from everstep.state.layout import OBJECT_PREFIX, Entry
from everstep.state.values.tensors import empty_like_entry
from everstep.tiers import TierOptions

Reader = Callable[[Collection[str]], Mapping[str, torch.Tensor]]


class OpenState:
    """State of a step, verified as it is read.

    Args:
        outline: the state, with tensors on the meta device.
        entries: entry of each of these tensors, by its ``id()``.
        read: returns tensors by the names of their entries.

    Attributes:
        outline: the state, with tensors on the meta device. Names of one tensor have one object.
    """

    def __init__(self, outline: Loaded, entries: Mapping[int, Entry], read: Reader) -> None:
        self.outline = outline
        self._entries = entries
        self._read = read

    def read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of tensors of the outline, on the CPU.

        Raises:
            DamageError, FormatError, StorageError: they cannot be read.
            RecoveryError: the base was deleted since the state was opened.
        """
        names = [self._entries[id(one)].name for one in tensors]
        found = self._read(set(names))
        return [found[name] for name in names]


@contextlib.contextmanager
def open_state(
    path: str | os.PathLike[str] | TierOptions,
    step: int | None = None,
    only: str | Sequence[str] | None = None,
) -> Iterator[OpenState]:
    """Open the state of a run as :func:`everstep.load` does, and read its tensors later.

    Tensors are read when they are asked for, unless steps of the log are replayed or the base was
    captured over several steps: then the whole state is built in memory first.

    Args:
        path, step, only: as of :func:`everstep.load`.

    Raises:
        As of :func:`everstep.load`.
    """
    patterns = Patterns.of(only, None, step, None)
    place = Place.of(path)
    with reading_run(place.run), contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        built = build(place, step, lambda name: False, ring)
        entries = built.entries
        held = built.rebuilt.state.tensors
        read: Reader = functools.partial(_held, held)
        if not held:  # a base of which any tensor can be read alone
            base = _base_of(built)
            read = functools.partial(_read, built, base, Reads(ring, TIMEOUT_S))
            entries = entries or _entries_of(built, base)
        by_id = dict[int, Entry]()

        def outlined(entry: Entry) -> torch.Tensor:
            tensor = empty_like_entry(entry, "meta")
            by_id[id(tensor)] = entry
            return tensor

        yield OpenState(built.loaded(patterns, outlined, entries), by_id, read)


def _held(held: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: held[name] for name in names}


def _base_of(built: Built) -> BaseFound:
    return next(one for one in built.present.inventory.bases if one.id == built.rebuilt.base)


def _entries_of(built: Built, base: BaseFound) -> dict[str, Entry]:
    """Return the entries of a base of one rank, by each of their names."""
    with open_ranks(built.present.filesystem, base) as (opened,):
        entries = contents(opened)[1].items()
    return {name: one for name, one in entries if not one.name.startswith(OBJECT_PREFIX)}


def _read(
    built: Built, base: BaseFound, reads: Reads, names: Collection[str]
) -> dict[str, torch.Tensor]:
    try:
        job = load_job(built.present.filesystem, base, reads, wanted=names.__contains__)
    except FileNotFoundError as error:
        raise RecoveryError(
            f"the base of {base.id} was deleted while it was read",
            step=base.id.step,
            path=base.path,
            hint="a training process that runs deletes old bases: choose another step",
        ) from error
    return job.whole()[0].tensors
