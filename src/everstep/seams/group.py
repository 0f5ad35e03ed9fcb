"""Ranks of a job through ``torch.distributed``: their number, and exchanges of a few bytes. All
other messages between ranks use mailboxes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep.errors import DeadlineError, StateError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BYTE = torch.uint8
_SIZE_BYTES = 8
_ROUND_BYTES = 1024


class Group(Protocol):
    """All ranks of a job; each calls the same methods in the same order."""

    rank: int
    world: int
    host: str

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank.

        Args:
            what: activity of all ranks, for the error message.
            data: bytes of this rank.

        Raises:
            DeadlineError: a rank does not take part.
        """
        ...

    def begin_any(self, what: str, mine: bool) -> Callable[[], bool]:
        """Start a query if any rank answers True, without waiting. The returned function waits for
        the answer and raises as :meth:`exchange` does; the next exchange waits for it, too.
        """
        ...


class TorchGroup:
    """Ranks of ``torch.distributed``'s default group, over gloo.

    Args:
        timeout_s: time after which a rank that does not take part is reported.

    Attributes:
        host: address of this machine at which the other ranks can reach it.

    Raises:
        DeadlineError: not all ranks have made one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.host = _own_address()
        self._timeout = timedelta(seconds=timeout_s)
        what = "make a Checkpointer"
        if dist.get_backend() == "gloo":  # only gloo's barrier names the missing ranks
            self._meet(what, None)
        # A group of its own, so that these exchanges never mix with the collectives of training,
        # whose backend may not handle host memory.
        self._group = self._deadline(
            what, lambda: dist.new_group(backend="gloo", timeout=self._timeout)
        )
        self._begun: Callable[[], bool] | None = None

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """Return the data of every rank, by rank."""
        begun = self._begun
        self._begun = None
        if begun is not None:
            # gloo matches operations by order: finish the pending one first.
            begun()
        # The barrier names the ranks that are missing; the gather after it would only time out.
        self._meet(what, self._group)
        found: list[bytes] = self._deadline(what, lambda: self._gather(data))
        return found

    def begin_any(self, what: str, mine: bool) -> Callable[[], bool]:
        """Start an all-reduce of one byte (the maximum), which gloo runs in its own threads."""
        answer = torch.tensor([mine], dtype=_BYTE, device="cpu")
        how: dict[str, Any] = {"op": dist.ReduceOp.MAX, "group": self._group, "async_op": True}
        work = self._deadline(what, lambda: dist.all_reduce(answer, **how))

        def wait_for_answer() -> bool:
            self._begun = None
            self._deadline(what, work.wait)
            return bool(answer.item())

        self._begun = wait_for_answer
        return wait_for_answer

    def _gather(self, data: bytes) -> list[bytes]:
        """Gather the data of all ranks in one round if it is short: rounds dominate the time."""
        begins = self._round(len(data).to_bytes(_SIZE_BYTES, "little") + data, _ROUND_BYTES)
        sizes = [int.from_bytes(one[:_SIZE_BYTES], "little") for one in begins]
        found = [one[_SIZE_BYTES:] for one in begins]
        more = max(sizes) - _ROUND_BYTES + _SIZE_BYTES
        # All ranks compute this from the same sizes: either all take part in a second round, or
        # none.
        if more > 0:
            rests = self._round(data[_ROUND_BYTES - _SIZE_BYTES :], more)
            found = [begin + rest for begin, rest in zip(found, rests, strict=True)]
        return [one[:size] for one, size in zip(found, sizes, strict=True)]

    def _round(self, data: bytes, size_bytes: int) -> list[bytes]:
        """Gather the first ``size_bytes`` of each rank's data, padded with zeros."""
        mine = torch.frombuffer(bytearray(data[:size_bytes].ljust(size_bytes, b"\0")), dtype=_BYTE)
        found = [torch.empty(size_bytes, dtype=_BYTE, device="cpu") for _ in range(self.world)]
        dist.all_gather(found, mine, group=self._group)
        return [one.numpy().tobytes() for one in found]

    def _meet(self, what: str, group: Any) -> None:
        self._deadline(
            what,
            lambda: dist.monitored_barrier(group, timeout=self._timeout, wait_all_ranks=True),
        )

    def _deadline(self, what: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except RuntimeError as error:  # all that gloo and its store raise
            raise DeadlineError(
                f"not all {self.world} ranks of this job {what} within "
                f"{self._timeout.total_seconds():g} s: {error}",
                rank=self.rank,
                hint=f"every rank has to {what}, at the same place of the program",
            ) from error


def store_survives_restarts() -> bool:
    """Return True if ranks that torchrun restarts can find the addresses of the killed ranks.

    With ``TORCHELASTIC_USE_AGENT_STORE`` the ranks meet in a store of torchrun's agent. The agent
    serves the same store after a restart, and the ranks use the same keys in it (in torch 2.6, 2.13
    and 2.14; before 2.6 keys began with the number of the restart). So gloo connects to killed
    ranks, and NCCL to the former rank 0, unless the new address is written before it is read. Ranks
    that meet elsewhere (an ``init_method`` or a store of the program) are not affected.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return False
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    made = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if not (allowed.isdecimal() and made.isdecimal() and int(allowed) > int(made)):
        return False
    c10d = dist.distributed_c10d
    store = c10d._get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    # Only a store that is reached over the network has a port.
    return str(getattr(store, "port", "none")) == os.environ.get("MASTER_PORT")


def group_of_job(timeout_s: float) -> Group | None:
    """Return the ranks that train with this process; None if it trains by itself.

    Raises:
        StateError: it was started as one of several ranks, and torch.distributed is not
            initialised.
        DeadlineError: a rank does not take part.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchGroup(timeout_s) if dist.get_world_size() > 1 else None
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) > 1:
        raise StateError(
            f"WORLD_SIZE={world}, but torch.distributed is not initialised: the other ranks of "
            "this job are unknown",
            hint="call torch.distributed.init_process_group() before making a Checkpointer; or "
            "unset WORLD_SIZE, if this process trains by itself",
        )
    return None


def own_rank() -> int:
    """Return the number of this process among those that train together; 0 if it is unknown."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


def _own_address() -> str:
    """Return the address of the interface that leads to rank 0 of the job."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if master in _LOOPBACK:
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:  # no route: all ranks are on this machine
        return "127.0.0.1"
