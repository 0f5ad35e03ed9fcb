"""Computes the gradients of sampled steps again, and compares them bit for bit.

A processor or accelerator that computes wrongly leaves no trace: the digests of a base cover the
wrong numbers as well. Forward and backward of a step are repeatable where the configuration is
deterministic, so a second computation finds such an error, and a third one decides which of the two
was wrong. Computed in the same process, an error that always strikes the same way is not found.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from everstep.errors import AuditError, OptionError
from everstep.link import BackgroundChannel
from everstep.state.training_state import State
from everstep.state.values.generators import RngStates

_log = logging.getLogger("everstep")
_Result = TypeVar("_Result")
_NAMES_MAX = 5
_STATELESS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


@dataclass(frozen=True, slots=True)
class _Before:
    """State that forward and backward change, before they run."""

    generators: RngStates
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    gradients: dict[str, torch.Tensor | None]


class RecomputeAudit:
    """Runs forward and backward, of sampled steps twice.

    Args:
        run_id: selects other steps for each run, and the same ones on all its ranks.
        vote: collective call that returns True if any rank passes True; None for a single rank.
        finish_copies: waits for copies of gradients that are under way: a second computation
            overwrites them.

    Attributes:
        audited: steps that were computed again.
        off: True once a difference has shown that the computation is not deterministic.
    """

    def __init__(
        self,
        state: State,
        channel: BackgroundChannel,
        run_id: str,
        vote: Callable[[bool], bool] | None,
        finish_copies: Callable[[None], object],
    ) -> None:
        self._state = state
        self._finish_copies = finish_copies
        self._channel = channel
        self._run_id = run_id
        self._vote = vote
        self.audited = 0
        self.off = False

    def run(self, compute: Callable[[], _Result], step: int, fraction: float) -> _Result:
        """Compute the gradients of a step.

        Args:
            compute: runs forward and backward. In sampled steps it is called again, with the same
                random numbers, buffers and gradients as the first time.
            step: step in progress.
            fraction: fraction of the steps that are sampled.

        Returns:
            Result of the first call.

        Raises:
            OptionError: A communication hook of DDP keeps state, as those that compress do.
            AuditError: Gradients differ, and the failure policy is to raise. The gradients are then
                those that two of three computations agree on.
        """
        if self.off or random.Random(f"{self._run_id} {step}").random() >= fraction:
            return compute()
        self._refuse_stateful_hooks()
        before = self._before()
        result = compute()
        self._finish_copies(None)
        first = self._gradients()
        second = self._again(before, compute)
        self.audited += 1
        differing = _differing(first, second)
        if self._any_rank(bool(differing)):
            third = self._again(before, compute)
            self._judge(step, first, second, third)
        return result

    def _judge(
        self,
        step: int,
        first: Mapping[str, torch.Tensor | None],
        second: Mapping[str, torch.Tensor | None],
        third: Mapping[str, torch.Tensor | None],
    ) -> None:
        """Keep the gradients that two of three computations agree on, and report the other one."""
        wrong = _differing(first, second)
        if not wrong:  # another rank has found a difference
            self._put(first)
            return
        if not _differing(second, third):
            which = "training"
            self._put(second)
        elif not _differing(first, third):
            which = "the second computation"
            self._put(first)
        else:
            self.off = True
            self._put(first)
            _log.warning(
                "step %d: three computations of the same gradients gave three results, for example "
                "of %s: the program is not deterministic, and is audited no more "
                "(torch.use_deterministic_algorithms(True) may help)",
                step,
                wrong[0],
            )
            return
        more = f" and {len(wrong) - _NAMES_MAX} more" if len(wrong) > _NAMES_MAX else ""
        self._channel.post(
            AuditError(
                f"{which} computed other gradients than two further computations of the same step: "
                f"{', '.join(wrong[:_NAMES_MAX])}{more}. Training goes on with those that two of "
                "three agree on",
                step=step,
                rank=self._state.ranks.rank,
                hint="this processor or accelerator has computed wrongly: take it out of service",
            )
        )
        self._channel.check()

    def _refuse_stateful_hooks(self) -> None:
        for name, module in self._sections():
            for hook, _ in getattr(module, "_comm_hooks", ()):
                if not str(getattr(hook, "__module__", "")).startswith(_STATELESS_HOOKS):
                    raise OptionError(
                        f"audited(): the communication hook of {name!r} may change its own state "
                        "in each backward, which cannot be computed again",
                        rank=self._state.ranks.rank,
                        hint="call the function itself, or use a hook of torch's default_hooks",
                    )

    def _any_rank(self, mine: bool) -> bool:
        return mine if self._vote is None else self._vote(mine)

    # --- The computation ----------------------------------------------------------------

    def _before(self) -> _Before:
        buffers = [
            (buffer, buffer.detach().clone())
            for module in self._modules()
            for buffer in module.buffers()
        ]
        return _Before(RngStates.now(), buffers, self._gradients())

    def _again(
        self, before: _Before, compute: Callable[[], object]
    ) -> dict[str, torch.Tensor | None]:
        """Compute once more from where the first computation began."""
        before.generators.put_back()
        with torch.no_grad():
            for buffer, value in before.buffers:
                buffer.copy_(value)
        self._put(before.gradients)
        compute()
        return self._gradients()

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        """Return copies of all gradients by name; None for a parameter without one."""
        return {
            name: None if (gradient := parameter.grad) is None else gradient.detach().clone()
            for name, parameter in self._parameters()
        }

    def _put(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters():
                value = gradients[name]
                if value is None or parameter.grad is None:
                    parameter.grad = None if value is None else value.clone()
                else:
                    # In place: it may be a view of the buckets of DistributedDataParallel.
                    parameter.grad.copy_(value)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{section}/{name}", parameter)
            for section, module in self._sections()
            for name, parameter in module.named_parameters()
        ]

    def _modules(self) -> list[nn.Module]:
        return [module for _, module in self._sections()]

    def _sections(self) -> Sequence[tuple[str, nn.Module]]:
        values = self._state.values.items()
        return [(name, value) for name, value in values if isinstance(value, nn.Module)]


def _differing(
    first: Mapping[str, torch.Tensor | None], second: Mapping[str, torch.Tensor | None]
) -> list[str]:
    return [name for name, value in first.items() if not _same_bits(value, second[name])]


def _same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    mine = _bytes_of(first)
    theirs = _bytes_of(second)
    return mine.shape == theirs.shape and torch.equal(mine, theirs)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    local: Any = tensor
    if hasattr(local, "to_local"):  # a DTensor: this rank's shard
        local = local.to_local()
    if local.layout != torch.strided:
        local = local.to_dense()
    # Not compared as numbers: NaN differs from itself, and 0 equals -0.
    return cast("torch.Tensor", local.contiguous().reshape(-1).view(torch.uint8))
