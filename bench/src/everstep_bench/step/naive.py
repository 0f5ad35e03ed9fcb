"""Differences of the whole state from one step to the next, as others take them.

LowDiff's baseline (section III-A, "Naive DC", as Check-N-Run does it): the difference of the
parameters is compressed to its largest elements; the optimizer's moments, in which nearly every
element changes in every step, are stored as they are. It goes to disk by the very same path as
everstep's own bases: copied during the next step, written past the page cache, by a keeper.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from everstep.checkpointer import Checkpointer
from everstep.compress.floats import kept_count
from everstep.compress.sparse import topk
from everstep.config.options import KeeperOptions
from everstep.errors import RecoveryError
from everstep.format.names import shard_name
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import close_run, keepers_of
from everstep_bench.step.arms import Recovered, StepArm
from everstep_bench.step.ours import LINGER_KILLED_S
from everstep_bench.step.settings import Setting

__all__ = ["NaiveDiff"]

_WARM_UP_STEPS = 3
_SPARE = 2  # differences that are kept beyond those that the newest whole state needs
_MOMENTS = ("exp_avg", "exp_avg_sq")


class NaiveDiff(StepArm):
    """A whole state every so many steps, and a difference after every step.

    What compression leaves out of a difference is in the next one: each is taken to what the
    ones before it add up to. A whole state begins anew.
    """

    saves_each_step = True

    def __init__(self, setting: Setting, loop: Loop, folder: Path, placement: Placement) -> None:
        super().__init__(setting, loop, folder, placement)
        self.detail = (
            f"after every step the top {100 * setting.ratio:g} % of the parameters' difference, "
            f"and the moments as they are; the whole state every {setting.every} steps; both by "
            'method="lazy"'
        )
        self._step = 0
        self._whole: Checkpointer | None = None
        self._differences: Checkpointer | None = None
        self._parameters: dict[str, Tensor] = {}
        self._stored: dict[str, Tensor] = {}
        self._scratch = torch.empty(0)
        self._state: dict[str, Any] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begins, or goes on with, both runs."""
        training = self._loop.training
        every = self.setting.every
        self._folder.mkdir(exist_ok=True)
        self._parameters = dict(training.model.named_parameters())
        self._stored = {n: p.detach().clone().view(-1) for n, p in self._parameters.items()}
        largest = max(stored.numel() for stored in self._stored.values())
        self._scratch = torch.empty(largest)
        kept = {n: kept_count(t.numel(), self.setting.ratio) for n, t in self._stored.items()}
        self._state = {
            "indices": {n: torch.zeros(count, dtype=torch.int32) for n, count in kept.items()},
            "values": {n: torch.zeros(count) for n, count in kept.items()},
            "moments": {n: self._moments(p) for n, p in self._parameters.items()},
            "numbers": {},
            "scheduler": training.scheduler,
            "loader": training.loader,
            "progress": training.progress,
        }
        keeper = KeeperOptions(cores=self._placement.others, linger_s=LINGER_KILLED_S)
        self._whole = Checkpointer(
            self._folder / "whole",
            training.state(),
            method="lazy",
            every=every,
            keep=1,
            keeper=keeper,
        )
        self._differences = Checkpointer(
            self._folder / "differences",
            self._state,
            method="lazy",
            every=1,
            keep=every + _SPARE,
            declared=("moments/*",),
            keeper=keeper,
        )
        # No optimizer owns the moments there: copies are waited for by hand.
        optimizer = training.optimizer
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._both[1].before_update()),
            optimizer.register_step_post_hook(lambda *_: self._both[1].after_update()),
        ]

    def resume(self) -> Recovered:
        """The newest whole state, and the differences since, one after the other."""
        whole, differences = self._both
        base = whole.resume()
        last = differences.resume()
        # At the next whole state they begin anew.
        target = max(base.step, min(last.step, base.step + self.setting.every))
        if target != last.step and target > base.step:
            last = differences.resume(target)
        self._step = target
        self._begin_anew()
        if target > base.step:
            for step in range(base.step + 1, target):
                self._add(self._of_step(step))
            self._add(
                (n, self._state["indices"][n], self._state["values"][n]) for n in self._stored
            )
            self._put_back(target - base.step)
        return Recovered(target, base.source, base.step, target - base.step)

    def warm_up(self) -> None:
        """As bases are warmed up, too."""
        for _ in range(_WARM_UP_STEPS):
            self._loop.step()
            self.after_step()
            self._both[0].save()
            self.settle()

    def after_step(self) -> None:
        """Takes the difference; what is larger than an index is copied during the next step."""
        whole, differences = self._both
        self._step += 1
        for name, parameter in self._parameters.items():
            stored = self._stored[name]
            difference = self._scratch[: stored.numel()]
            torch.sub(parameter.detach().view(-1), stored, out=difference)
            form = topk(difference, self.setting.ratio)
            stored.index_add_(0, form.positions(), form.values)
            self._state["indices"][name].copy_(form.indices)
            self._state["values"][name].copy_(form.values)
        groups = self._loop.training.optimizer.param_groups
        self._state["numbers"] = {"lr": [group["lr"] for group in groups]}
        differences.step()
        whole.step()
        if self._step % self.setting.every == 0:
            self._begin_anew()

    def settle(self) -> None:
        """Waits for both."""
        for one in self._both:
            one.wait(TIMEOUT_S)

    def memory_bytes(self) -> int:
        """As the engine counts saves."""
        whole, differences = self._both
        parts = (self._state[name] for name in ("indices", "values"))
        small: int = sum(tensor.nbytes for part in parts for tensor in part.values())
        moments: int = sum(t.nbytes for m in self._state["moments"].values() for t in m.values())
        saves = differences.stats().saves
        return saves * (small + moments) + whole.stats().saves * self._loop.size_bytes

    def processes(self) -> list[int]:
        """The keepers of both."""
        return keepers_of(self._folder / "whole") + keepers_of(self._folder / "differences")

    def close(self) -> None:
        """Closes both runs."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        keepers = self.processes()
        for one in (self._differences, self._whole):
            if one is not None:
                close_run(one, keepers if one is self._whole else [], self.setting.arm)
        self._differences = self._whole = None
        super().close()

    @property
    def _both(self) -> tuple[Checkpointer, Checkpointer]:
        assert self._whole is not None
        assert self._differences is not None
        return self._whole, self._differences

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self._loop.training.optimizer.state[parameter]
        return {name: state[name] for name in _MOMENTS}

    def _begin_anew(self) -> None:
        for name, parameter in self._parameters.items():
            self._stored[name].copy_(parameter.detach().view(-1))

    def _of_step(self, step: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Read the tensors of an earlier step from its safetensors file."""
        run = self._folder / "differences"
        found = sorted(run.glob(f"timeline-*/base/{step:012d}/{shard_name(0)}"))
        if not found:
            raise RecoveryError("a difference is not there", step=step, path=run)
        with safe_open(found[-1], framework="pt") as file:
            for name in self._stored:
                yield (
                    name,
                    file.get_tensor(f"indices/{name}"),
                    file.get_tensor(f"values/{name}"),
                )

    def _add(self, parts: Iterator[tuple[str, Tensor, Tensor]]) -> None:
        for name, indices, values in parts:
            self._stored[name].index_add_(0, indices.to(torch.int64), values)

    def _put_back(self, steps: int) -> None:
        optimizer = self._loop.training.optimizer
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.view(-1).copy_(self._stored[name])
            state = optimizer.state[parameter]
            for key, moment in self._state["moments"][name].items():
                if moment is not state[key]:
                    state[key].copy_(moment)
            state["step"] += steps
        for group, rate in zip(optimizer.param_groups, self._state["numbers"]["lr"], strict=True):
            group["lr"] = rate
