"""Looks at a run without taking it over: :func:`load` gives its state, and :func:`peek` says which
state ``resume()`` would give.

Both only read. A training process that lives goes on, a keeper that has outlived one keeps what it
has, and no timeline is opened, so nobody is fenced off.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import torch

from everstep.commit.lineage import BaseId, left_at, of_no_use
from everstep.config.given import is_int, named
from everstep.errors import EverstepError, OptionError, RecoveryError, StorageError
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.local_keeper import CHUNKS, WRITERS
from everstep.look.keeper_memory import KeeperMemory, read_keeper_memory
from everstep.look.run_view import BaseDeletedError, RestorePoint, RunView
from everstep.restore.load.targets import restore_into
from everstep.restore.offline.rebuild import Rebuilder, Rebuilt
from everstep.restore.start.report import evidence
from everstep.run.audits import describe_audit
from everstep.run.candidates import Skipped
from everstep.run.folder import run_path
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.processes.processes import available_cores
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tree import join, references
from everstep.tiers.disk import storage_errors
from everstep.tiers.files import TierFileSystem
from everstep.tiers.options import TierOptions
from everstep.tiers.urls import UrlPath, is_url, open_tier

__all__ = ["Loaded", "Peek", "load", "peek"]

_log = logging.getLogger("everstep")
_TIMEOUT_S = 120.0
_ATTEMPTS = 8
_LISTED = 12


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state of one step of a run, as :func:`load` gives it.

    Attributes:
        step: that it is of.
        exact: whether it is bit for bit what training had; as :attr:`everstep.Recovery.exact`.
        evidence: what that rests on, in words.
        source: where the base was read: ``"disk"``, ``"memory"`` (of a keeper), or ``"object"`` (a
            copy in a store).
        base_step: of the base.
        replayed: steps of the log that were replayed on it.
        timeline: that the step is of.
        tensors: by name (``"model/layer.weight"``); one that had several names is there under each.
            Empty with ``into=``.
        objects: the parts of the state by name, nested and with their tensors in place: a module or
            an optimizer is what its ``state_dict()`` was, plain data is the value. Parts that
            ``only=`` has left incomplete are not there. Empty with ``into=``.
        skipped: what was passed over, with the reason.
        notes: what else is to be known of it.
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
        """Return one part of the state, in the form that its ``load_state_dict()`` takes.

        Of a module with fewer tensors than it has, where ``only=`` has left some out, those that
        were loaded.

        Args:
            part: its name in the state, as in ``{"model": model}``.

        Raises:
            OptionError: it is not there, or ``only=`` has left out some of it.
        """
        if part not in self.objects:
            known = ", ".join(map(repr, self.objects)) or "none"
            there = any(name.startswith(f"{part}/") for name in self.tensors)
            why = "was loaded in part, by only=" if there else "is not among what was loaded"
            raise OptionError(f"{part!r} {why}", step=self.step, hint=f"whole parts: {known}")
        return self.objects[part]


@dataclass(frozen=True, slots=True)
class Peek:
    """Which state ``resume()`` would give, as :func:`peek` finds it.

    Attributes:
        step: that training would go on from; 0 where there is nothing to restore.
        exact: whether that state is bit for bit what training had, as far as records tell.
        source: where its base is: ``"disk"``, ``"memory"`` (of a keeper), ``"object"`` (a copy in a
            store), or ``"fresh"``.
        base_step: of the base; None: there is none.
        replayed: steps of the log that would be replayed on it.
        timeline: that the step is of; None: of none.
        trainer: process id of a training process that works on this run on this machine; None:
            no keeper serves any.
        skipped: what would be passed over, with the reason.
        notes: what else is to be known of it.
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
    """Load the state of a run to look at it, verified, without taking the run over.

    Nothing is written, no process is disturbed, and the random generators of this process stay as
    they are. It may be called beside a training process, and between a kill and the next start,
    any number of times::

        weights = everstep.load("runs/first", only="model/*").state_dict("model")
        model.load_state_dict(weights)

    Args:
        path: the run folder, or a place of ``tiers=`` that has copies: a directory or a URL.
        step: the step to load, of a base or of the log; None: the newest one, which ``resume()`` of
            the whole state would give.
        only: which tensors and parts to load: a pattern (``"model/*"``, ``"*.bias"``, ``"epoch"``)
            or several; None: all. Of a base of one rank nothing else is read.
        into: objects that get the values, by name, as in the state of a
            :class:`~everstep.Checkpointer`: ``{"model": model}``. All that they have must be there
            with the same names, shapes and dtypes, or nothing is touched; what the run has besides
            is left alone. Parts of modules may be chosen with ``only``.
        map_location: the device of the tensors that are returned; None: the CPU.

    Returns:
        The state. Of several ranks it is that of one: tensors are put together, and what each rank
        had for itself is that of rank 0, as ``notes`` say.

    Raises:
        RecoveryError: there is no such step, or nothing that verifies leads to it.
        OptionError: an argument that cannot work, or a pattern that matches nothing.
        MismatchError: ``into`` has other names, shapes or dtypes; nothing was touched.
        UnsupportedStateError: it takes the program that trained it to replay the log.
        ForeignDirectoryError, StorageError
    """
    patterns = _Patterns.of(only, into, step, map_location)
    state = None if into is None else State(into, rng=False)
    place = _Place.of(path)
    with _reading(place.run):
        present, rebuilt, notes = _newest(place, step, patterns.takes_tensor)
        return _loaded(place, present, rebuilt, patterns, state, map_location, notes)


