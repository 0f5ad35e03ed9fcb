"""A training loop over a DeepSpeed engine: each step is saved, and a restart continues there.

::

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    run, loader = resumable(engine, "runs/a", loader)
    for epoch in run.epochs(3):
        for batch in loader:
            ...

ZeRO updates flat partitions: of each parameter group a one-dimensional tensor of float32, of which
each rank owns a piece. They are what the optimizer of the user trains, so they and its moments are
the state, and their gradients are logged. The weights of the model are derived from them: after a
resume they are copied from the partitions and gathered, as at the end of each update.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError
from everstep.integrations.loops import IteratedLoader, Run
from everstep.integrations.parts import with_added

_COUNTERS = ("global_samples", "global_steps", "micro_steps", "skipped_steps")
_SCALES = ("cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter")
"""Values of a loss scaler that training changes."""

_USED = {
    DeepSpeedZeroOptimizer: (
        "_lazy_init_hp_params_optimizer_state",
        "_optimizer_step",
        "single_partition_of_fp32_groups",
        "update_lp_params",
    ),
    DeepSpeedZeroOptimizer_Stage3: (
        "_clear_fp32_optimizer_param_groups",
        "_optimizer_step",
        "_post_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "_set_fp32_optimizer_param_groups",
        "fp32_partitioned_groups_flat",
    ),
}
"""Attributes of DeepSpeed's optimizers that this module uses; most are private to it."""


def resumable(
    engine: DeepSpeedEngine,
    path: str | Path,
    *loaders: DataLoader[Any],
    state: MutableMapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Any, ...]:
    """Save each step of a loop over an engine in a run folder, and resume from there.

    In the state are the partitions of the weights that this rank owns, the optimizer, the
    scheduler, buffers and frozen parameters, the loss scale, the engine's counters, random
    generators, and position and order of the data. Call it on each rank, after
    ``deepspeed.initialize()`` and before the loop. A resume needs the same number of ranks.
    ``run.epochs(n)`` closes the run after the last epoch; a loop over ``range(run.epoch, n)`` calls
    ``run.close()``.

    Args:
        engine: the engine, with ZeRO 0 to 3 and an optimizer of torch.
        path: run folder.
        loaders: loaders of the loop. Each rank gets its own share of the batches.
        state: further parts of the state, by name.
        seed: seed of the order of the data.
        options: further arguments of :class:`~everstep.Checkpointer`.

    Returns:
        The run, and for each loader the one that the loop iterates in its place.

    Raises:
        OptionError: this engine or one of the loaders is not supported.
    """
    _refuse(engine, loaders)
    followed = [IteratedLoader(ResumableLoader(one, seed=seed)) for one in loaders]
    weights = _weights(engine)
    parts = {**weights.parts(), "engine": _Engine(engine, weights)}
    names = ["data"] if len(followed) == 1 else [f"data.{n}" for n in range(len(followed))]
    parts |= zip(names, followed, strict=True)
    if engine.lr_scheduler is not None:
        parts["scheduler"] = engine.lr_scheduler
    whole = with_added(parts, state, "the engine")
    run = Run(Checkpointer(path, whole, **options), [weights.optimizer], followed)
    weights.refresh()
    # The partitions are restored again by a later resume() of the loop's own.
    engine.module.register_forward_pre_hook(lambda *_: weights.refresh())
    return (run, *followed)


