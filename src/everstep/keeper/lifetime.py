"""The beginning and the end of a training process."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath
from typing import Any, Protocol

import torch.distributed

from everstep.errors import DeadlineError, EverstepError, UnavailableError
from everstep.keeper.saver import Keeper, Saver

__all__ = ["Closing", "check_platform", "close_earlier", "finish_at_exit"]


class Closing(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


def check_platform() -> None:
    """Refuses where this version does not run.

    Raises:
        UnavailableError: with the reason.
    """
    if sys.platform == "win32":
        raise UnavailableError(
            "everstep does not run on Windows", hint="Linux, WSL 2, or macOS on the CPU"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        if world > 1:
            raise UnavailableError(
                f"this job has {world} ranks; this version saves jobs of one rank",
                rank=distributed.get_rank(),
            )


def finish_at_exit(saver: Saver, keeper: Keeper, pid: int, shown: Any) -> None:
    """For a script that ends without ``close()``: its last base becomes durable all the same."""
    if os.getpid() != pid:
        return  # a forked child owns nothing here
    while True:
        try:
            saver.finish_captures()
            keeper.wait(None)
            break
        except EverstepError as error:
            print(f"everstep: a base was lost at exit: {error}", file=shown)
            if isinstance(error, DeadlineError):
                break
    keeper.close()


def close_earlier(earlier: Closing | None, run: PurePath) -> None:
    """A notebook cell that is run again replaces the Checkpointer of its first run."""
    if earlier is None:
        return
    try:
        earlier.close()
    except EverstepError as error:
        print(f"everstep: the earlier Checkpointer of {run}: {error}", file=sys.stderr)
