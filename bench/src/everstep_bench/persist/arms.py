"""Arms: ways to save or load the state; everstep by its public interface, and other libraries.

The state is a GPT and AdamW with its moments, as live tensors. Made without training: the moments
are what AdamW would have put there, in its own layout, filled with random numbers. Sizes are those
of a real model: one large embedding, matrices of megabytes, norms of kilobytes, step counters of
four bytes.

everstep's clock stops when the commit record's name is durable, which is seen at the file-system
seam. What a save does after that (retention, which reads the base back) is timed apart.

Other libraries are used as their documentation says, with an fsync where they have none. Every one
of them saves the same live tensors under a new name, and afterwards file and directory are synced
where the library does not do so itself. Loading starts from files whose pages are not in the page
cache; none of them verifies what it reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import safetensors.torch
import torch
import xxhash
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from everstep.checkpointer import Checkpointer
from everstep.errors import EverstepError, OptionError
from everstep.format.names import BASE_DIR, MANIFEST, parse_timeline
from everstep.seams import PosixFileSystem, Seams, WriteFile
from everstep.workloads.gpt import GPT, GPTConfig
from everstep_bench.harness.figures import Role
from everstep_bench.harness.loop import flatten, untied
from everstep_bench.harness.machine import Instant, Sample, drop_cache, now, sync_all, sync_file
from everstep_bench.harness.running import quiet

SIZE_BYTES_MIN = 4 << 20
_BYTES_PER_PARAMETER = 12  # float32: the parameter and two moments
_VOCABULARIES = ((50_304, 1024, 40_000_000), (256, 128, 0))  # vocabulary, context, from params
_WIDTH_STEP = 64
_ASPECT = 64  # width per layer, as in the published GPT-2 sizes
_CLOSE_ENOUGH = 0.03


def shape_of(size_bytes: int) -> GPTConfig:
    """The GPT whose parameters and moments together take about ``size_bytes``.

    Raises:
        OptionError: for less than :data:`SIZE_BYTES_MIN`.
    """
    if size_bytes < SIZE_BYTES_MIN:
        raise OptionError(f"a state of {size_bytes} bytes is too small: {SIZE_BYTES_MIN} at least")
    params = size_bytes // _BYTES_PER_PARAMETER
    vocab, context, _ = next(item for item in _VOCABULARIES if params >= item[2])
    found: list[tuple[float, float, GPTConfig]] = []
    for width in range(_WIDTH_STEP, 1 << 16, _WIDTH_STEP):
        least = GPTConfig(1, width, width // _WIDTH_STEP, context, vocab=vocab)
        if found and least.params > params:
            break
        per_layer = 12 * width**2 + 2 * width
        layers = max(1, round((params - least.params) / per_layer) + 1)
        config = GPTConfig(layers, width, width // _WIDTH_STEP, context, vocab=vocab)
        off = abs(config.params - params) / params
        found.append((max(off, _CLOSE_ENOUGH), abs(math.log(width / layers / _ASPECT)), config))
    return min(found, key=lambda item: item[:2])[2]


class BenchState:
    """A model and its optimizer, ready to be saved.

    Args:
        size_bytes: about so many bytes of tensors.
        seed: of all numbers in them.

    Attributes:
        size_bytes: bytes of all tensors, each counted once.
        tensors: number of tensors.
    """

    def __init__(self, size_bytes: int, seed: int) -> None:
        config = shape_of(size_bytes)
        self.model = _unfilled(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            with torch.no_grad():
                parameter.normal_(std=0.02, generator=generator)
            mean = torch.empty_like(parameter, requires_grad=False).normal_(generator=generator)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1000.0),
                "exp_avg": mean,
                "exp_avg_sq": mean.square(),
            }
        self._digests = {name: _digest(tensor) for name, tensor in self.flat().items()}
        self.tensors = len(self._digests)
        self.size_bytes = sum(t.numel() * t.element_size() for t in self.flat().values())
        self.description = (
            f"GPT of {config.params:,} parameters ({config.layers} layers, width {config.width}, "
            f"vocabulary {config.vocab}) with AdamW, float32"
        )

    def parts(self) -> dict[str, Any]:
        """Return the state for an :class:`everstep.Checkpointer`."""
        return {"model": self.model, "optimizer": self.optimizer}

    def nested(self) -> dict[str, Any]:
        """Return the state dicts of model and optimizer, live; the tied head is left out."""
        return {"model": untied(self.model), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        """All tensors by dotted name, live."""
        return flatten(self.nested())

    def blank(self) -> None:
        """Overwrites all tensors with zeros: what is there afterwards was loaded."""
        with torch.no_grad():
            for tensor in self.flat().values():
                tensor.zero_()

    def check(self, found: Mapping[str, torch.Tensor], who: str) -> None:
        """Compares every tensor with what was saved.

        Raises:
            EverstepError: naming the first that differs.
        """
        for name, expected in self._digests.items():
            tensor = found.get(name)
            if tensor is None or _digest(tensor) != expected:
                problem = "is missing" if tensor is None else "differs"
                raise EverstepError(f"{who}: {name!r} {problem} after loading")


def _unfilled(config: GPTConfig) -> GPT:
    """The model without the seconds that initialising it would take."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight  # to_empty() has made two of the one tensor
    return model


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(memoryview(data))  # type: ignore[arg-type]


