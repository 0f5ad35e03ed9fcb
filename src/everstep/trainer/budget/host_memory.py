"""Budgets: computed, printed and enforced before anything is captured (I10)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from everstep.arena import PAGE_BYTES
from everstep.arena.memory import CONTROL_BYTES, PROGRESS_WORDS
from everstep.commit.peers import peer_of
from everstep.config.options import Options
from everstep.errors import OutOfSpaceError
from everstep.link.record_memory import RECORD_BYTES
from everstep.seams.machine import file_bytes_max, memory_available_bytes
from everstep.state.entries import Entry
from everstep.state.layout import plan_shards
from everstep.state.ranks.dtensors import local_of
from everstep.state.ranks.ranks import RankInfo
from everstep.state.survey.survey import Shape, is_reserved
from everstep.tiers.options import PeerOptions

__all__ = [
    "arena_budget_bytes",
    "base_memory_bytes",
    "bases_in_flight_max",
    "check_multistep_budget",
    "gradients_of",
    "host_budget_bytes",
    "log_budget_bytes",
    "mark_memory_bytes",
    "own_budget_bytes",
    "peer_bytes",
    "peer_log_bytes",
    "replica_budget_bytes",
]

_IN_FLIGHT_MIN = 2
_QUEUE_BYTES = 64 << 20


def base_memory_bytes(shape: Shape) -> int:
    """What a base of a state takes of host memory, in whole pages: its tensors, as they lie in the
    arena, and its plain data, which lies beside it."""
    static = shape.static  # in files of their own
    apart = [[e for e in shape.entries if (e.name in static) is kind] for kind in (False, True)]
    sizes = [layout.size_bytes for entries in apart for layout in plan_shards(entries)]
    return sum(map(_pages_bytes, [*sizes, sum(shape.objects_bytes.values())]))


def _pages_bytes(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def host_budget_bytes(options: Options, state_bytes: int, ranks_here: int = 1) -> int:
    """Host memory for captured state: by default, half of what is available.

    Args:
        ranks_here: of the job on this machine, which share that half.

    Raises:
        OutOfSpaceError: when the method needs more, with the number of bytes.
    """
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
    # Where every step is captured, the capture before stays until the next is whole.
    return 2 if options.is_scheduled else 1


def arena_budget_bytes(options: Options, budget_bytes: int, state_bytes: int) -> int:
    """Return how much of the host memory that is left for it the arena may have.

    A keeper process shares the arena as a file in memory, which the limit of file sizes
    (``ulimit -f``) counts although its pages are taken only as they are needed.

    Args:
        budget_bytes: what the budget of host memory leaves for the arena.

    Raises:
        OutOfSpaceError: a base does not fit within the limit, with both numbers.
    """
    limit_bytes = file_bytes_max()
    if limit_bytes is None or options.method.base == "sync" or not options.keeper.process:
        return budget_bytes
    most_bytes = max(0, limit_bytes - CONTROL_BYTES) // PAGE_BYTES * PAGE_BYTES
    need_bytes = _bases_at_once(options) * state_bytes
    if most_bytes < need_bytes:
        raise OutOfSpaceError(
            f"the state takes {need_bytes} bytes of memory that training shares with its keeper, "
            f"and the limit of file sizes (ulimit -f) of {limit_bytes} bytes leaves {most_bytes}",
            hint=f"a limit of {need_bytes + CONTROL_BYTES} bytes or more (ulimit -f unlimited), "
            "KeeperOptions(process=False), or method='sync'",
        )
    return min(budget_bytes, most_bytes)


def bases_in_flight_max(options: Options, state_bytes: int) -> int | None:
    """How many bases may be in host memory that are on no disk yet; None: as many as fit.

    One that waits for a slow disk behind others is of no use before those are written, so training
    waits instead; unless memory was set apart for a queue, the state is so small that a few more
    are nothing, or the method has a bound of its own.
    """
    if options.budget.host_bytes is not None or options.is_scheduled:
        return None
    return min(PROGRESS_WORDS, max(_IN_FLIGHT_MIN, _QUEUE_BYTES // max(1, state_bytes)))


def own_budget_bytes(options: Options, host_bytes: int, state_bytes: int, *, peers: bool) -> int:
    """What bases of this rank that live in memory may take of the host memory: with what comes
    from peers a third, otherwise a half. Beside it captures need room.

    Args:
        state_bytes: with what optimizers will keep behind their first update.
        peers: other ranks' bases are held here, too.

    Raises:
        OutOfSpaceError: two bases do not fit, with the number of bytes.
    """
    if not options.method.in_memory:
        return 0
    parts = 3 if peers else 2
    found = host_bytes // parts
    if found < 2 * state_bytes:
        raise OutOfSpaceError(
            f"the newest two bases ({state_bytes} bytes each) live in the keeper's memory; of "
            f"{host_bytes} bytes of host memory {found} are for them",
            hint=f"Budget(host_bytes={2 * parts * state_bytes}) or more, or method='lazy'",
        )
    return found


def replica_budget_bytes(
    options: Options, host_bytes: int, state_bytes: int, step_bytes: int
) -> int:
    """What a replica may take of the host memory: a half. In the other are the base that it begins
    with and the steps that wait while it is written (at most two states, and the records
    of two steps).

    Args:
        step_bytes: of the records of a step.

    Raises:
        OutOfSpaceError: it is too little, with the number of bytes.
    """
    need = 2 * (state_bytes + 2 * step_bytes)
    if options.has_replica and host_bytes < need:
        raise OutOfSpaceError(
            f"a replica of the state ({state_bytes} bytes), and the records of two steps beside "
            f"the base that it begins with, take {need} bytes of host memory; the budget is "
            f"{host_bytes} bytes",
            hint=f"Budget(host_bytes={need}) or more, or apply='recovery'",
        )
    return host_bytes // 2 if options.has_replica else 0


def check_multistep_budget(
    options: Options, host_bytes: int, state_bytes: int, gradient_bytes: int
) -> None:
    """Refuses parts whose gradients do not fit beside the base.

    Args:
        gradient_bytes: of a step.

    Raises:
        OutOfSpaceError: with the number of bytes, or of parts, that would fit.
    """
    parts = options.method.parts
    if not isinstance(parts, int):
        return
    need = state_bytes + gradient_bytes * (parts - 1) // 2
    if host_bytes < need:
        fit = 1 + 2 * max(0, host_bytes - state_bytes) // max(1, gradient_bytes)
        raise OutOfSpaceError(
            f"a base in {parts} parts takes {need} bytes of host memory, with the gradients that "
            f"bring them to one step; the budget is {host_bytes} bytes",
            hint=f"Budget(host_bytes={need}) or more, or parts={fit}",
        )


def log_budget_bytes(arena_bytes: int, state_bytes: int) -> int:
    """Host memory for the gradient log: what two bases at turnover leave; at least a half of what
    one leaves."""
    return max(arena_bytes - 2 * state_bytes, (arena_bytes - state_bytes) // 2)


def gradients_of(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, int]:
    """How many elements of parameters are here, and the bytes of all their gradients that may be
    there."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = {id(parameter): parameter for group in groups for parameter in group["params"]}
    taught = [parameter for parameter in found.values() if parameter.requires_grad]
    return (
        sum(local_of(parameter).numel() for parameter in found.values()),
        sum(local_of(one).numel() * one.element_size() for one in taught),
    )


