"""Callback of Lightning's Trainer that makes a training recoverable, step by step.

::

    trainer = Trainer(callbacks=[EverstepCallback("runs/a")])
    trainer.fit(module, loader)

Of each ``fit()``, :class:`EverstepCallback` does in the Trainer's own order:

1. ``on_fit_start``: put a resumable loader in the place of each training loader, create the
   Checkpointer, and resume;
2. before the first batch: put the random generators back, which sanity checks may have used;
3. after each batch, its logs and its validation: mark the step; after the last batch of an epoch
   only when the hooks of the epoch have run;
4. ``on_train_end``: save the end of the training, and close the Checkpointer.

For the marks of 3 no hook comes late enough, so two methods of the Trainer's loops are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError
from everstep.integrations.parts import with_added
from everstep.restore.start import Recovery
from everstep.state.values.generators import RngStates

_FOLLOWED = {
    "fit_loop": ("_data_source", "epoch_progress", "on_advance_end"),
    "epoch_loop": ("_is_training_done", "advance", "on_advance_end"),
}
"""Attributes of the Trainer's loops that this module uses; some are private to Lightning."""

_STRATEGIES = (DDPStrategy, SingleDeviceStrategy)
_OWN = ("data", "loops", "model", "optimizer", "scaler", "scheduler")
_SMALL = 64


class EverstepCallback(Callback):
    """Save each step of a ``fit()`` in a run folder, and resume from there.

    In the state are the module, optimizers, schedulers, gradient scaler, random generators, the
    position and order of the data, and the Trainer's loops, callbacks and datamodule. Training
    loaders are replaced by a :class:`~everstep.data.ResumableLoader` over their datasets and
    samplers, unless they have a ``state_dict()`` of their own, so a resume replays no batches.
    Several processes train with DDP.

    The Trainer's own checkpoints are written as before and are not needed.

    Args:
        path: run folder.
        state: further parts of the state, by name.
        seed: seed of the order of the data.
        on_resume: called with the result of ``resume()``.
        options: further arguments of :class:`~everstep.Checkpointer`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        state: MutableMapping[str, Any] | None = None,
        seed: int = 0,
        on_resume: Callable[[Recovery], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if taken := sorted(set(state or ()) & set(_OWN)):
            raise OptionError(f"the part {taken[0]!r} of the state is the Trainer's own")
        self._path = path
        self._state = state
        self._seed = seed
        self._on_resume = on_resume
        self._options = options
        self._run: _Run | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume.

        Raises:
            OptionError: this Trainer is not supported.
        """
        _refuse(trainer)
        loaders = _resumable_loaders(trainer, self._seed)
        parts = with_added(_parts(trainer, loaders), self._state, "the Trainer")
        ckpt = Checkpointer(self._path, parts, **self._options)
        try:
            recovery = ckpt.resume()
            self._run = _Run(trainer, ckpt, loaders)
        except BaseException as error:
            ckpt.__exit__(type(error), error, error.__traceback__)
            raise
        if self._on_resume is not None:
            self._on_resume(recovery)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of the training, and close the run."""
        if self._run is not None:
            self._run.finish()

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,
    ) -> None:
        """Close the run, without a last base: other ranks may have died."""
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the run."""
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        if self._run is not None:
            self._run.close(error)
            self._run = None


