"""Memory and disk space that a run will need: computed and checked before it starts (I10).

Runs in the training process. First host memory: its budget is divided among the arena (captures and
log), a replica, bases that live in memory, and copies for other ranks. :func:`plan_memory` computes
the shares; each function refuses a budget that is too small, and names the number of bytes that
suffices. :class:`LogLimits` limits the gradient log in host memory and on disk.

Most optimizers create their state in their first step; before it, a state has a third of its final
size. :func:`shape_after_first_update` predicts the shape after it, so that budgets apply to all
of it: for torch's own optimizers, by an update of tensors without memory, on the meta device.

Last the disk: upper bounds for its space, and the daily write budget. The bounds include records:
headers, markers and manifests of a small state are not negligible. They do not include leftovers of
a failure (an incomplete base is removed with the next one), nor a log on disk, which is announced
separately.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from rich.filesize import decimal
from torch.optim import Optimizer

from everstep.arena import CONTROL_BYTES, PAGE_BYTES, PROGRESS_WORDS
from everstep.commit.peer_copies import NEEDED_MAX, peer_of
from everstep.config import Options
from everstep.errors import OutOfSpaceError
from everstep.format import ShardIdentity
from everstep.format.header import plan_files
from everstep.link.messages import RECORD_BYTES
from everstep.replay.optimizer_step import build, own_step
from everstep.seams import FileSystem
from everstep.seams.machine import limit_of, memory_available_bytes
from everstep.state.layout import Entry
from everstep.state.layout.entries import is_reserved
from everstep.state.layout.shards import plan_shards
from everstep.state.providers import ModuleProvider, OptimizerProvider, local_optimizer
from everstep.state.ranks import RankInfo
from everstep.state.survey import Shape, drift_bytes
from everstep.state.training_state import State
from everstep.state.values.objects import join_path
from everstep.state.values.tensors import local_tensor, tensor_entry
from everstep.tiers import PeerOptions, TierOptions, storage_errors

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


CAPTURES_OF_RANKS = 3
"""Number of complete captures that the keeper of each of several ranks holds, if every step is
captured."""


def captures_at_once(world: int) -> int:
    """Return how many states are in memory if every step is captured: complete captures, one that
    is being made, and one that is being written.

    Args:
        world: number of ranks.
    """
    return 2 + (CAPTURES_OF_RANKS if world > 1 else 1)


def parks_captures(options: Options, world: int, arena_bytes: int, state_bytes: int) -> bool:
    """Return True if captures of steps without a base are kept in memory.

    Several ranks take none if there is not enough memory: each waits for others at every step.

    Args:
        world: number of ranks.
        arena_bytes: memory for captures.
        state_bytes: host memory of a base.
    """
    if not options.is_scheduled or options.method.in_memory:
        return False
    enough = options.keeper.process and arena_bytes >= captures_at_once(world) * state_bytes
    return world == 1 or enough


def arena_budget_bytes(options: Options, budget_bytes: int, state_bytes: int) -> int:
    """Return the size of the arena.

    A keeper process shares the arena as a file in memory. The limit of file sizes (``ulimit -f``)
    counts its full size, although pages are allocated only when they are used.

    Args:
        budget_bytes: host memory that is left for the arena.

    Raises:
        OutOfSpaceError: A base does not fit within the limit.
    """
    limit_bytes = limit_of("RLIMIT_FSIZE")
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

    A base that waits until a slow disk has written others is of no use until then, so training
    waits instead. There is no limit if the user has set aside memory for a queue, or the
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


_MEMORY_SHARE = 4  # a segment has at most 1/4 of the memory of the log
_DISK_SHARE = 2  # and at most 1/2 of the bytes allowed between two bases


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Limits of one rank's log, and the sizes they are computed from, in bytes.

    Attributes:
        memory_bytes: records in host memory, including plain data; 0 if unknown. A new base is due
            when half of it is used.
        interval_bytes: records on disk between two bases; None for no limit. A new base is due
            before more are written.
        disk_bytes: budget of the run folder; None without one.
        bases_bytes: share of ``disk_bytes`` for bases.
        host_bytes: budget of host memory.
        arena_bytes: share of ``host_bytes`` for captures and the log.
        state_bytes: host memory of a base.
    """

    memory_bytes: int = 0
    interval_bytes: int | None = None
    disk_bytes: int | None = None
    bases_bytes: int = 0
    host_bytes: int = 0
    arena_bytes: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, host_bytes: int, arena_bytes: int, state_bytes: int) -> LogLimits:
        """Return the limits of a log in an arena of this size, without a disk.

        It gets the space that two bases leave (the old one stays until the new one is durable), and
        at least half of the space that one base leaves.
        """
        return cls(
            memory_bytes=max(arena_bytes - 2 * state_bytes, (arena_bytes - state_bytes) // 2),
            host_bytes=host_bytes,
            arena_bytes=arena_bytes,
            state_bytes=state_bytes,
        )

    def on_disk(
        self, options: Options, bases: int, bases_bytes: int, free_bytes: Callable[[], int]
    ) -> LogLimits:
        """Return the limits with those of the disk.

        With a disk budget, the log has the space that bases leave. Without one, and if the interval
        is chosen automatically, it has half of the free space. The space is divided by the number
        of bases, as each has a log of its own.

        Args:
            bases: maximum number of bases on disk, including the one being written.
            bases_bytes: bytes of these bases.
            free_bytes: function that returns the free bytes for this rank.
        """
        disk_bytes = options.budget.disk_bytes
        if not options.log_on_disk or (disk_bytes is None and not options.every.auto):
            return self
        if disk_bytes is None:
            return replace(self, interval_bytes=max(1, free_bytes() // 2 // bases))
        interval_bytes = max(1, (disk_bytes - bases_bytes) // bases)
        return replace(
            self,
            interval_bytes=interval_bytes,
            disk_bytes=disk_bytes,
            bases_bytes=bases_bytes,
        )

    def batch_to_wire(self, options: Options) -> dict[str, Any]:
        """Return the segment size to ask the keeper for (``batch_from_wire``)."""
        lag_steps = options.log.lag_steps
        memory_max = self.memory_bytes // _MEMORY_SHARE if self.memory_bytes else None
        bounds = [] if memory_max is None else [memory_max]
        if self.disk_bytes is not None and self.interval_bytes is not None:
            bounds.append(max(1, self.interval_bytes // _DISK_SHARE))
        return {
            "auto": options.batch_auto,
            "steps": options.log.batch_first,
            "most": None if lag_steps is None else lag_steps + 1,
            "bytes_max": min(bounds) if bounds else None,
            "memory_max": memory_max,
            "disk_bytes": self.disk_bytes,
            "bases_bytes": self.bases_bytes,
        }

    def check(self, mark_bytes: int) -> None:
        """Check that the memory of the log has space for a step.

        Args:
            mark_bytes: host memory of a step mark.

        Raises:
            OutOfSpaceError: It does not.
        """
        if mark_bytes > self.memory_bytes:
            more = f"Budget(host_bytes={self.host_bytes_for(2 * mark_bytes)}) or more"
            raise OutOfSpaceError(
                "each step of the log contains data besides gradients (entries that no optimizer "
                f"updates, and plain data) of {mark_bytes} bytes of host memory; of the budget of "
                f"{self.host_bytes} bytes the log has {self.memory_bytes}",
                hint=f"{more}, less plain data in the state, or method='lazy'",
            )

    def host_bytes_for(self, log_bytes: int) -> int | None:
        """Return the budget of host memory with which the log has ``log_bytes``; None if unknown.

        The arena is assumed to keep its current share of the budget.
        """
        if not self.arena_bytes:
            return None
        # Inverse of of(): the smaller arena for which one of its two terms reaches
        # log_bytes.
        arena_bytes = min(log_bytes + 2 * self.state_bytes, 2 * log_bytes + self.state_bytes + 1)
        return -(-self.host_bytes * arena_bytes // self.arena_bytes)


def shape_after_first_update(state: State, shape: Shape) -> tuple[Shape, bool]:
    """Return the shape of this rank's entries after an update of every optimizer.

    Args:
        shape: current shape.

    Returns:
        The expected shape, and True if it is complete. Entries of optimizer classes that are not
        torch's own cannot be predicted.
    """
    found = _ExpectedEntries(state, shape)
    entries = tuple(found.entries())
    return (
        replace(shape, entries=(*shape.entries, *entries)) if entries else shape
    ), found.is_complete


class _ExpectedEntries:
    """Entries that the optimizers of a state will create."""

    def __init__(self, state: State, shape: Shape) -> None:
        self.is_complete = True
        self._state = state
        self._aliases = shape.aliases
        self._written = {entry.name for entry in shape.entries}
        self._parameters: dict[int, str] = {}
        for section, provider in state.providers.items():
            if isinstance(provider, ModuleProvider):
                for key, parameter in provider.named_parameters():
                    self._parameters.setdefault(id(parameter), join_path(section, key))

    def entries(self) -> Iterator[Entry]:
        """Yield the expected entries of all optimizers."""
        for key, optimizer in self._state.optimizers.items():
            provider = self._state.providers[key]
            inner = local_optimizer(optimizer)
            assert isinstance(provider, OptimizerProvider)
            names = {id(parameter): name for name, parameter in provider.named()}
            known: dict[Any, Mapping[str, torch.Tensor] | None] = {}
            for number, group in enumerate(inner.param_groups):
                for parameter in group["params"]:
                    if not parameter.requires_grad or inner.state.get(parameter):
                        continue
                    if inner is optimizer and not self._writes(parameter):
                        continue  # another rank writes it
                    local = local_tensor(parameter)
                    # One trial per group, shape and dtype: a trial for each parameter would give
                    # the same.
                    form = number, local.shape, local.dtype
                    if form not in known:
                        known[form] = _kept(type(inner), group, local)
                    kept = known[form]
                    if kept is None:
                        self.is_complete = False
                        break
                    front = join_path(join_path(key, "state"), names[id(parameter)])
                    for name, tensor in kept.items():
                        yield tensor_entry(join_path(front, name), tensor)

    def _writes(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank writes the parameter, and so its optimizer state."""
        name = self._parameters.get(id(parameter))
        return name is None or self._aliases.get(name, name) in self._written


def _kept(
    kind: type[Optimizer], group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Return the state that an optimizer will keep of a parameter, as tensors without memory.

    Small tensors may have memory. None if this cannot be found without running code that is not
    torch's, or without real values.
    """
    if not f"{kind.__module__}.".startswith("torch.optim."):
        return None
    # Foreach, fused and capturable kernels need a real device; the state they keep is the same.
    plain = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
    options = {k: plain.get(k, v) for k, v in group.items() if k != "params"}
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    stand_in.grad = torch.empty_like(stand_in)
    try:
        optimizer = build(kind, [[stand_in]], [options])
        with torch.no_grad():
            own_step(kind)(optimizer)
    except (RuntimeError, TypeError):
        return None  # it reads values (ASGD, Adafactor), or needs a closure (LBFGS)
    kept = optimizer.state.get(stand_in, {})
    return {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}


# --- Disk ---------------------------------------------------------------------------------

_RECORD_BYTES = 1024  # size of a marker for one file; about 450 bytes are used
RUN_BYTES = 8192
"""Bytes of the run folder without bases and log: ``run.json`` and a few timelines."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds for this rank in bytes, as long as nothing fails.

    Attributes:
        base_bytes: files of one base, with its records.
        beside: bases on disk in addition to those to keep. One is being written. With several
            ranks there is one more, because other ranks write the next base before rank 0 has
            allowed them to delete the oldest. Peers may need further ones.
        disk_bytes: all bases in the run folder.
        copies: places for copies, and the bytes of this rank in each.
    """

    base_bytes: int
    beside: int
    disk_bytes: int
    copies: tuple[tuple[str, int], ...] = ()


def bounds_of(
    options: Options,
    shape: Shape,
    ranks: RankInfo,
    places: Sequence[TierOptions] = (),
) -> Bounds:
    """Return the bounds for a state of this shape."""
    base_bytes = _base_bytes(shape, ranks)
    newest = options.keep.newest
    best = options.keep.bases_max - newest
    copies = tuple(
        (place.where, ((place.keep or newest) + best + 1) * base_bytes + RUN_BYTES)
        for place in places
    )
    beside = 1 if ranks.world == 1 else 2
    if len(set(ranks.nodes)) > 1 and not options.method.in_memory:
        beside += max(0, 1 + NEEDED_MAX - newest)
    disk_bytes = (options.keep.bases_max + beside) * base_bytes + RUN_BYTES
    return Bounds(base_bytes, beside, disk_bytes, copies)


def _base_bytes(shape: Shape, ranks: RankInfo) -> int:
    identity = ShardIdentity("0" * 32, 0, 0, 0, ranks.rank, ranks.world, True)
    files = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes)
    # A layout is used again while objects grow by less than this (state/survey.py), so a
    # base may exceed its plan.
    drift = sum(map(drift_bytes, shape.objects_bytes.values()))
    marker = _RECORD_BYTES * max(1, len(files))
    # The marker, and the manifest, which contains the markers of all ranks.
    return sum(file.size_bytes for file in files) + drift + (2 + ranks.world) * marker


DAY_S = 86_400.0
_SLOT_S = 600.0
_NEVER_STEPS = 1 << 62
_STEP_BYTES = 16384  # random states and record headers of a step


def check_disk_budget(
    options: Options,
    run: PurePath,
    base_bytes: int,
    *,
    beside: int = 1,
    step_bytes: int = 0,
    other_bytes: int = 0,
) -> None:
    """Check that the bases to keep fit into the disk budget, with their logs.

    Args:
        base_bytes: files of one base.
        beside: bases on disk in addition to those to keep.
        step_bytes: maximum size of a step of the log on disk. Each base has a log of as many steps
            as the interval has, or of at least two if the interval is not given in steps.
        other_bytes: further bytes in the run folder.

    Raises:
        OutOfSpaceError: They do not fit. The hint names the bytes, bases or steps that would.
    """
    budget = options.budget.disk_bytes
    bases = options.keep.bases_max + beside
    steps = (options.every.steps or 2) * options.method.disk_every if step_bytes else 0
    each = base_bytes + steps * step_bytes
    need = bases * each + other_bytes
    if budget is None or need <= budget:
        return
    log = f", each with a log of {_steps(steps)}," if steps else ""
    best = options.keep.bases_max - options.keep.newest
    fit = (budget - other_bytes) // each - beside - best
    instead = [f"Budget(disk_bytes={need})", *([f"keep={fit}"] if fit > 0 else [])]
    if options.every.steps is not None and steps:
        left = (budget - other_bytes) // bases - base_bytes
        every = left // (step_bytes * options.method.disk_every)
        instead += [f"every={every}"] if every > 0 else []
    raise OutOfSpaceError(
        f"{options.keep.bases_max} bases to keep and {'one' if beside == 1 else beside} being "
        f"written{log} need {need} bytes; the budget is {budget}",
        path=run,
        hint=", or ".join(instead),
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes that a run writes to disk in a day of training.

    Attributes:
        bases_bytes: bytes of bases.
        log_bytes: bytes of a log on disk.
    """

    bases_bytes: float
    log_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.bases_bytes + self.log_bytes

    @property
    def in_words(self) -> str:
        """Describe the forecast, as in ``"bases of 4.6 GB and a log of 33.0 GB"``."""
        bases = decimal(round(self.bases_bytes))
        log = decimal(round(self.log_bytes))
        return f"bases of {bases}" + (f" and a log of {log}" if self.log_bytes else "")


class DayMeter:
    """Measure the growth of a total in the last 24 hours, rounded up."""

    def __init__(self) -> None:
        self._slots: deque[tuple[float, int]] = deque()  # start time, and the total then
        self._total = 0

    def reached(self, now_s: float, total: int) -> None:
        """Note the current total."""
        if not self._slots or now_s - self._slots[-1][0] >= _SLOT_S:
            self._slots.append((now_s, self._total))
        self._total = max(self._total, total)

    def last_day_bytes(self, now_s: float) -> int:
        """Return the growth in the last day, plus at most ten minutes."""
        # The slot that began before the day stays, so that no byte of the day is missed.
        while len(self._slots) > 1 and self._slots[1][0] <= now_s - DAY_S:
            self._slots.popleft()
        return self._total - self._slots[0][1] if self._slots else 0


def interval_steps_within(bytes_per_day: float, base_bytes: int, step_s: float) -> int:
    """Return the smallest interval, in steps, whose bases stay within ``bytes_per_day``."""
    if bytes_per_day <= 0:
        return _NEVER_STEPS
    return min(_NEVER_STEPS, max(1, math.ceil(base_bytes * DAY_S / (step_s * bytes_per_day))))


def budget_in_words(options: Options) -> str:
    """Describe the daily write budget, as in ``"budget of 40.0 GB a day"``."""
    budget = options.budget.write_bytes_per_day
    return "no daily budget" if budget is None else f"budget of {decimal(budget)} a day"


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def log_step_bytes(shape: Shape, recorded_bytes: int) -> int:
    """Return the maximum size of a step in a log on disk.

    That is the recorded gradients, the entries of the step mark, its objects and random states, and
    headers.
    """
    entries = sum(entry.size_bytes for entry in mark_entries(shape))
    return recorded_bytes + entries + sum(shape.objects_bytes.values()) + _STEP_BYTES


def free_bytes(filesystem: FileSystem, run: PurePath) -> int:
    """Return the free bytes of the disk of a run.

    Raises:
        StorageError
    """
    with storage_errors("look at the disk", run):
        return filesystem.free_bytes(run)
