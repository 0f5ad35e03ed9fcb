"""The public functions to read a run without taking it over: :func:`load` and :func:`peek`.

Both only read. A running training process is not disturbed, a keeper keeps its memory, and no
timeline is opened, so no process is fenced off.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import torch

from everstep.commit import BaseId, describe_abandoned
from everstep.commit.lineage import describe_unused
from everstep.config import is_int, named
from everstep.errors import EverstepError, OptionError, RecoveryError, StorageError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.look.keeper_memory import KeeperMemory, read_keeper_memory
from everstep.look.run_view import BaseDeletedError, RestorePoint, RunView
from everstep.restore.load.targets import restore_into
from everstep.restore.offline.rebuild import Rebuilder, Rebuilt
from everstep.restore.start.report import evidence
from everstep.run import Skipped, scan_run
from everstep.run.folder import run_path
from everstep.run.verify import describe_audit
from everstep.seams import FileSystem, PosixFileSystem, SystemClock
from everstep.seams.processes import available_cores
from everstep.state.layout import OBJECT_PREFIX, Entry
from everstep.state.providers import ModuleProvider, OptimizerProvider
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tree import join, references
from everstep.tiers import TierOptions, storage_errors
from everstep.tiers.files import TierFileSystem
from everstep.tiers.options import UrlPath, is_url, open_tier

_log = logging.getLogger("everstep")
TIMEOUT_S = 120.0
_ATTEMPTS = 8
_LISTED_MAX = 12


@dataclass(frozen=True, slots=True)
class Loaded:
    """State of one step of a run, as returned by :func:`load`.

    Attributes:
        step: step of the state.
        exact: True if the state is bit for bit that of training; as
            :attr:`everstep.Recovery.exact`.
        evidence: basis of that, in words.
        source: where the base was read: ``"disk"``, ``"memory"`` (of a keeper), or ``"object"`` (a
            copy in an object store).
        base_step: step of the base.
        replayed: number of log steps replayed on it.
        timeline: timeline of the step.
        tensors: by name (``"model/layer.weight"``); a tensor with several names appears under each.
            Empty with ``into=``.
        objects: components of the state by name, nested, with their tensors in place. A module or
            an optimizer is represented by its ``state_dict()``, plain data by its value. Components
            that ``only=`` left incomplete are missing. Empty with ``into=``.
        skipped: bases and steps that were skipped, with the reason.
        notes: further remarks.
    """

    step: int
    exact: bool
    evidence: str
    source: str
    base_step: int
    replayed: int
    timeline: int
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    objects: Mapping[str, Any] = field(repr=False)
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def state_dict(self, part: str) -> Any:
        """Return one component of the state, in the form that its ``load_state_dict()`` takes.

        Of a module from which ``only=`` left out tensors, the loaded ones are returned.

        Args:
            part: its name in the state, as in ``{"model": model}``.

        Raises:
            OptionError: it does not exist, or ``only=`` left out some of it.
        """
        if part not in self.objects:
            known = ", ".join(map(repr, self.objects)) or "none"
            there = any(name.startswith(f"{part}/") for name in self.tensors)
            why = (
                "was loaded incompletely because of only="
                if there
                else "is not among what was loaded"
            )
            raise OptionError(
                f"{part!r} {why}", step=self.step, hint=f"complete components: {known}"
            )
        return self.objects[part]


@dataclass(frozen=True, slots=True)
class Peek:
    """State that ``resume()`` would restore, as returned by :func:`peek`.

    Attributes:
        step: step that training would continue from; 0 if there is nothing to restore.
        exact: True if the state is bit for bit that of training, according to the records.
        source: where its base is: ``"disk"``, ``"memory"`` (of a keeper), ``"object"`` (a copy in
            an object store), or ``"fresh"``.
        base_step: step of the base; None without one.
        replayed: number of log steps that would be replayed on it.
        timeline: timeline of the step; None without one.
        trainer: id of a process on this machine that trains on this run; None if no keeper serves
            one.
        skipped: bases and steps that would be skipped, with the reason.
        notes: further remarks.
    """

    step: int
    exact: bool
    source: str
    base_step: int | None
    replayed: int
    timeline: int | None
    trainer: int | None = None
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


@named("load")
def load(
    path: str | os.PathLike[str] | TierOptions,
    step: int | None = None,
    only: str | Sequence[str] | None = None,
    into: MutableMapping[str, Any] | None = None,
    map_location: str | torch.device | None = None,
) -> Loaded:
    """Load the state of a run, verified, without taking the run over.

    Nothing is written, no process is disturbed, and the random generators of this process are not
    changed. It may be called during training, and between a crash and the next start, any number of
    times::

        weights = everstep.load("runs/first", only="model/*").state_dict("model")
        model.load_state_dict(weights)

    Args:
        path: the run folder, or a place of ``tiers=`` with copies: a directory or a URL.
        step: step to load, of a base or of the log; None: the newest one, which ``resume()`` of the
            complete state would restore.
        only: tensors and components to load: a pattern (``"model/*"``, ``"*.bias"``, ``"epoch"``)
            or several; None: all. Of a base nothing else is read.
        into: objects to restore into, by name, as in the state of a
            :class:`~everstep.Checkpointer`: ``{"model": model}``. The run must have all of their
            tensors with the same names, shapes and dtypes, or nothing is modified; other contents
            of the run are ignored. Tensors of modules may be selected with ``only``.
        map_location: device of the returned tensors; None: the CPU.

    Returns:
        The state. Of a run of several ranks it is that of one: sharded tensors are assembled, and
            per-rank state is that of rank 0, as ``notes`` say.

    Raises:
        RecoveryError: the step does not exist, or no intact base and log lead to it.
        OptionError: an invalid argument, or a pattern that matches nothing.
        MismatchError: ``into`` has other names, shapes or dtypes; nothing was modified.
        UnsupportedStateError: replay of the log needs the training program.
        ForeignDirectoryError: the folder holds files of something else than a run.
        StorageError: the run cannot be read.
    """
    patterns = Patterns.of(only, into, step, map_location)
    state = None if into is None else State(into, rng=False)
    place = Place.of(path)
    with reading_run(place.run), contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        built = build(place, step, patterns.takes_tensor, ring)
        if state is not None:
            return built.restored_into(state, patterns)
        tensors = built.rebuilt.state.tensors

        def taken(entry: Entry) -> torch.Tensor:
            # Popped: with map_location each tensor leaves host memory as soon as it is on the
            # device.
            tensor = tensors.pop(entry.name)
            return tensor if map_location is None else tensor.to(map_location)

        return built.loaded(patterns, taken)


@named("peek")
def peek(path: str | os.PathLike[str] | TierOptions) -> Peek:
    """Return the step that ``resume()`` of the complete state would restore, before any object
    exists.

    Reads names and records, on disk and in the memory of keepers on this machine. Data are verified
    only when they are loaded. Copies in other tiers are not considered; give their place as
    ``path`` to look there. Nothing is written and no process is disturbed.

    Args:
        path: as of :func:`load`; a missing folder counts as a fresh run.

    Raises:
        RecoveryError: ``resume()`` would refuse to start over: there is, or has been, a state that
            cannot be restored.
        OptionError: an invalid argument.
        ForeignDirectoryError: the folder holds files of something else than a run.
        StorageError: the run cannot be read.
    """
    place = Place.of(path)
    with reading_run(place.run):
        present, memory, problems = place.look()
        points = present.points(None)
        if points:
            points = present.with_files(points, None)
    trainer = next((one.trainer for one in memory.values() if one.trainer is not None), None)
    if not points:
        left = [base.id for base in present.inventory.bases]
        note = describe_unused(left, present.inventory.branches)
        problems += [] if note is None else [note]
        base = None
        end = BaseId(0, 0)
        exact = True
        source = "fresh"
    else:
        base = points[0].base.id
        end = BaseId(*points[0].chain.end)
        problems += _passed_over_note(present, base)
        exact = not present.why_not_exact(points[0])
        source = place.source_of(present, base)
    captured = {one.pending for one in memory.values()}
    newest = captured.pop() if len(captured) == 1 else None
    # Captured on all ranks but without digests, so load() cannot read it yet. resume() restores it
    # from the memory of the keepers.
    if newest is not None and newest > end and len(memory) == present.world_of(newest.timeline):
        base = newest
        end = newest
        source = "memory"
    return Peek(
        end.step,
        exact,
        source,
        None if base is None else base.step,
        0 if base is None else end.step - base.step,
        end.timeline or None,
        trainer,
        tuple(present.skipped),
        tuple(problems),
    )


class Patterns:
    """Selection of entries and sections.

    Args:
        patterns: patterns on names; None: all.
        parts: sections for which objects were given; None: all.
    """

    def __init__(self, patterns: Sequence[str] | None, parts: Sequence[str] | None) -> None:
        self.all = patterns
        self._sections = None if parts is None else frozenset(parts)

    @classmethod
    def of(
        cls,
        only: str | Sequence[str] | None,
        into: Mapping[str, Any] | None,
        step: int | None,
        map_location: str | torch.device | None,
    ) -> Patterns:
        """Validate the arguments of :func:`load`.

        Raises:
            OptionError: an argument is invalid.
        """
        if step is not None and (not is_int(step) or step < 0):
            raise OptionError(f"step must be a whole number, 0 or more, not {step!r}")
        patterns = (only,) if isinstance(only, str) else only
        if patterns is not None and not _are_patterns(patterns):
            raise OptionError(
                f"only must be a pattern or a list of patterns, not {only!r}",
                hint='for example only="model/*"',
            )
        if into is not None and map_location is not None:
            raise OptionError(
                "map_location applies to returned tensors only: with into= values are copied to "
                "the devices of the objects"
            )
        if map_location is not None:
            try:
                torch.device(map_location)
            except (RuntimeError, TypeError) as error:
                raise OptionError(
                    f"map_location {map_location!r} is not a device: {error}"
                ) from None
        return cls(patterns, None if into is None else list(into))

    def match(self, name: str) -> bool:
        """Return True if a pattern matches the name."""
        return self.all is None or any(fnmatchcase(name, one) for one in self.all)

    def takes_tensor(self, name: str) -> bool:
        """Return True if a tensor is selected."""
        part = name.partition("/")[0]
        of_section = self._sections is None or part in self._sections
        return of_section and (self.match(name) or self.match(part))

    def takes_section(self, part: str, tensors: Sequence[str]) -> bool:
        """Return True if a section is selected completely: all of its tensors, or the section
        by name."""
        if self._sections is not None and part not in self._sections:
            return False
        if tensors:
            return all(map(self.takes_tensor, tensors))
        return self.match(part) or self.match(f"{part}/")

    def check(self, names: Sequence[str], parts: Sequence[str], step: int) -> None:
        """Check that each pattern matches something.

        Raises:
            OptionError: a pattern matches nothing.
        """
        known = [*parts, *(f"{part}/" for part in parts), *names]
        for pattern in self.all or ():
            if not any(fnmatchcase(name, pattern) for name in known):
                listed = ", ".join([*parts, *names][:_LISTED_MAX])
                more = ", ..." if len(parts) + len(names) > _LISTED_MAX else ""
                raise OptionError(
                    f"only={pattern!r} matches nothing of step {step}",
                    step=step,
                    hint=f"there are: {listed}{more}",
                )


def _are_patterns(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(one, str) and one for one in value)
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a run or of copies of it.

    Attributes:
        source: reported source of bases read there.
    """

    filesystem: FileSystem
    run: PurePath
    source: str

    @classmethod
    def of(cls, path: str | os.PathLike[str] | TierOptions) -> Place:
        """Open the location.

        Raises:
            OptionError: not a path, nor a known URL.
            UnavailableError: the library that reads it is not installed.
        """
        given = path if isinstance(path, TierOptions) else None
        where: str | os.PathLike[str] = path.where if isinstance(path, TierOptions) else path
        if isinstance(where, str) and is_url(where):
            files = PosixFileSystem()
            tier = open_tier(where, files) if given is None else given.open(files, SystemClock())
            root = UrlPath(tier.url)
            return cls(TierFileSystem(tier, root), root, tier.traits.kind)
        return cls(PosixFileSystem(), run_path(where), "disk")

    def look(self) -> tuple[RunView, dict[int, KeeperMemory], list[str]]:
        """Return the view of the run, the memory of keepers by rank, and problems in words.

        Keepers are queried first: data that they are still writing is then on disk.
        """
        memory = dict[int, KeeperMemory]()
        problems = list[str]()
        in_tier = isinstance(self.filesystem, TierFileSystem)
        run = None if in_tier else scan_run(self.filesystem, self.run).run
        if run is not None:
            memory, problems = read_keeper_memory(self.filesystem, self.run, run)
        recalled = {rank: one.recalled for rank, one in memory.items()}
        return RunView.of(self.filesystem, self.run, recalled), memory, problems

    def source_of(self, present: RunView, base: BaseId) -> str:
        """Return the source of a base."""
        return "memory" if base in present.in_memory else self.source