def _refuse(trainer: Trainer) -> None:
    loops = {"fit_loop": trainer.fit_loop, "epoch_loop": trainer.fit_loop.epoch_loop}
    for loop, names in _FOLLOWED.items():
        if missing := [name for name in names if not hasattr(loops[loop], name)]:
            raise OptionError(
                f"lightning {lightning.__version__} is not supported: its {loop} has no "
                f"{missing[0]}",
                hint="install a newer lightning (tested: 2.6)",
            )
    strategy = type(trainer.strategy)
    if strategy not in _STRATEGIES:
        raise OptionError(
            f"a Trainer with the strategy {strategy.__name__} cannot be made resumable",
            hint='supported are one device and strategy="ddp"',
        )
    unsupported = {
        "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
        "overfit_batches": bool(trainer.overfit_batches),
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise OptionError(f"a Trainer with {found[0]} cannot be made resumable")
    if len([one for one in trainer.callbacks if isinstance(one, EverstepCallback)]) > 1:
        raise OptionError("the Trainer has two callbacks of the class EverstepCallback")
    if trainer.ckpt_path:
        raise OptionError(
            "ckpt_path is given, but EverstepCallback resumes by itself", hint="leave it out"
        )


def _resumable_loaders(trainer: Trainer, seed: int) -> list[Any]:
    """Put resumable loaders in the place of the Trainer's training loaders; return them."""
    source = trainer.fit_loop._data_source
    given = source.dataloader()
    # Without the Trainer's own sampler each rank reads all that the loader's sampler gives.
    divides = trainer._accelerator_connector.use_distributed_sampler
    combined = (
        given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    )
    combined.flattened = [_resumable(one, seed, divides=divides) for one in combined.flattened]
    trainer.fit_loop._data_source = _DataLoaderSource(combined, "train_dataloader")
    return list(combined.flattened)


def _resumable(loader: Any, seed: int, *, divides: bool) -> Any:
    if not hasattr(loader, "state_dict"):
        if not isinstance(loader, DataLoader):
            raise OptionError(
                f"the position of a {type(loader).__name__} cannot be restored",
                hint="use a DataLoader, or a loader with state_dict() and load_state_dict()",
            )
        rank, world = (None, None) if divides else (0, 1)
        loader = ResumableLoader(loader, seed=seed, rank=rank, world=world)
    try:
        len(loader)
    except TypeError as error:
        # The Trainer takes one batch ahead, so the position is not that of the training.
        raise OptionError(
            f"the training loader has no length: {error}",
            hint="give its dataset a __len__()",
        ) from error
    return loader


def _parts(trainer: Trainer, loaders: list[Any]) -> dict[str, Any]:
    schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
    # With DDP around it: then its ranks share the work of saving it.
    parts = {"model": trainer.strategy.model, "loops": _Loops(trainer)}
    for name, several in (
        ("optimizer", trainer.optimizers),
        ("scheduler", schedulers),
        ("data", loaders),
    ):
        for number, one in enumerate(several):
            parts[f"{name}.{number}" if len(several) > 1 else name] = one
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        parts["scaler"] = scaler
    return parts


class _Run:
    """The run of one ``fit()``."""

    def __init__(self, trainer: Any, ckpt: Checkpointer, loaders: list[Any]) -> None:
        self._trainer = trainer
        self._ckpt = ckpt
        self._loaders = loaders
        self._marked = trainer.global_step
        self._generators: RngStates | None = RngStates.now()
        self._is_open = True
        self._follow(trainer.fit_loop)

    def _follow(self, fit_loop: Any) -> None:
        """Follow the loops: their hooks come too early, before the counters and the validation."""
        epoch_loop = fit_loop.epoch_loop
        advance = epoch_loop.advance
        after_batch = epoch_loop.on_advance_end
        after_epoch = fit_loop.on_advance_end

        def beginning(fetcher: Any) -> None:
            if self._generators is not None:
                # Sanity checks and callbacks at the beginning of a training may have drawn.
                self._generators.put_back()
                self._generators = None
            advance(fetcher)

        def batch_is_over(fetcher: Any) -> None:
            after_batch(fetcher)
            # Hooks at the end of the epoch belong to its last step.
            if not epoch_loop._is_training_done:
                self._mark()

        def epoch_is_over() -> None:
            after_epoch()
            for loader in self._loaders:
                if isinstance(loader, ResumableLoader):
                    # Also after an epoch that was cut short (limit_train_batches).
                    loader.set_epoch(fit_loop.epoch_progress.current.completed)
            self._mark()

        epoch_loop.advance = beginning
        epoch_loop.on_advance_end = batch_is_over
        fit_loop.on_advance_end = epoch_is_over

    def _mark(self) -> None:
        """Mark the step that the Trainer has finished, unless it is marked already."""
        if self._is_open and self._trainer.global_step > self._marked:
            self._ckpt.step()
            self._marked = self._trainer.global_step

    def finish(self) -> None:
        """Save the end of the training, and close the run."""
        if self._is_open and self._marked:
            self._ckpt.save()
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Close the run, and leave the loops as they were.

        Args:
            error: error that ends the training.
        """
        if not self._is_open:
            return
        self._is_open = False
        fit_loop = self._trainer.fit_loop
        del fit_loop.epoch_loop.advance, fit_loop.epoch_loop.on_advance_end
        del fit_loop.on_advance_end
        self._ckpt.__exit__(None if error is None else type(error), error, None)


class _Loops:
    """Counters of the Trainer's loops, and the state of its callbacks and datamodule."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, and large tensors of callbacks."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # loaders are parts of their own
        datamodule = trainer.datamodule
        state = {
            "loops": loops,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
            "should_stop": trainer.should_stop,
        }
        # As numbers: how many there are may change, as the models that a ModelCheckpoint keeps.
        numbers: dict[str, Any] = tree_map_only(torch.Tensor, _as_numbers, state)
        return numbers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it in the Trainer."""
        trainer = self._trainer
        state = _as_tensors(state)
        trainer.fit_loop.load_state_dict(state["loops"])
        epoch = trainer.fit_loop.epoch_progress.current
        if epoch.completed == epoch.ready:
            # Between two epochs. With max_steps the loop would take the finished one up again, and
            # count it twice.
            _Loop.restarting.fset(trainer.fit_loop, False)
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        trainer.should_stop = state["should_stop"]


def _as_numbers(tensor: torch.Tensor) -> Any:
    if tensor.numel() > _SMALL:
        return tensor
    return {"everstep.tensor": tensor.tolist(), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "everstep.tensor" in value:
            return torch.tensor(value["everstep.tensor"], dtype=getattr(torch, value["dtype"]))
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_tensors(item) for item in value]
    return value
