"""Accelerate: the prepared objects of a training loop become the state of a run.

::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = resumable(accelerator, "runs/a")
    for epoch in range(run.epoch, epochs):
        for batch in loader:
            ...

A step ends where the loop asks its loader for the next batch: all that its body does after
``optimizer.step()`` belongs to it. So :func:`resumable` puts a resumable loader into each prepared
loader, and follows it. The last step of an epoch ends when the loader does; code after the inner
loop is run again by a resume in between.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError
from everstep.restore.start import Recovery
from everstep.state.values.generators import RngStates

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
_USED = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler")
"""Attributes of an Accelerator that this module uses; some are private to accelerate."""


def resumable(
    accelerator: Accelerator,
    path: str | Path,
    *,
    state: Mapping[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Save each step of a loop over prepared objects in a run folder, and resume from there.

    In the state are all objects that ``accelerator.prepare()`` and ``register_for_checkpointing()``
    were given (models, optimizers, schedulers), the gradient scaler, random generators, and
    position and order of the data. Call it after ``prepare()`` and before the loop, on each rank.

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
    parts = _parts(accelerator, loaders)
    if taken := sorted(set(state or ()) & parts.keys()):
        raise OptionError(f"the part {taken[0]!r} of the state is that of the Accelerator")
    return Run(accelerator, loaders, Checkpointer(path, parts | dict(state or {}), **options))


def _refuse(accelerator: Accelerator) -> None:
    if missing := [name for name in _USED if not hasattr(accelerator, name)]:
        raise OptionError(
            f"accelerate {accelerate.__version__} is not supported: an Accelerator has no "
            f"{missing[0]}",
            hint="install a newer accelerate (tested: 1.15)",
        )
    if accelerator.distributed_type not in _SUPPORTED:
        raise OptionError(
            f"an Accelerator of the type {accelerator.distributed_type} cannot be made resumable"
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


class Run:
    """Run of a training loop.

    Attributes:
        recovery: result of the resume.
        checkpointer: the Checkpointer.
    """

    def __init__(
        self, accelerator: Accelerator, loaders: list[_Loader], checkpointer: Checkpointer
    ) -> None:
        self.checkpointer = checkpointer
        self._accelerator = accelerator
        self._loaders = loaders
        self._active: _Loader | None = None
        self._due: _Loader | None = None
        try:
            self.recovery: Recovery = checkpointer.resume()
        except BaseException:
            checkpointer.close()
            raise
        self._steps = self.recovery.step
        self._generators: RngStates | None = RngStates.now()
        self._hooks = [
            one.optimizer.register_step_post_hook(self._updated) for one in accelerator._optimizers
        ]
        for loader in loaders:
            loader.follow(self)
        end_training = accelerator.end_training

        @functools.wraps(end_training)
        def end() -> None:
            self.close()
            end_training()

        accelerator.end_training = end

    @property
    def epoch(self) -> int:
        """Epoch in which the loop continues; from 0."""
        return next((one for one in self._loaders if one.trains), self._loaders[0]).epoch

    def begins(self) -> None:
        """Put the random generators back before the first batch: other code may have drawn."""
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None

    def gives(self, loader: _Loader) -> None:
        """Note that a loader gives a batch to the loop."""
        self._active = loader

    def is_due(self, loader: _Loader) -> bool:
        """Return True if a step whose batch came from this loader is not marked yet."""
        return self._due is loader

    def is_over(self, loader: _Loader) -> None:
        """Mark the step whose batch came from this loader, if there was an update."""
        if self.is_due(loader):
            self._due = None
            for one in self._loaders:
                one.trains = one is loader
            self._steps += 1
            self.checkpointer.step()

    def close(self) -> None:
        """Save the end of the training, and close the run. ``end_training()`` calls it."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            if self._due is not None:
                self._due.leave_epoch(self)
            if self._steps:
                self.checkpointer.save()
            self.checkpointer.close()

    def _updated(self, *_: Any) -> None:
        self._due = self._active


class _Source(ResumableLoader):
    """Resumable loader in the place of the ``DataLoader`` inside a prepared one, with its
    attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not made yet
            raise AttributeError(name)
        return getattr(self.source, name)


class _Loader:
    """A prepared loader, and its position in the state.

    Attributes:
        trains: the last step's batch came from this loader; others may be for evaluations.
        everstep_restores_data: True; marks an object that restores the order of data.
    """

    everstep_restores_data = True

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
        self.trains = False
        self._source = _Source(base, seed=seed)
        self._prepared = prepared
        prepared.base_dataloader = self._source
        prepared.dl_state_dict = self._source.state_dict()

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return int(self.state_dict()["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that the loop has; one more is fetched already."""
        at = self._prepared.dl_state_dict
        position = {key: value for key, value in at.items() if key != "_iterator_finished"}
        return position | {"trains": self.trains}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position: the next loop continues there."""
        self._source.load_state_dict(state)
        self.trains = state["trains"]
        self._prepared.dl_state_dict = dict(state)
        self._prepared.iteration = state["epoch"]

    def refusal(self, state: Any) -> str | None:
        """Return the reason why this loader cannot continue from a position; None: it can."""
        return self._source.refusal(state)

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