@named("peek")
def peek(path: str | os.PathLike[str] | TierOptions) -> Peek:
    """Say which step ``resume()`` of the whole state would give, before any object exists.

    Reads names and records, on disk and in the memory of the keepers on this machine; data are
    verified when they are loaded. Where no ``tiers=`` are named, copies are not looked at: name
    the place of the copies as ``path``. Nothing is written and no process is disturbed.

    Args:
        path: as of :func:`load`; one that is not there is a fresh run.

    Raises:
        RecoveryError: ``resume()`` would refuse to start over: there is, or has been, something,
            and none of it can be restored.
        OptionError, ForeignDirectoryError, StorageError
    """
    place = _Place.of(path)
    with _reading(place.run):
        present, memory, problems = place.look()
        ways = present.ways(None)
        if ways:
            ways = present.with_files(ways, None)
    trainer = next((one.trainer for one in memory.values() if one.trainer is not None), None)
    if not ways:
        left = [base.id for base in present.inventory.bases]
        note = of_no_use(left, present.inventory.branches)
        problems += [] if note is None else [note]
        base = None
        end = BaseId(0, 0)
        exact = True
        source = "fresh"
    else:
        base = ways[0].base.id
        end = BaseId(*ways[0].chain.end)
        problems += _of_parts(present, base)
        exact = not present.why_not_exact(ways[0])
        source = place.source_of(present, base)
    captured = {one.pending for one in memory.values()}  # of the ranks of a job that trains
    newest = captured.pop() if len(captured) == 1 else None
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


