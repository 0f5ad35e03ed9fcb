"""Lightning Fabric: the objects that it has set up become the state of a run.

::

    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    run = resumable(fabric, "runs/a", {"model": model, "optimizer": optimizer}, loader)
    for epoch in run.epochs(3):
        for batch in loader:
            ...

A step ends where the loop asks its loader for the next batch (:mod:`everstep.integrations.loops`).
So :func:`resumable` puts a resumable loader in the place of each ``DataLoader`` that Fabric has
wrapped.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricDataLoader
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError
from everstep.integrations.loops import IteratedLoader, Run
from everstep.integrations.parts import with_added
from everstep.state.providers import unwrap_optimizer

_STRATEGIES = (DDPStrategy, SingleDeviceStrategy)


def resumable(
    fabric: Fabric,
    path: str | Path,
    state: MutableMapping[str, Any],
    *loaders: Any,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Save each step of a loop over objects that Fabric has set up in a run folder, and resume from
    there.

    In the state are, besides ``state``, the gradient scaler, random generators, and position and
    order of the data. Call it on each rank, after ``setup()`` and ``setup_dataloaders()`` and
    before the loop. ``run.epochs(n)`` closes the run after the last epoch; a loop over
    ``range(run.epoch, n)`` calls ``run.close()``.

    Args:
        fabric: the Fabric.
        path: run folder.
        state: objects to save, by name: modules and optimizers that Fabric has set up, schedulers,
            other objects with a ``state_dict()``, plain data.
        loaders: loaders that Fabric has set up: those whose batches are trained on, and others
            whose position is to be saved.
        seed: seed of the order of the data.
        options: further arguments of :class:`~everstep.Checkpointer`.

    Raises:
        OptionError: this Fabric or one of its loaders is not supported.
    """
    strategy = type(fabric.strategy)
    if strategy not in _STRATEGIES:
        raise OptionError(
            f"a Fabric with the strategy {strategy.__name__} cannot be made resumable",
            hint='supported are one device and strategy="ddp"',
        )
    optimizers = [unwrap_optimizer(one) for one in state.values() if isinstance(one, Optimizer)]
    if not optimizers or not loaders:
        raise OptionError(
            "there is no optimizer in the state, or no loader is given",
            hint='resumable(fabric, path, {"model": model, "optimizer": optimizer}, loader)',
        )
    followed = [_Loader(loader, seed) for loader in loaders]
    names = ["data"] if len(followed) == 1 else [f"data.{n}" for n in range(len(followed))]
    own: dict[str, Any] = dict(zip(names, followed, strict=True))
    if (scaler := getattr(fabric.strategy.precision, "scaler", None)) is not None:
        own["scaler"] = scaler
    parts = with_added(own, state, "Fabric")
    return Run(Checkpointer(path, parts, **options), optimizers, followed)


class _Loader(IteratedLoader):
    """Resumable loader in the place of the ``DataLoader`` inside of one that Fabric has set up."""

    def __init__(self, prepared: Any, seed: int) -> None:
        if type(prepared) is not _FabricDataLoader:
            raise OptionError(
                f"a {type(prepared).__name__} cannot be made resumable",
                hint="give what fabric.setup_dataloaders() returns",
            )
        base = prepared._dataloader
        if hasattr(base, "state_dict") or not isinstance(base, DataLoader):
            raise OptionError(
                f"a {type(base).__name__} that Fabric has set up cannot be made resumable",
                hint="set up a plain DataLoader",
            )
        super().__init__(ResumableLoader(base, seed=seed))
        prepared._dataloader = self
