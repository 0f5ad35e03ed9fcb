"""Host memory budgets: computed, and checked before anything is captured (I10).

The budget of host memory is divided among the arena (captures and log), a replica, bases that live
in memory, and copies for other ranks. :func:`plan_memory` computes the shares; each function
refuses a budget that is too small, and names the number of bytes that suffices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from everstep.arena import PAGE_BYTES
from everstep.arena.memory import CONTROL_BYTES, PROGRESS_WORDS
from everstep.commit.peer_copies import peer_of
from everstep.config.options import Options
from everstep.errors import OutOfSpaceError
from everstep.link.log_records import RECORD_BYTES
from everstep.seams.machine import file_bytes_max, memory_available_bytes
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import is_reserved
from everstep.state.layout.shards import plan_shards
from everstep.state.ranks.rank_info import RankInfo
from everstep.state.survey.survey import Shape
from everstep.state.values.tensors import local_tensor
from everstep.tiers.options import PeerOptions

_IN_FLIGHT_MIN = 2
_QUEUE_BYTES = 64 << 20  # small states may queue up to this size


def base_memory_bytes(shape: Shape) -> int:
    """Return the host memory of a base, in whole pages.

    That is its tensors, as they lie in the arena, and its plain data outside of the arena.
    """
    static = shape.static  # static entries have their own files, and their own shards
    groups = [[e for e in shape.entries if (e.name in static) is kind] for kind in (False, True)]
    sizes = [layout.size_bytes for entries in groups for layout in plan_shards(entries)]
    return sum(map(_pages_bytes, [*sizes, sum(shape.objects_bytes.values())]))


def _pages_bytes(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def host_budget_bytes(options: Options, state_bytes: int, ranks_here: int = 1) -> int:
    """Return the budget of host memory, by default half of the available memory.

    Args:
        ranks_here: number of ranks of the job on this machine, which share that half.

    Raises:
        OutOfSpaceError: The method needs more.
    """
    # Each process sees the available memory of the entire machine.
    budget = options.budget.host_bytes or memory_available_bytes() // (2 * ranks_here)
    times = _bases_at_once(options)
    if options.method.base != "sync" and budget < times * state_bytes:
        raise OutOfSpaceError(
            f'method="{options.method_name}" copies the state ({state_bytes} bytes) into host '
            f"memory{', twice' if times == 2 else ''}; the budget is {budget} bytes",
            hint=f'Budget(host_bytes={times * state_bytes}) or more, or method="sync"',
        )
    return budget


def _bases_at_once(options: Options) -> int:
    # If every step is captured, the previous capture stays until the next one is complete.
    return 2 if options.is_scheduled else 1


def arena_budget_bytes(options: Options, budget_bytes: int, state_bytes: int) -> int:
    """Return the size of the arena.

    A keeper process shares the arena as a file in memory. The limit of file sizes (``ulimit -f``)
    counts its full size, although pages are allocated only when they are used.

    Args:
        budget_bytes: host memory that is left for the arena.

    Raises:
        OutOfSpaceError: A base does not fit within the limit.
    """
    limit_bytes = file_bytes_max()
    if limit_bytes is None or options.method.base == "sync" or not options.keeper.process:
        return budget_bytes
    most_bytes = max(0, limit_bytes - CONTROL_BYTES) // PAGE_BYTES * PAGE_BYTES
    need_bytes = _bases_at_once(options) * state_bytes
    if most_bytes < need_bytes:
        raise OutOfSpaceError(
            f"the state needs {need_bytes} bytes of memory that training shares with its keeper, "
            f"and the limit of file sizes (ulimit -f) of {limit_bytes} bytes leaves {most_bytes}",
            hint=f"a limit of {need_bytes + CONTROL_BYTES} bytes or more (ulimit -f unlimited), "
            "KeeperOptions(process=False), or method='sync'",
        )
    return min(budget_bytes, most_bytes)


def bases_in_flight_max(options: Options, state_bytes: int) -> int | None:
    """Return how many bases may be in host memory before they are on disk; None for no limit.

    A base that waits behind others for a slow disk is of no use until those are written, so
    training waits instead. There is no limit if the user has set aside memory for a queue, or the
    method has its own limit; small states may queue a few more.
    """
    if options.budget.host_bytes is not None or options.is_scheduled:
        return None
    # Each base in flight needs a progress word.
    return min(PROGRESS_WORDS, max(_IN_FLIGHT_MIN, _QUEUE_BYTES // max(1, state_bytes)))


def own_budget_bytes(options: Options, host_bytes: int, state_bytes: int, *, peers: bool) -> int:
    """Return the memory for bases of this rank that live in memory.

    It is half of the host memory, or a third if bases of peers are held here, too. Captures need
    the rest.

    Args:
        state_bytes: host memory of a base, including the state that optimizers will create.
        peers: True if bases of other ranks are held here.

    Raises:
        OutOfSpaceError: Two bases do not fit.
    """
    if not options.method.in_memory:
        return 0
    divisor = 3 if peers else 2
    found = host_bytes // divisor
    if found < 2 * state_bytes:
        raise OutOfSpaceError(
            f"the newest two bases ({state_bytes} bytes each) live in the keeper's memory, and of "
            f"{host_bytes} bytes of host memory only {found} are available for them",
            hint=f"Budget(host_bytes={2 * divisor * state_bytes}) or more, or method='lazy'",
        )
    return found


def replica_budget_bytes(
    options: Options, host_bytes: int, state_bytes: int, step_bytes: int
) -> int:
    """Return the memory for a replica: half of the host memory.

    The other half holds the base that the replica begins with, and the records of steps that wait
    while it is written (at most two states and the records of two steps).

    Args:
        step_bytes: memory of the records of a step.

    Raises:
        OutOfSpaceError: The budget is too small.
    """
    need = 2 * (state_bytes + 2 * step_bytes)
    if options.has_replica and host_bytes < need:
        raise OutOfSpaceError(
            f"a replica of the state ({state_bytes} bytes), the base that it begins with, and the "
            f"records of two steps need {need} bytes of host memory; the budget is {host_bytes} "
            "bytes",
            hint=f"Budget(host_bytes={need}) or more, or apply='recovery'",
        )
    return host_bytes // 2 if options.has_replica else 0


def check_multistep_budget(
    options: Options, host_bytes: int, state_bytes: int, gradient_bytes: int
) -> None:
    """Check that a base in a fixed number of parts fits, with the gradients that complete it.

    Args:
        gradient_bytes: bytes of the gradients of a step.

    Raises:
        OutOfSpaceError: It does not fit.
    """
    parts = options.method.parts
    if not isinstance(parts, int):
        return
    # Part i of n, a share of 1/n, needs its gradients of the n - i steps after it: in all (n - 1) /
    # 2 times the gradients of a step.
    need = state_bytes + gradient_bytes * (parts - 1) // 2
    if host_bytes < need:
        fit = 1 + 2 * max(0, host_bytes - state_bytes) // max(1, gradient_bytes)
        raise OutOfSpaceError(
            f"a base in {parts} parts, with the gradients that bring the parts to the same step, "
            f"needs {need} bytes of host memory; the budget is {host_bytes} bytes",
            hint=f"Budget(host_bytes={need}) or more, or parts={fit}",
        )


def log_budget_bytes(arena_bytes: int, state_bytes: int) -> int:
    """Return the share of the arena for the gradient log.

    It is the space that two bases leave (the old one stays until the new one is durable), and at
    least half of the space that one base leaves.
    """
    return max(arena_bytes - 2 * state_bytes, (arena_bytes - state_bytes) // 2)


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, int]:
    """Return the number of parameter elements on this rank, and the bytes of all gradients."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = {id(parameter): parameter for group in groups for parameter in group["params"]}
    trained = [parameter for parameter in found.values() if parameter.requires_grad]
    return (
        sum(local_tensor(parameter).numel() for parameter in found.values()),
        sum(local_tensor(one).numel() * one.element_size() for one in trained),
    )