Column = Literal["fresh", "recycled", "read"]
"""``fresh``: into files that are new. ``recycled``: over files that have their blocks
already. ``read``: from disk, past or without the page cache."""


class Arm:
    """One way to save or load the state. What is not overridden does nothing."""

    role: Role = "peer"
    column: Column = "fresh"
    name: str
    detail: str

    def open(self) -> None:
        """Before the first run; not timed. The live state is what it was made as."""

    def prepare(self) -> None:
        """Before each run; not timed. Everything is synced between it and the run."""

    def run(self) -> Sample:
        """Save or load once."""
        raise NotImplementedError

    def clean(self) -> None:
        """After each run, even one that failed; not timed."""

    def close(self) -> None:
        """After the last run, and after an ``open`` that failed."""


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
        self.watch = CommitWatch()
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
                seams=Seams(filesystem=self.watch),
            )
        for _ in range(_UNTIL_RECYCLED if recycled else 0):
            self._checkpointer.step()

    def run(self) -> Sample:
        """Saves once.

        Raises:
            EverstepError: also when files were recycled that should be new, or the reverse.
        """
        assert self._checkpointer is not None
        reused = self.watch.reused
        self.watch.committed = None
        begin = now()
        self._checkpointer.step()
        returned = now()
        stats = self._checkpointer.stats()
        if self.watch.committed is None or stats.durable_step != stats.step:
            raise EverstepError("the save came back and nothing was committed", step=stats.step)
        if (self.watch.reused > reused) != (self.column == "recycled"):
            raise EverstepError(f"the files of this save were not {self.column}", step=stats.step)
        return Sample.between(begin, self.watch.committed, returned)

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


@dataclass(frozen=True, slots=True)
class Peer:
    """A library.

    Attributes:
        module: has to be there.
        save: writes the state to a path that does not exist; afterwards it is durable.
        load: returns all tensors by dotted name, or loads in place (then from ``blank()``).
        in_place: ``load`` fills the live tensors.
    """

    name: str
    module: str
    save_detail: str
    load_detail: str
    save: Callable[[BenchState, Path], None]
    load: Callable[[BenchState, Path], Mapping[str, torch.Tensor]]
    in_place: bool = False


def installed(peer: Peer) -> bool:
    """Return True if the library is installed."""
    return importlib.util.find_spec(peer.module) is not None