class _Patterns:
    """Which entries and parts are wanted.

    Args:
        patterns: on names; None: all.
        parts: the parts that objects are given for; None: all.
    """

    def __init__(self, patterns: Sequence[str] | None, parts: Sequence[str] | None) -> None:
        self.all = patterns
        self._parts = None if parts is None else frozenset(parts)

    @classmethod
    def of(
        cls,
        only: str | Sequence[str] | None,
        into: Mapping[str, Any] | None,
        step: int | None,
        map_location: str | torch.device | None,
    ) -> _Patterns:
        """Check what :func:`load` was given.

        Raises:
            OptionError: it cannot work.
        """
        if step is not None and (not is_int(step) or step < 0):
            raise OptionError(f"step must be a whole number, 0 or more, not {step!r}")
        patterns = (only,) if isinstance(only, str) else only
        if patterns is not None and (
            not isinstance(patterns, Sequence)
            or not patterns
            or not all(isinstance(one, str) and one for one in patterns)
        ):
            raise OptionError(
                f"only must be a pattern or a list of patterns, not {only!r}",
                hint='for example only="model/*"',
            )
        if into is not None and map_location is not None:
            raise OptionError(
                "map_location is for tensors that are returned: with into= the values go where the "
                "objects have them"
            )
        if map_location is not None:
            try:
                torch.device(map_location)
            except (RuntimeError, TypeError) as error:
                raise OptionError(f"map_location {map_location!r} is no device: {error}") from None
        return cls(patterns, None if into is None else list(into))

    def match(self, name: str) -> bool:
        """Whether a pattern takes a name."""
        return self.all is None or any(fnmatchcase(name, one) for one in self.all)

    def takes_tensor(self, name: str) -> bool:
        """Whether a tensor is wanted."""
        part = name.partition("/")[0]
        of_part = self._parts is None or part in self._parts
        return of_part and (self.match(name) or self.match(part))

    def takes_part(self, part: str, tensors: Sequence[str]) -> bool:
        """Whether a part is wanted whole: all of its tensors are, or it is by its own name."""
        if self._parts is not None and part not in self._parts:
            return False
        if tensors:
            return all(map(self.takes_tensor, tensors))
        return self.match(part) or self.match(f"{part}/")

    def check(self, names: Sequence[str], parts: Sequence[str], step: int) -> None:
        """Refuse what is not there.

        Raises:
            OptionError: a pattern matches nothing.
        """
        known = [*parts, *(f"{part}/" for part in parts), *names]
        for pattern in self.all or ():
            if not any(fnmatchcase(name, pattern) for name in known):
                listed = ", ".join([*parts, *names][:_LISTED])
                more = ", ..." if len(parts) + len(names) > _LISTED else ""
                raise OptionError(
                    f"only={pattern!r} matches nothing of step {step}",
                    step=step,
                    hint=f"there are: {listed}{more}",
                )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run, or copies of it, lie.

    Attributes:
        source: what a base that is read there is said to come from.
    """

    filesystem: FileSystem
    run: PurePath
    source: str

    @classmethod
    def of(cls, path: str | os.PathLike[str] | TierOptions) -> _Place:
        """Raises:
        OptionError: it is no path, and no URL of anything that is known.
        UnavailableError: what reads it is not installed.
        """
        where = path.where if isinstance(path, TierOptions) else path
        if isinstance(where, str) and is_url(where):
            tier = open_tier(where, PosixFileSystem())
            root = UrlPath(tier.url)
            return cls(TierFileSystem(tier, root), root, tier.traits.kind)
        return cls(PosixFileSystem(), run_path(where), "disk")

    def look(self) -> tuple[RunView, dict[int, KeeperMemory], list[str]]:
        """Return what there is, what of it keepers have in memory, and which could not be asked.

        Keepers come first: what they are still writing is on the disk then.
        """
        memory = dict[int, KeeperMemory]()
        problems = list[str]()
        run = None if self.source == "object" else scan_run(self.filesystem, self.run).run
        if run is not None:
            memory, problems = read_keeper_memory(self.filesystem, self.run, run)
        recalled = {rank: one.recalled for rank, one in memory.items()}
        return RunView.of(self.filesystem, self.run, recalled), memory, problems

    def source_of(self, present: RunView, base: BaseId) -> str:
        """Where a base is read."""
        return "memory" if base in present.in_memory else self.source


def _newest(
    place: _Place, step: int | None, wanted: Callable[[str], bool]
) -> tuple[RunView, Rebuilt, list[str]]:
    """Build the state of a step, or the newest one, from what there is when it is read.

    Raises:
        RecoveryError: as of :func:`load`.
    """
    ring = ChunkRing(CHUNKS, WRITERS)
    try:
        for left in reversed(range(_ATTEMPTS)):
            present, memory, notes = place.look()
            ways = present.ways(step)
            if not ways:
                raise _nothing(place, present, memory)
            lives = any(one.trainer is not None for one in memory.values())
            threads = 1 if lives else len(available_cores())  # the others are the trainer's
            rebuilder = Rebuilder(present.filesystem, present.log, ring, _TIMEOUT_S, threads)
            try:
                rebuilt = present.restore(rebuilder, ways, step, wanted)
            except BaseDeletedError:
                continue
            # What a process that lives has written over in memory is damaged for who reads it.
            if lives and present.damaged and rebuilt.step < ways[0].step and left:
                continue
            return present, rebuilt, notes + _of_history(present, rebuilt, step, ways[0])
    finally:
        ring.close()
    raise RecoveryError(
        "a process that works on this run keeps deleting the bases that this one chooses",
        path=place.run,
        hint="try again, or load a copy in a place of tiers=",
    )


def _nothing(place: _Place, present: RunView, memory: Mapping[int, KeeperMemory]) -> RecoveryError:
    what = "this run has no base yet" if present.is_there else "there is no run"
    if captured := next((one.pending for one in memory.values() if one.pending is not None), None):
        what += f", that of step {captured.step} is being written"
    return RecoveryError(
        f"{what}: {place.run}",
        path=place.run,
        hint="a run folder is one that a Checkpointer has made; everstep ls shows what it holds",
    )


def _of_history(
    present: RunView, rebuilt: Rebuilt, step: int | None, best: RestorePoint
) -> list[str]:
    """Return what is to be said of where a state lies in the history."""
    if step is not None:
        note = left_at(BaseId(rebuilt.timeline, rebuilt.step), present.inventory.branches)
        return [] if note is None else [note]
    found = _of_parts(present, rebuilt.base)
    chain = best.chain
    if rebuilt.step < best.step:
        why = next((s.reason for s in reversed(present.skipped) if s.step > rebuilt.step), "")
        found.append(
            f"step {best.step} is there, but only step {rebuilt.step} could be loaded: {why}"
        )
    elif chain.lost is not None:
        found.append(
            f"the log ends with step {best.step}, as {chain.stopped}; what it has up to step "
            f"{chain.lost} is of no use"
        )
    for note in found:
        _log.warning("%s: %s", present.inventory.path, note)
    return found


def _of_parts(present: RunView, base: BaseId) -> list[str]:
    """Return in words which newer base was passed over for ``base``, as it lacks parts."""
    lacking = present.lacking
    return [lacking[max(lacking)]] if lacking and base not in lacking else []


@contextlib.contextmanager
def _reading(run: PurePath) -> Iterator[None]:
    """Turn what the system says while a run is read into errors in words."""
    try:
        with storage_errors("read the run", run):
            yield
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and isinstance(cause.__cause__, EverstepError):
            raise cause.__cause__ from None  # what a store has said, in its own words
        raise


def _loaded(
    place: _Place,
    present: RunView,
    rebuilt: Rebuilt,
    patterns: _Patterns,
    state: State | None,
    map_location: str | torch.device | None,
    notes: list[str],
) -> Loaded:
    """Hand over what was built, as tensors and objects, or by putting it into objects."""
    found = rebuilt.state
    trees = {n.removeprefix(OBJECT_PREFIX): decode(data) for n, data in found.objects.items()}
    by_part = {part: list(references(tree)) for part, tree in trees.items()}
    names = [*found.entries, *found.aliases]
    patterns.check([n for part in by_part.values() for n in part], list(trees), rebuilt.step)
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    entries = {name: found.entries.get(found.aliases.get(name, name)) for name in names}
    there = {name: entry for name, entry in entries.items() if entry is not None}
    if state is not None:
        _refuse_incomplete(state, by_part, patterns, rebuilt.step)
        wanted = {part: tree for part, tree in trees.items() if part in state.providers}
        about = wanted, there, found.tensors
        notes += restore_into(state, *about, step=rebuilt.step, takes=patterns.takes_tensor)
    else:
        moved: dict[str, torch.Tensor] = {}
        for name, entry in there.items():
            if not patterns.takes_tensor(name):
                continue
            if entry.name not in moved:
                tensor = found.tensors.pop(entry.name)
                moved[entry.name] = tensor if map_location is None else tensor.to(map_location)
            tensors[name] = moved[entry.name]
        for part, tree in trees.items():
            objects |= _part(part, tree, by_part[part], patterns, tensors)
    audit = "" if rebuilt.audit is None else describe_audit(rebuilt.audit)
    given = {*objects, *(() if state is None else state.providers)}
    given |= {part for part, used in by_part.items() if not tensors.keys().isdisjoint(used)}
    own = [note for part, note in rebuilt.own.items() if part in given]
    inexact = rebuilt.inexact or next(iter(own), "")
    return Loaded(
        rebuilt.step,
        not inexact,
        evidence(
            len(found.entries) + len(found.objects),
            found.size_bytes,
            replayed=rebuilt.replayed,
            audit=audit,
            inexact=inexact,
        ),
        place.source_of(present, rebuilt.base),
        rebuilt.base.step,
        rebuilt.replayed,
        rebuilt.timeline,
        tensors,
        objects,
        tuple(present.skipped),
        tuple(dict.fromkeys((*notes, *own))),
    )


def _refuse_incomplete(
    state: State, by_part: Mapping[str, Sequence[str]], patterns: _Patterns, step: int
) -> None:
    """Raises:
    OptionError: ``only`` leaves out what an object of ``into`` cannot do without.
    """
    for part, provider in state.providers.items():
        names = by_part.get(part, ())
        taken = [name for name in names if patterns.takes_tensor(name)]
        some = bool(taken) and isinstance(provider, ModuleProvider)
        if part in by_part and not (some or patterns.takes_part(part, names)):
            raise OptionError(
                f"only= leaves out {len(names) - len(taken)} tensor(s) of {part!r}, of into=",
                step=step,
                hint=f"leave {part!r} out of into=, or add {part + '/*'!r} to only=",
            )


def _part(
    part: str,
    tree: Any,
    names: Sequence[str],
    patterns: _Patterns,
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return a part by its name, as its ``state_dict()`` was; nothing where it is not wanted, or
    not all of it is there."""
    flat = isinstance(tree, dict) and OptimizerProvider.groups_of(tree) is None
    if flat and any(name in tensors for name in names):  # a module, or what is made of modules
        tree = {k: v for k, v in tree.items() if all(name in tensors for name in references(v))}
    elif not patterns.takes_part(part, names):
        return {}
    if not all(name in tensors for name in references(tree)):
        return {}
    joined = join(tree, tensors)
    if isinstance(joined, dict) and OptimizerProvider.groups_of(joined) is not None:
        joined = OptimizerProvider.state_dict_of(joined)
    return {part: joined}