def mark_memory_bytes(shape: Shape) -> int:
    """Return the host memory of a step mark in a log of a state of this shape."""
    entries_bytes = sum(entry.size_bytes for entry in mark_entries(shape))
    return _pages_bytes(entries_bytes) + sum(shape.objects_bytes.values()) + RECORD_BYTES


def mark_entries(shape: Shape) -> list[Entry]:
    """Return the entries that each step mark contains in full, without everstep's own entries."""
    owners = shape.owners  # predicted entries have no owner yet
    marked = {name for name, one in owners.items() if one.in_marks and not is_reserved(name)}
    return [entry for entry in shape.entries if entry.name in marked]


_SLACK_BYTES = CONTROL_BYTES + (1 << 20)


def peer_bytes(peers: PeerOptions | None, info: RankInfo, host_bytes: int, state_bytes: int) -> int:
    """Return the memory here for copies of other ranks, by default half of ``host_bytes``.

    That is meant for two states of this rank, and two of another one.

    Args:
        host_bytes: memory for captured state, in total.

    Raises:
        OutOfSpaceError: The rest is too small for a base of this rank.
    """
    if peers is None or not peer_sources(info):
        return 0
    found = host_bytes // 2 if peers.host_bytes is None else int(peers.host_bytes)
    if host_bytes - found < state_bytes:
        need = 2 * state_bytes if peers.host_bytes is None else found + state_bytes
        raise OutOfSpaceError(
            f"copies of other ranks may use {found} of {host_bytes} bytes of host memory, and the "
            f"rest is too small for a base of this rank ({state_bytes} bytes)",
            rank=info.rank,
            hint=f"Budget(host_bytes={need}) or more, or a smaller PeerOptions(host_bytes=)",
        )
    return found