@dataclass(frozen=True, slots=True)
class Built:
    """State of a step, built from base and log.

    Attributes:
        place: location of the run.
        present: view of the run.
        rebuilder: builds states of the run.
        rebuilt: the state, without the tensors of a base that were not wanted.
        notes: remarks on its position in the history.
        read: number of entries that were read and verified, and their bytes.
    """

    place: Place
    present: RunView
    rebuilder: Rebuilder
    rebuilt: Rebuilt
    notes: Sequence[str]
    read: tuple[int, int]

    @property
    def entries(self) -> dict[str, Entry]:
        """Entries of the tensors, by each of their names."""
        found = self.rebuilt.state
        names = [*found.entries, *found.aliases]
        entries = {name: found.entries.get(found.canonical(name)) for name in names}
        return {name: entry for name, entry in entries.items() if entry is not None}

    def restored_into(self, state: State, patterns: Patterns) -> Loaded:
        """Restore the selected state into live objects.

        Raises:
            OptionError: a pattern matches nothing, or the objects need more than is selected.
            MismatchError: names, shapes or dtypes differ; nothing was modified.
        """
        trees, names = self._trees(patterns)
        _refuse_incomplete(state, names, patterns, self.rebuilt.step)
        notes = restore_into(
            state,
            {part: tree for part, tree in trees.items() if part in state.providers},
            self.entries,
            self.rebuilt.state.tensors,
            step=self.rebuilt.step,
            takes=patterns.takes_tensor,
        )
        return self._report(set(state.providers), notes=notes)

    def loaded(
        self,
        patterns: Patterns,
        taken: Callable[[Entry], torch.Tensor],
        entries: Mapping[str, Entry] | None = None,
    ) -> Loaded:
        """Return the selected state as tensors and objects.

        Args:
            patterns: selection.
            taken: returns the tensor of an entry; called once for each.
            entries: entries of the tensors, by each of their names; None: :attr:`entries`.

        Raises:
            OptionError: a pattern matches nothing.
        """
        trees, names = self._trees(patterns)
        by_entry: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in (self.entries if entries is None else entries).items():
            if patterns.takes_tensor(name):
                if entry.name not in by_entry:
                    by_entry[entry.name] = taken(entry)
                tensors[name] = by_entry[entry.name]
        objects: dict[str, Any] = {}
        for part, tree in trees.items():
            objects |= _tree_of_section(part, tree, names[part], patterns, tensors)
        parts = {part for part, used in names.items() if not tensors.keys().isdisjoint(used)}
        return self._report(parts | objects.keys(), tensors, objects)

    def _trees(self, patterns: Patterns) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Return the trees of all sections, and the names of the tensors of each."""
        objects = self.rebuilt.state.objects.items()
        trees = {name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in objects}
        names = {part: list(references(tree)) for part, tree in trees.items()}
        every = [name for some in names.values() for name in some]
        patterns.check(every, list(trees), self.rebuilt.step)
        return trees, names

    def _report(
        self,
        parts: Collection[str],
        tensors: Mapping[str, torch.Tensor] | None = None,
        objects: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> Loaded:
        rebuilt = self.rebuilt
        own = [note for part, note in rebuilt.own.items() if part in parts]
        inexact = rebuilt.inexact or next(iter(own), "")
        return Loaded(
            rebuilt.step,
            not inexact,
            evidence(
                *self.read,
                replayed=rebuilt.replayed,
                audit="" if rebuilt.audit is None else describe_audit(rebuilt.audit),
                inexact=inexact,
            ),
            self.place.source_of(self.present, rebuilt.base),
            rebuilt.base.step,
            rebuilt.replayed,
            rebuilt.timeline,
            tensors or {},
            objects or {},
            tuple(self.present.skipped),
            tuple(dict.fromkeys((*self.notes, *notes, *own))),
        )


def build(place: Place, step: int | None, wanted: Callable[[str], bool], ring: ChunkRing) -> Built:
    """Build the state of a step, or the newest one.

    Raises:
        RecoveryError: as of :func:`load`.
    """
    # A running trainer may delete the chosen base. Look again, a limited number of times.
    for left in reversed(range(_ATTEMPTS)):
        present, memory, notes = place.look()
        points = present.points(step) if present.is_there else []
        if not points:
            raise _nothing_error(place, present, memory)
        lives = any(one.trainer is not None for one in memory.values())
        threads = 1 if lives else len(available_cores())  # leave the other cores to the trainer
        rebuilder = Rebuilder(present.filesystem, present.log, ring, TIMEOUT_S, threads)
        try:
            rebuilt = present.restore(rebuilder, points, step, wanted)
        except BaseDeletedError:
            continue
        # A running trainer may overwrite memory that is being read, which looks like damage.
        if lives and present.damaged and rebuilt.step < points[0].step and left:
            continue
        notes += _history_notes(present, rebuilt, step, points[0])
        state = rebuilt.state
        sizes = [state.entries[name].size_bytes for name in state.tensors]
        sizes += map(len, state.objects.values())
        return Built(place, present, rebuilder, rebuilt, notes, (len(sizes), sum(sizes)))
    raise RecoveryError(
        "a process that works on this run keeps deleting the bases chosen here",
        path=place.run,
        hint="try again, or load a copy in a place of tiers=",
    )


def _nothing_error(
    place: Place, present: RunView, memory: Mapping[int, KeeperMemory]
) -> RecoveryError:
    message = "this run has no base yet" if present.is_there else "there is no run"
    if captured := next((one.pending for one in memory.values() if one.pending is not None), None):
        message += f", that of step {captured.step} is being written"
    return RecoveryError(
        f"{message}: {place.run}",
        path=place.run,
        hint="a run folder is created by a Checkpointer; everstep ls lists its contents",
    )


def _history_notes(
    present: RunView, rebuilt: Rebuilt, step: int | None, best: RestorePoint
) -> list[str]:
    """Return notes about the position of the state in the history."""
    if step is not None:
        note = describe_abandoned(
            BaseId(rebuilt.timeline, rebuilt.step), present.inventory.branches
        )
        return [] if note is None else [note]
    found = _passed_over_note(present, rebuilt.base)
    chain = best.chain
    if rebuilt.step < best.step:
        why = next((s.reason for s in reversed(present.skipped) if s.step > rebuilt.step), "")
        found.append(
            f"step {best.step} exists, but only step {rebuilt.step} could be loaded: {why}"
        )
    elif chain.lost is not None:
        found.append(
            f"the log ends with step {best.step}: {chain.stopped}; its records up to step "
            f"{chain.lost} are unusable"
        )
    for note in found:
        _log.warning("%s: %s", present.inventory.path, note)
    return found


def _passed_over_note(present: RunView, base: BaseId) -> list[str]:
    """Return a note about a newer base that was passed over for ``base`` because it lacks
    sections."""
    lacking = present.lacking
    return [lacking[max(lacking)]] if lacking and base not in lacking else []


@contextlib.contextmanager
def reading_run(run: PurePath) -> Iterator[None]:
    """Convert operating system errors while a run is read into errors of everstep."""
    try:
        with storage_errors("read the run", run):
            yield
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and isinstance(cause.__cause__, EverstepError):
            raise cause.__cause__ from None  # the error of the object store itself
        raise


def _refuse_incomplete(
    state: State, by_section: Mapping[str, Sequence[str]], patterns: Patterns, step: int
) -> None:
    """Check that ``only`` selects everything that the objects of ``into`` need.

    Raises:
        OptionError: it does not.
    """
    for part, provider in state.providers.items():
        names = by_section.get(part, ())
        taken = [name for name in names if patterns.takes_tensor(name)]
        some = bool(taken) and isinstance(provider, ModuleProvider)
        if part in by_section and not (some or patterns.takes_section(part, names)):
            raise OptionError(
                f"only= leaves out {len(names) - len(taken)} tensor(s) of {part!r}, of into=",
                step=step,
                hint=f"leave {part!r} out of into=, or add {part + '/*'!r} to only=",
            )


def _tree_of_section(
    part: str,
    tree: Any,
    names: Sequence[str],
    patterns: Patterns,
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return a section by its name, as its ``state_dict()``; empty if it is not selected or
    incomplete."""
    flat = isinstance(tree, dict) and OptimizerProvider.groups_of(tree) is None
    if flat and any(name in tensors for name in names):  # a module, or a dict of modules
        tree = {k: v for k, v in tree.items() if all(name in tensors for name in references(v))}
    elif not patterns.takes_section(part, names):
        return {}
    if not all(name in tensors for name in references(tree)):
        return {}
    joined = join(tree, tensors)
    if isinstance(joined, dict) and OptimizerProvider.groups_of(joined) is not None:
        joined = OptimizerProvider.state_dict_of(joined)
    return {part: joined}