def mark_memory_bytes(shape: Shape) -> int:
    """What the mark of a step takes of host memory, in a log of a state of this shape."""
    entries_bytes = sum(entry.size_bytes for entry in mark_entries(shape))
    return _pages_bytes(entries_bytes) + sum(shape.objects_bytes.values()) + RECORD_BYTES


def mark_entries(shape: Shape) -> list[Entry]:
    """What each step mark holds in full, but for what everstep keeps itself."""
    owners = shape.owners  # not of what the first update is expected to make
    marked = {name for name, one in owners.items() if one.in_marks and not is_reserved(name)}
    return [entry for entry in shape.entries if entry.name in marked]


_SLACK_BYTES = CONTROL_BYTES + (1 << 20)


def peer_bytes(peers: PeerOptions | None, info: RankInfo, host_bytes: int, state_bytes: int) -> int:
    """What copies of other ranks may take of the host memory here (two states of one's own,
    and two of another rank).

    Args:
        host_bytes: for captured state, all in all.

    Raises:
        OutOfSpaceError: nothing would be left for a base of this rank, with the number.
    """
    if peers is None or not peer_sources(info):
        return 0
    found = host_bytes // 2 if peers.host_bytes is None else int(peers.host_bytes)
    if host_bytes - found < state_bytes:
        need = 2 * state_bytes if peers.host_bytes is None else found + state_bytes
        raise OutOfSpaceError(
            f"copies of other ranks may take {found} of {host_bytes} bytes of host memory, and a "
            f"base of this one takes {state_bytes}",
            rank=info.rank,
            hint=f"Budget(host_bytes={need}) or more, or a smaller PeerOptions(host_bytes=)",
        )
    return found


def peer_log_bytes(info: RankInfo, held_bytes: int, base_bytes: int) -> int:
    """What logs of other ranks may take of the memory for copies: what two bases of each of these
    ranks leave, and a half at most.

    Args:
        base_bytes: of a base of this rank, with its records; those of others may be larger by a
            quarter.
    """
    one = base_bytes + base_bytes // 4 + _SLACK_BYTES
    left = held_bytes - 2 * len(peer_sources(info)) * one
    return max(0, min(held_bytes // 2, left)) // PAGE_BYTES * PAGE_BYTES


def peer_sources(info: RankInfo) -> list[int]:
    return [rank for rank in range(len(info.nodes)) if peer_of(info.nodes, rank) == info.rank]