def peer_log_bytes(info: RankInfo, held_bytes: int, base_bytes: int) -> int:
    """Return the share of the memory for copies that logs of other ranks may use.

    It is the space that two bases of each of these ranks leave, and at most half.

    Args:
        base_bytes: bytes of a base of this rank with its records. Bases of other ranks may be a
            quarter larger.
    """
    one = base_bytes + base_bytes // 4 + _SLACK_BYTES
    left = held_bytes - 2 * len(peer_sources(info)) * one
    return max(0, min(held_bytes // 2, left)) // PAGE_BYTES * PAGE_BYTES


def peer_sources(info: RankInfo) -> list[int]:
    """Return the ranks whose copies the keeper of this rank holds."""
    return [rank for rank in range(len(info.nodes)) if peer_of(info.nodes, rank) == info.rank]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of the host memory budget, in bytes.

    Attributes:
        host_bytes: total of the shares.
        arena_bytes: arena, which captures and the log use.
        replica_bytes: replica in the keeper; 0 without one.
        own_bytes: bases of this rank that live in memory.
        peer_bytes: copies of other ranks.
    """

    host_bytes: int
    arena_bytes: int
    replica_bytes: int
    own_bytes: int
    peer_bytes: int


def plan_memory(
    options: Options,
    ranks: RankInfo,
    peers: PeerOptions | None,
    *,
    state_bytes: int,
    step_bytes: int,
) -> MemoryPlan:
    """Divide the budget of host memory.

    Args:
        state_bytes: host memory of a base.
        step_bytes: host memory of the records of a step.

    Raises:
        OutOfSpaceError: The budget is too small.
    """
    host_bytes = host_budget_bytes(options, state_bytes, ranks.here)
    replica_bytes = replica_budget_bytes(options, host_bytes, state_bytes, step_bytes)
    own_bytes = own_budget_bytes(options, host_bytes, state_bytes, peers=bool(ranks.nodes))
    left_bytes = host_bytes - replica_bytes - own_bytes
    held_bytes = peer_bytes(peers, ranks, left_bytes, state_bytes)
    arena_bytes = arena_budget_bytes(options, left_bytes - held_bytes, state_bytes)
    return MemoryPlan(
        # Less than the budget where the limit of file sizes restricts the arena.
        host_bytes=arena_bytes + replica_bytes + own_bytes + held_bytes,
        arena_bytes=arena_bytes,
        replica_bytes=replica_bytes,
        own_bytes=own_bytes,
        peer_bytes=held_bytes,
    )
