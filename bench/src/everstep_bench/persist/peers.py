"""Other libraries, used as their documentation says, with an fsync where they have none.

Every one of them saves the same live tensors under a new name, and afterwards file and
directory are synced where the library does not do so itself. Loading starts from files
whose pages are not in the page cache; none of them verifies what it reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from everstep_bench.harness.gauges import Sample, now
from everstep_bench.harness.loop import flatten
from everstep_bench.harness.machine import drop_cache, sync_all, sync_file
from everstep_bench.persist.arms import Arm, Column
from everstep_bench.persist.state import BenchState


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
        self.detail = peer.save_detail
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


class PeerRead(Arm):
    """Loads with one library what it has saved."""

    column: Column = "read"

    def __init__(self, peer: Peer, state: BenchState, path: Path) -> None:
        self.name = peer.name
        self.detail = peer.load_detail
        self._peer = peer
        self._state = state
        self._path = path

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
