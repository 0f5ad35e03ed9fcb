"""torch.distributed.checkpoint, as its documentation says.

``async_save`` needs a process group: gloo, with one rank, over a file. Its writer syncs the
data files and ``.metadata``, but no directory; that is done afterwards, apart from training.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from everstep_bench.harness.loop import Loop
from everstep_bench.harness.machine import sync_file
from everstep_bench.stall.arms import Pending
from everstep_bench.stall.peers import Saves, SavingArm

DETAILS = {
    "dcp": "async_save as it comes: a new stager at each save",
    "dcp-warm": "async_save with one stager for all saves",
    "dcp-overlap": "async_save, one stager that copies in its thread; waits before the update",
    "dcp-process": "async_save into a process, one stager with shared memory",
}
_SYNCED = "; + fsync of directories, afterwards"


class Dcp(SavingArm):
    """``async_save`` in one of the forms of :data:`DETAILS`.

    Args:
        group: ranks that save together; its thread exchanges messages beside training.
    """

    def __init__(
        self, name: str, loop: Loop, folder: Path, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(name, DETAILS[name] + _SYNCED, loop, Saves(folder / name))
        self._group = group
        self._stager: DefaultStager | None = None
        self._staging: Any = None
        self._hook: Any = None

    def open(self) -> None:
        """Makes the stager, where it is to be kept."""
        if self.name == "dcp":
            return
        self._stager = stager(
            device=torch.accelerator.is_available(),  # pinned memory and streams need one
            shared=self.name == "dcp-process",
            overlaps=self.name == "dcp-overlap",
        )
        if self.name == "dcp-overlap":
            self._hook = self._loop.training.optimizer.register_step_pre_hook(self._gate)
        if self.name == "dcp-process":
            self._start_process()

    def begin(self, path: Path) -> Pending:
        """Calls ``async_save``."""
        options: dict[str, Any] = {}
        if self._stager is not None:
            options["async_stager"] = self._stager
        if self.name == "dcp-process":
            kinds = state_dict_saver.AsyncCheckpointerType
            options["async_checkpointer_type"] = kinds.PROCESS
        response: Any = state_dict_saver.async_save(
            self._loop.nested(), checkpoint_id=path, process_group=self._group, **options
        )
        pending = Pending()
        if isinstance(response, state_dict_saver.AsyncSaveResponse):
            self._staging = response.staging_completion
            self._staging.add_done_callback(pending.on_staged)
            response.upload_completion.add_done_callback(pending.on_done)
        else:
            pending.on_staged()  # the call returns when the copy is made
            response.add_done_callback(pending.on_done)
        return pending

    def sync(self, path: Path) -> None:
        """Its files are synced already."""
        sync_file(path)
        sync_file(path.parent)

    def close(self) -> None:
        """Ends stager and process."""
        super().close()
        if self._hook is not None:
            self._hook.remove()
        if self._stager is not None:
            self._stager.close()
        if self.name == "dcp-process":
            # There is no call for it: the process ends with the object.
            _async_process_executor._CHECKPOINT_PROCESS = None

    def _start_process(self) -> None:
        """The first save starts the process; what it logs about itself, nobody reads."""
        self.prepare()
        try:
            with _muted():
                self.settle(self.save())
        finally:
            self.clean()

    def _gate(self, *_: Any) -> None:
        staging = self._staging
        self._staging = None
        if staging is not None:
            begin_s = time.monotonic()
            staging.result()
            self._stalls["gate"] += time.monotonic() - begin_s


def stager(*, device: bool = False, shared: bool = False, overlaps: bool = False) -> DefaultStager:
    """Return a stager for all saves.

    Args:
        device: the state is on one.
        shared: copies go to shared memory.
        overlaps: copies are made in a thread.
    """
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=device,
            use_shared_memory=shared,
            use_async_staging=overlaps,
            use_non_blocking_copy=device,
        )
    )


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Processes that are started here have no standard error; this one has it back afterwards."""
    kept = os.dup(2)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def single_rank_group(folder: Path) -> Iterator[None]:
    """A process group of one, on the loopback interface; what was there stays."""
    if dist.is_initialized():
        yield
        return
    store = torch._C._distributed_c10d.FileStore(str(folder / "group"), 1)
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1"):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that experimental parts are experimental
                yield
        finally:
            dist.destroy_process_group()
