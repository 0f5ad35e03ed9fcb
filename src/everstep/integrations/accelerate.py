"""Accelerate: the prepared objects of a training loop become the state of a run.

::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = resumable(accelerator, "runs/a")
    for epoch in range(run.epoch, epochs):
        for batch in loader:
            ...

A step ends where the loop asks its loader for the next batch (:mod:`everstep.integrations.loops`).
So :func:`resumable` puts a resumable loader into each prepared loader, and follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError
from everstep.integrations.loops import FollowedLoader, Run
from everstep.integrations.parts import with_added

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        f"everstep.integrations.accelerate cannot be used: {error}; "
        "pip install 'everstep[accelerate]'"
    ) from error

_SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)
_UNTESTED = ("tp", "cp", "sp")
"""Kinds of parallelism of a ``parallelism_config`` that were not tested."""

_USED = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler")
"""Attributes of an Accelerator that this module uses; some are private to accelerate."""


def resumable(
    accelerator: Accelerator,
    path: str | Path,
    *,
    state: MutableMapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Save each step of a loop over prepared objects in a run folder, and resume from there.

    In the state are all objects that ``accelerator.prepare()`` and ``register_for_checkpointing()``
    were given (models, optimizers, schedulers), the gradient scaler, random generators, and
    position and order of the data. Call it after ``prepare()`` and before the loop, on each rank.
    ``accelerator.end_training()`` closes the run.

    Args:
        accelerator: the Accelerator.
        path: run folder.
        state: further parts of the state, by name.
        seed: seed of the order of the data.
        options: further arguments of :class:`~everstep.Checkpointer`.

    Raises:
        OptionError: this Accelerator or one of its loaders is not supported.
    """
    _refuse(accelerator)
    loaders = [_Loader(loader, seed) for loader in accelerator._dataloaders]
    parts = with_added(_parts(accelerator, loaders), state, "the Accelerator")
    optimizers = [one.optimizer for one in accelerator._optimizers]
    run = Run(Checkpointer(path, parts, **options), optimizers, loaders)
    end_training = accelerator.end_training

    @functools.wraps(end_training)
    def end() -> None:
        run.close()
        end_training()

    accelerator.end_training = end
    return run


def _refuse(accelerator: Accelerator) -> None:
    if missing := [name for name in _USED if not hasattr(accelerator, name)]:
        raise OptionError(
            f"accelerate {accelerate.__version__} is not supported: an Accelerator has no "
            f"{missing[0]}",
            hint="install a newer accelerate (tested: 1.15)",
        )
    if (kind := accelerator.distributed_type) not in _SUPPORTED:
        raise OptionError(f"an Accelerator of the type {kind.value} cannot be made resumable")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise OptionError(
            "an Accelerator with FSDP 1 cannot be made resumable",
            hint="FullyShardedDataParallelPlugin(fsdp_version=2)",
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    if divides := [one for one in _UNTESTED if getattr(parallel, f"{one}_enabled", False)]:
        raise OptionError(
            f"an Accelerator whose parallelism_config enables {divides[0]} cannot be made resumable"
        )
    if not accelerator._optimizers or not accelerator._dataloaders:
        raise OptionError(
            "the Accelerator has prepared no optimizer or no loader",
            hint="call resumable() after accelerator.prepare(model, optimizer, loader)",
        )


def _parts(accelerator: Accelerator, loaders: list[_Loader]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    several = {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "data": loaders,
        "registered": accelerator._custom_objects,
    }
    for name, objects in several.items():
        for number, one in enumerate(objects):
            parts[f"{name}.{number}" if len(objects) > 1 else name] = one
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    return parts


class _Source(ResumableLoader):
    """Resumable loader in the place of the ``DataLoader`` inside a prepared one, with its
    attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not made yet
            raise AttributeError(name)
        return getattr(self.source, name)


class _Loader(FollowedLoader):
    """A prepared loader, and its position in the state."""

    def __init__(self, prepared: Any, seed: int) -> None:
        if type(prepared) is not DataLoaderShard:
            raise OptionError(
                f"a loader prepared as {type(prepared).__name__} cannot be made resumable",
                hint="prepare it with DataLoaderConfiguration(dispatch_batches=False)",
            )
        base = prepared.base_dataloader
        if hasattr(base, "state_dict") or not isinstance(base, DataLoader):
            raise OptionError(
                f"a prepared {type(base).__name__} cannot be made resumable",
                hint="prepare a DataLoader, with use_stateful_dataloader=False",
            )
        super().__init__(_Source(base, seed=seed))
        self._prepared = prepared
        prepared.base_dataloader = self._source
        prepared.dl_state_dict = self._source.state_dict()

    def position(self) -> dict[str, Any]:
        """Return the position after the batch that the loop has; one more is fetched already."""
        at = self._prepared.dl_state_dict
        return {key: value for key, value in at.items() if key != "_iterator_finished"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position: the next loop continues there."""
        super().load_state_dict(state)
        self._prepared.dl_state_dict = dict(state)
        self._prepared.iteration = state["epoch"]

    def follow(self, run: Run) -> None:
        """Tell a run where steps end."""
        prepared = self._prepared
        update = prepared._update_state_dict
        begin = prepared.begin
        end = prepared.end

        def beginning() -> None:
            if run.is_due(self):
                self.leave_epoch(run)
            run.begins()
            begin()

        def another() -> None:
            # The loop asks for the next batch. The position is still that of the last one.
            run.is_over(self)
            # After its last batch the source is in the next epoch, and the loop still in this one.
            if not prepared.end_of_dataloader:
                update()
            run.gives(self)

        def ending() -> None:
            # Marked within this epoch, so that a resume runs the code after the inner loop.
            run.is_over(self)
            prepared.dl_state_dict = self._source.state_dict()
            end()

        prepared.begin = beginning
        prepared._update_state_dict = another
        prepared.end = ending

    def leave_epoch(self, run: Run) -> None:
        """Mark the step of the last batch, after which the loop has left the epoch by itself."""
        self._source.set_epoch(self.epoch + 1)
        self._prepared.dl_state_dict = self._source.state_dict()
        run.is_over(self)