class PeerWrite(Arm):
    """Saves the state with one library, each time under a new name."""

    def __init__(self, peer: Peer, state: BenchState, path: Path) -> None:
        self.name = peer.name
        self.detail = peer.load_detail if self.column == "read" else peer.save_detail
        self._peer = peer
        self._state = state
        self._path = path

    def prepare(self) -> None:
        """Makes sure that the name is free."""
        _remove(self._path)

    def run(self) -> Sample:
        """Saves once."""
        begin = now()
        self._peer.save(self._state, self._path)
        return Sample.between(begin, now())

    def clean(self) -> None:
        """Removes what was saved."""
        _remove(self._path)


class PeerRead(PeerWrite):
    """Loads with one library what it has saved."""

    column: Column = "read"

    def open(self) -> None:
        """Saves, while the live state is still what it was."""
        self._peer.save(self._state, self._path)

    def prepare(self) -> None:
        """Takes the files out of the cache."""
        drop_cache(self._path)
        if self._peer.in_place:
            self._state.blank()

    def run(self) -> Sample:
        """Loads once, and compares the result with what was saved."""
        begin = now()
        found = self._peer.load(self._state, self._path)
        end = now()
        self._state.check(found, self.name)
        return Sample.between(begin, end)

    def clean(self) -> None:
        """Keep the files for the next run."""

    def close(self) -> None:
        """Removes the files."""
        _remove(self._path)


def _save_torch(state: BenchState, path: Path) -> None:
    torch.save(state.nested(), path)
    sync_all(path)


def _load_torch(state: BenchState, path: Path) -> Mapping[str, torch.Tensor]:
    return flatten(torch.load(path, weights_only=True))


def _save_safetensors(state: BenchState, path: Path) -> None:
    nested = state.nested()
    groups = json.dumps(nested["optimizer"]["param_groups"])
    safetensors.torch.save_file(flatten(nested), path, metadata={"param_groups": groups})
    sync_all(path)


def _load_safetensors(state: BenchState, path: Path) -> Mapping[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def _save_dcp(state: BenchState, path: Path) -> None:
    # Its writer syncs the data files and .metadata, but no directory.
    writer = filesystem.FileSystemWriter(path)
    with _without_warnings():
        state_dict_saver.save(state.nested(), storage_writer=writer, no_dist=True)
    sync_file(path)
    sync_file(path.parent)


def _load_dcp(state: BenchState, path: Path) -> Mapping[str, torch.Tensor]:
    nested = state.nested()
    reader = filesystem.FileSystemReader(path)
    with _without_warnings():
        state_dict_loader.load(nested, storage_reader=reader, no_dist=True)
    return flatten(nested)


def _save_torchsnapshot(state: BenchState, path: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    with _without_warnings():
        Snapshot.take(str(path), {"state": StateDict(**state.flat())})
    sync_all(path)


def _load_torchsnapshot(state: BenchState, path: Path) -> Mapping[str, torch.Tensor]:
    from torchsnapshot import Snapshot, StateDict

    target = StateDict(**state.flat())
    with _without_warnings():
        Snapshot(str(path)).restore({"state": target})
    return dict(target)


PEERS = (
    Peer(
        "torch.save",
        "torch",
        "of a path; + fsync of file and directory",
        "torch.load(weights_only=True) into new tensors",
        _save_torch,
        _load_torch,
    ),
    Peer(
        "safetensors",
        "safetensors",
        "save_file; + fsync of file and directory",
        "load_file into new tensors",
        _save_safetensors,
        _load_safetensors,
    ),
    Peer(
        "DCP",
        "torch.distributed.checkpoint",
        "one process; FileSystemWriter as it comes: one thread, syncs its files; + fsync of "
        "directories",
        "load into live tensors",
        _save_dcp,
        _load_dcp,
        in_place=True,
    ),
    Peer(
        "torchsnapshot",
        "torchsnapshot",
        "Snapshot.take; + fsync of files and directories",
        "Snapshot.restore into live tensors",
        _save_torchsnapshot,
        _load_torchsnapshot,
        in_place=True,
    ),
)
"""All peers, in the order in which they are shown."""


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """DCP says that there is one process; torchsnapshot uses a class that torch will remove."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