def _refuse(engine: Any, loaders: tuple[Any, ...]) -> None:
    if type(engine) is not DeepSpeedEngine:
        raise OptionError(f"a {type(engine).__name__} cannot be made resumable")
    zero = engine.optimizer
    kind = type(zero)
    missing = [name for name in _USED.get(kind, ()) if not hasattr(zero, name)]
    if missing:
        raise OptionError(
            f"deepspeed {deepspeed.__version__} is not supported: {kind.__name__} has no "
            f"{missing[0]}",
            hint="install a newer deepspeed (tested: 0.19)",
        )
    if kind not in _USED and not type(zero).__module__.startswith("torch.optim."):
        raise OptionError(
            f"an engine with the optimizer {kind.__module__}.{kind.__name__} cannot be made "
            "resumable",
            hint='"zero_optimization": {"stage": 1} and an optimizer of torch.optim; '
            "EverstepCheckpointEngine saves checkpoints of every engine",
        )
    unsupported = {
        "experts (MoE)": engine.has_moe_layers,
        "offload_optimizer": getattr(zero, "cpu_offload", False)
        or getattr(zero, "offload_optimizer", False),
        "offload_param to NVMe": getattr(zero, "params_in_nvme_and_cpu", False),
        "zenflow": getattr(zero, "zenflow", False),
        "torch_autocast and float16": getattr(zero, "torch_autocast_gradscaler", None) is not None,
        "curriculum learning": engine.curriculum_learning_enabled(),
        "random_ltd": engine.random_ltd_enabled(),
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise OptionError(
            f"an engine with {found[0]} cannot be made resumable",
            hint="EverstepCheckpointEngine saves its checkpoints",
        )
    if not loaders:
        raise OptionError(
            "no loader is given", hint="run, loader = resumable(engine, path, loader)"
        )
    if bad := [one for one in loaders if not isinstance(one, DataLoader)]:
        raise OptionError(
            f"a {type(bad[0]).__name__} cannot be made resumable",
            hint="give a torch DataLoader, and initialize() no training_data",
        )


def _weights(engine: Any) -> _Weights:
    kind = type(engine.optimizer)
    if kind is DeepSpeedZeroOptimizer_Stage3:
        return _Shards(engine)
    if kind is DeepSpeedZeroOptimizer:
        return _Partitions(engine)
    return _Weights(engine)


class _Weights:
    """The weights that an engine trains: without ZeRO the parameters of its module.

    Attributes:
        optimizer: optimizer of torch that makes the updates.
        restored: the state was restored, and nothing is derived from it yet.
    """

    def __init__(self, engine: Any) -> None:
        self.optimizer: Optimizer = engine.optimizer
        self.restored = False
        self._engine = engine

    def parts(self) -> dict[str, Any]:
        """Return the parts of the state."""
        return {"model": self._engine.module, "optimizer": self.optimizer}

    def refresh(self) -> None:
        """Derive the module's own weights from restored ones. A collective."""
        self.restored = False


class _Partitions(_Weights):
    """Flat partitions of ZeRO 1 and 2, one for each parameter group.

    DeepSpeed calls the optimizer once for each group, and hides the others from it. Only the
    partition of the group has a gradient then, so an update of all groups is the same; and it is
    one that a log can repeat.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        zero = self._zero = engine.optimizer
        self.optimizer = zero.optimizer
        zero._optimizer_step = self._step

    def parts(self) -> dict[str, Any]:
        module = self._engine.module
        return {
            "weights": _Tensors(self._trained()),
            "optimizer": self.optimizer,
            "frozen": _Tensors(self._frozen()),
            "buffers": _Buffers(module),
        }

    def refresh(self) -> None:
        if self.restored:
            super().refresh()
            self._derive()

    def _trained(self) -> dict[str, torch.Tensor]:
        partitions = self._zero.single_partition_of_fp32_groups
        return {str(number): one for number, one in enumerate(partitions)}

    def _frozen(self) -> dict[str, torch.Tensor]:
        named = self._engine.module.named_parameters()
        return {name: one for name, one in named if not one.requires_grad}

    def _step(self, group_no: int) -> None:
        self.optimizer.step()
        self._zero._lazy_init_hp_params_optimizer_state()

    def _derive(self) -> None:
        self._zero.update_lp_params()


class _Shards(_Partitions):
    """Flat partitions of ZeRO 3, one or more for each parameter group.

    Here DeepSpeed gives each group of the optimizer one partition at a time, and takes it away
    after the update.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        zero = self._zero
        zero._clear_fp32_optimizer_param_groups()
        zero._set_fp32_optimizer_param_groups()
        # They stay there. DeepSpeed adds and removes them when it saves a checkpoint.
        zero._set_fp32_optimizer_param_groups = zero._clear_fp32_optimizer_param_groups = _nothing

    def _trained(self) -> dict[str, torch.Tensor]:
        partitions = self._zero.fp32_partitioned_groups_flat
        return {str(number): one for number, one in enumerate(partitions)}

    def _frozen(self) -> dict[str, torch.Tensor]:
        named = self._engine.module.named_parameters()
        return {name: one.ds_tensor for name, one in named if not one.requires_grad}

    def _step(self, group_no: int) -> None:
        self.optimizer.step()

    def _derive(self) -> None:
        for number in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        if persistent := self._zero.persistent_parameters:
            # They stay gathered after an update, so all_gather() alone would find nothing to do.
            persistent[0].partition(persistent, has_been_updated=False)
        self._zero._post_step(())


def _nothing() -> None:
    """Do nothing."""


class _Tensors(nn.Module):
    """Tensors of other objects as the parameters of a module: they are saved as they are then."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self._parameters[name.replace(".", "/")] = tensor  # type: ignore[assignment]


class _Buffers:
    """Buffers of a module that belong to its ``state_dict()``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name."""
        return {
            f"{prefix}{'.' if prefix else ''}{name}": buffer
            for prefix, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the buffers."""
        for name, buffer in self.state_dict().items():
            buffer.copy_(state[name])


class _Engine:
    """Counters and loss scale of an engine."""

    def __init__(self, engine: Any, weights: _Weights) -> None:
        self._engine = engine
        self._weights = weights

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        scaler = vars(getattr(self._engine.optimizer, "loss_scaler", self))
        return {
            "counters": {name: getattr(self._engine, name) for name in _COUNTERS},
            "scale": {name: scaler[name] for name in _SCALES if name in scaler},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it in the engine, and note that the weights were restored."""
        vars(self._engine).update(state["counters"])
        if state["scale"]:
            vars(self._engine.optimizer.loss_scaler).update(state["scale"])
        self._weights.restored = True
