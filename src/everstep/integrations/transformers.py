"""Hugging Face's Trainer: one line makes a training recoverable, step by step.

::

    trainer = resumable(Trainer(model=model, args=args, train_dataset=data), "runs/a")
    trainer.train()

A Trainer creates the optimizer, wraps the model and counts its epochs inside ``train()``, and tells
its callbacks of none of them early enough, so this is a subclass and not a callback. Of each run,
:class:`_Resumable` does in the Trainer's own order:

1. ``_init_training_state``: let the Trainer prepare model, optimizer and scheduler, create the
   Checkpointer, resume, and give the Trainer the restored step in the form that it reads from one
   of its own checkpoints;
2. ``get_batch_samples``: mark the step before, whose logs and evaluations are made by now, and
   only then take the next batches;
3. ``_run_epoch``: mark the last step of an epoch after its evaluation;
4. ``_finalize_training``: save the end of the training, and close the Checkpointer, before the best
   model is loaded.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.errors import OptionError, RecoveryError, StateError
from everstep.integrations.parts import with_added
from everstep.restore.start import Recovery
from everstep.state.values.generators import RngStates

try:
    import transformers
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.utils import DistributedType, send_to_device
    from transformers import Trainer, TrainerState
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        f"everstep.integrations.transformers cannot be used: {error}; "
        "pip install 'everstep[transformers]'"
    ) from error

_TrainerT = TypeVar("_TrainerT", bound=Trainer)

_OVERRIDDEN = (
    "_finalize_training",
    "_init_training_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_prepare_for_training",
    "_run_epoch",
    "get_batch_samples",
    "get_train_dataloader",
)
"""Methods of the Trainer that this module overrides; most are private to transformers."""

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_STATE_FILE = "trainer_state.json"
_COUNTERS = (
    "best_global_step",
    "best_metric",
    "best_model_checkpoint",
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
)
"""Fields of ``TrainerState`` that training changes; the others follow from the arguments."""

_OPTIONS = (
    "collate_fn",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
"""Options of a ``DataLoader`` that are taken over as they are."""


def resumable(
    trainer: _TrainerT,
    path: str | Path,
    *,
    state: MutableMapping[str, Any] | None = None,
    on_resume: Callable[[Recovery], None] | None = None,
    **options: Any,
) -> _TrainerT:
    """Make the ``train()`` of a Trainer save each step in a run folder, and resume from there.

    In the state are model, optimizer, scheduler, gradient scaler, random generators, the position
    and order of the data, and the Trainer's counters, logs, best metric and stateful callbacks.
    Batches are made by a :class:`~everstep.data.ResumableLoader` over the Trainer's dataset and
    sampler, seeded by ``args.data_seed`` or ``args.seed``, so a resume replays no batches of a
    map-style dataset and draws no random numbers. Several processes train with DDP.

    The Trainer's own checkpoints (``save_strategy``) are written as before and are not needed.

    Args:
        trainer: any ``Trainer``, also of a subclass; returned.
        path: run folder.
        state: further parts of the state, by name.
        on_resume: called with the result of ``resume()``.
        options: further arguments of :class:`~everstep.Checkpointer`.

    Raises:
        OptionError: this version of transformers, or an argument of the Trainer, is not supported.
    """
    _refuse(trainer, state or {})
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Resumable, kind), {"__module__": kind.__module__})
    trainer._everstep = _Run(trainer, path, state, on_resume, options)
    return trainer


def _refuse(trainer: Trainer, state: Mapping[str, Any]) -> None:
    version = transformers.__version__
    if missing := [name for name in _OVERRIDDEN if not hasattr(trainer, name)]:
        raise OptionError(
            f"transformers {version} is not supported: its Trainer has no {missing[0]}()",
            hint="install a newer transformers (tested: 5.24)",
        )
    if isinstance(trainer, _Resumable):
        raise OptionError("this Trainer is resumable already")
    if taken := sorted(
        set(state) & {"model", "optimizer", "scheduler", "scaler", "data", "trainer"}
    ):
        raise OptionError(f"the part {taken[0]!r} of the state is the Trainer's own")
    args = trainer.args
    unsupported = {
        "auto_find_batch_size": args.auto_find_batch_size,
        "ignore_data_skip": args.ignore_data_skip,
        "several devices in one process (DataParallel)": args.n_gpu > 1,
        "a model that transformers distributes itself": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "a parallelism_config": getattr(trainer.accelerator, "parallelism_config", None)
        is not None,
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise OptionError(f"a Trainer with {found[0]} cannot be made resumable")
    if (kind := trainer.accelerator.distributed_type) not in _SUPPORTED:
        raise OptionError(
            f"a Trainer of the type {kind} cannot be made resumable",
            hint="supported are one process, and DDP: torchrun without fsdp and deepspeed",
        )


class _Resumable(Trainer):
    """Methods of a resumable Trainer, put in front of those of its class."""

    _everstep: _Run

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **others: Any) -> Any:
        if resume_from_checkpoint:
            raise OptionError(
                "resume_from_checkpoint is given, but a resumable Trainer resumes by itself",
                hint="leave it out",
            )
        if trial is not None:
            raise OptionError("a search for hyperparameters cannot be resumed")
        with self._everstep.training() as checkpoint:
            return super().train(checkpoint, **others)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self._everstep.data(super().get_train_dataloader())

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        data = dataloader.dataset
        source: Any = data.loader.source if isinstance(data, _Batches) else dataloader
        return int(super().num_examples(source))

    def _init_training_state(self, max_steps: int, *args: Any, **others: Any) -> tuple[int, int]:
        self._everstep.resume(super()._prepare_for_training, max_steps)
        return self._everstep.enter(*super()._init_training_state(max_steps, *args, **others))

    def _prepare_for_training(self, *args: Any, **others: Any) -> tuple[Any, Any]:
        return self._everstep.prepared

    def get_batch_samples(self, *args: Any, **others: Any) -> Any:
        self._everstep.mark()
        return super().get_batch_samples(*args, **others)

    def _run_epoch(self, *args: Any, **others: Any) -> None:
        if not self._everstep.is_over:
            super()._run_epoch(*args, **others)
            self._everstep.mark()

    def _finalize_training(self, *args: Any, **others: Any) -> Any:
        self._everstep.finish()
        return super()._finalize_training(*args, **others)

    # resume() restores everything that the Trainer would load from one of its own checkpoints.

    def _load_from_checkpoint(self, *args: Any, **others: Any) -> None:
        """Do nothing: it is restored."""

    def _load_optimizer_and_scheduler(self, *args: Any, **others: Any) -> None:
        """Do nothing: it is restored."""

    def _load_rng_state(self, *args: Any, **others: Any) -> None:
        """Do nothing: it is restored."""

    def _load_scaler(self, *args: Any, **others: Any) -> None:
        """Do nothing: it is restored."""


class _Run:
    """The run of a resumable Trainer.

    Attributes:
        prepared: model and loader as the Trainer prepared them.
    """

    def __init__(
        self,
        trainer: Any,
        path: str | Path,
        state: MutableMapping[str, Any] | None,
        on_resume: Callable[[Recovery], None] | None,
        options: dict[str, Any],
    ) -> None:
        self.prepared: tuple[Any, Any] = (None, None)
        self._trainer = trainer
        self._path = path
        self._state = state
        self._on_resume = on_resume
        self._options = options
        self._progress = _Progress(trainer)
        self._batches: _Batches | None = None
        self._loader: DataLoader[Any] | None = None
        self._checkpoint = Path()
        self._opened = ExitStack()
        self._ckpt: Checkpointer | None = None
        self._marked = 0
        self._generators: RngStates | None = None

    @contextmanager
    def training(self) -> Iterator[str]:
        """Hold the run open while the Trainer trains; yield the folder from which it takes its
        counters, as from one of its own checkpoints."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as self._opened:
            self._checkpoint = Path(folder, _STATE_FILE)
            TrainerState().save_to_json(str(self._checkpoint))  # train() looks at it first
            yield folder

    def data(self, prepared: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader with the dataset and sampler of a prepared one, whose position is part
        of the state."""
        args = self._trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        if args.world_size > 1 and isinstance(prepared, DataLoaderDispatcher):
            raise OptionError(
                "a Trainer whose first rank reads the data for all cannot be made resumable",
                hint='give it accelerator_config={"dispatch_batches": False}',
            )
        self._batches = _Batches(ResumableLoader(_plain(prepared), seed=seed), args.device)
        # A generator of its own: each iterator draws a base seed, by default from the generator of
        # the program.
        self._loader = DataLoader(
            self._batches,
            batch_sampler=self._batches,
            collate_fn=_as_it_is,
            generator=torch.Generator(),
        )
        return self._loader

    def resume(self, prepare: Callable[..., tuple[Any, Any]], max_steps: int) -> None:
        """Prepare the training, restore its newest state, and leave its counters where the
        Trainer takes them from."""
        trainer = self._trainer
        trainer.state = TrainerState(train_batch_size=trainer._train_batch_size, log_history=[])
        trainer.state.compute_steps(trainer.args, max_steps)
        self.prepared = prepare(max_steps, self._loader, None)
        self._progress.begin()
        assert self._batches is not None
        parts = {
            "model": trainer.model_wrapped,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "data": self._batches.loader,
            "trainer": self._progress,
        }
        if trainer.accelerator.scaler is not None:
            parts["scaler"] = trainer.accelerator.scaler
        state = with_added(parts, self._state, "the Trainer")
        self._ckpt = self._opened.enter_context(Checkpointer(self._path, state, **self._options))
        recovery = self._ckpt.resume()
        if recovery.step != trainer.state.global_step:
            raise RecoveryError(
                f"step {recovery.step} of the run is the Trainer's {trainer.state.global_step}",
                path=self._path,
                hint="give each Trainer a run folder of its own",
            )
        self._generators = RngStates.now()
        self._marked = recovery.step
        trainer.state.stateful_callbacks = self._progress.of_callbacks()
        trainer.state.save_to_json(str(self._checkpoint))
        if self._on_resume is not None:
            self._on_resume(recovery)

    def enter(self, epoch: int, taken: int) -> tuple[int, int]:
        """Return the epoch in which the Trainer continues, and the number of its batches to pass
        over, given those that it has computed from the number of steps."""
        assert self._batches is not None
        loader = self._batches.loader
        try:
            len(loader)
        except TypeError:  # to the Trainer a stream without a length is one epoch
            at = loader.state_dict()
            epoch = at["epoch"]
            taken = at["batch"]
        else:
            loader.set_epoch(epoch)
            if (batch := loader.state_dict()["batch"]) != taken:
                raise StateError(
                    f"the state was saved after batch {batch} of epoch {epoch}, and the Trainer "
                    f"would continue after batch {taken}",
                    hint="resume with the same gradient_accumulation_steps",
                )
        self._batches.passed_over = taken
        return epoch, taken

    def mark(self) -> None:
        """Mark the step that the Trainer has finished, unless it is marked already."""
        assert self._ckpt is not None
        if self._generators is not None:  # before the first step of this process
            self._progress.put_back_losses()
            # Evaluations and callbacks at the beginning of a training may have drawn.
            self._generators.put_back()
            self._generators = None
        step = self._trainer.state.global_step
        if step > self._marked:
            self._ckpt.step()
            self._marked = step

    def finish(self) -> None:
        """Save the end of the training, and close the run."""
        assert self._ckpt is not None
        if self._marked:
            self._ckpt.save()
        self._ckpt.close()

    @property
    def is_over(self) -> bool:
        """True if the Trainer has nothing left to do: without this it would take one more step."""
        state = self._trainer.state
        return self._progress.is_stopped or state.global_step >= state.max_steps


class _Progress:
    """The Trainer's counters and logs, losses not logged yet, and the state of its callbacks.

    Attributes:
        is_stopped: the restored training was stopped before its last step.
    """

    def __init__(self, trainer: Any) -> None:
        self.is_stopped = False
        self._trainer = trainer
        self._restored: Mapping[str, Any] | None = None
        self._logs = (0, "[]")

    def begin(self) -> None:
        """Create what the Trainer creates only after the resume."""
        self._trainer._tr_loss = torch.tensor(0.0, device=self._trainer.args.device)
        self._trainer._globalstep_last_logged = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, and the sum of the losses since the last log, of shape ()."""
        trainer = self._trainer
        history = trainer.state.log_history
        if len(history) != self._logs[0]:
            # Text, so that a long history is encoded only after it has grown.
            self._logs = len(history), json.dumps(history)
        return {
            "counters": {name: getattr(trainer.state, name) for name in _COUNTERS},
            "logs": self._logs[1],
            "flos": trainer.current_flos,
            "loss": trainer._tr_loss,
            "last_logged": trainer._globalstep_last_logged,
            "callbacks": [[type(one).__name__, one.state()] for one in self._callbacks()],
            "stopped": self._is_stopped_early(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all of it in the Trainer.

        Raises:
            StateError: the Trainer has other callbacks with a state.
        """
        trainer = self._trainer
        for name, value in state["counters"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = json.loads(state["logs"])
        trainer.current_flos = state["flos"]
        trainer._tr_loss.copy_(state["loss"])
        trainer._globalstep_last_logged = state["last_logged"]
        callbacks = self._callbacks()
        names = [type(one).__name__ for one in callbacks]
        if names != (saved := [name for name, _ in state["callbacks"]]):
            raise StateError(
                f"the state was saved with the callbacks {saved}, and the Trainer has {names}",
                hint="add the same callbacks in the same order",
            )
        for one, (_, values) in zip(callbacks, state["callbacks"], strict=True):
            vars(one).update(values["attributes"])
        self.is_stopped = state["stopped"]
        self._restored = dict(state, loss=trainer._tr_loss.clone())

    def put_back_losses(self) -> None:
        """Set the losses again, which the Trainer resets when its loop begins."""
        if self._restored is None:
            return
        trainer = self._trainer
        trainer._tr_loss.copy_(self._restored["loss"])
        trainer._globalstep_last_logged = self._restored["last_logged"]
        # The result of train() is the mean loss of the steps of this process alone.
        trainer._total_loss_scalar = -self._restored["loss"].item()
        self._restored = None

    def _is_stopped_early(self) -> bool:
        state = self._trainer.state
        return bool(
            self._trainer.control.should_training_stop and state.global_step < state.max_steps
        )

    def of_callbacks(self) -> dict[str, Any]:
        """Return the states of all callbacks in the form of ``TrainerState``."""
        stateful = [*self._callbacks(), self._trainer.control]
        states: dict[str, Any] = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        return states

    def _callbacks(self) -> list[Any]:
        found = self._trainer.callback_handler.callbacks
        return [one for one in found if isinstance(one, ExportableState)]


class _Batches(Dataset[Any]):
    """Batches of a loader, on the training's device: the batch sampler of a ``DataLoader``, whose
    "indices" are whole batches, and the dataset that gives what it is asked for.

    So the Trainer passes over the batches that a resumed epoch has had as ``skip_first_batches``
    does for each map-style dataset: over items of the batch sampler, which cost nothing here.

    Attributes:
        loader: loader that makes the batches.
        passed_over: number of empty items that the next iteration begins with.
    """

    def __init__(self, loader: ResumableLoader, device: torch.device) -> None:
        self.loader = loader
        self.passed_over = 0
        self._device = device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        passed_over = self.passed_over
        self.passed_over = 0
        return itertools.chain(itertools.repeat(None, passed_over), self.loader)

    def __getitems__(self, batch: Any) -> Any:
        return send_to_device(batch, self._device)


def _plain(prepared: DataLoader[Any]) -> DataLoader[Any]:
    """Return a plain loader with the dataset and options of one that Accelerate has prepared."""
    options = {name: getattr(prepared, name) for name in _OPTIONS}
    dataset = prepared.dataset
    if isinstance(dataset, IterableDataset):
        return DataLoader(
            dataset, batch_size=prepared.batch_size, drop_last=prepared.drop_last, **options
        )
    return DataLoader(dataset, batch_sampler=prepared.batch_sampler, **options)


def _as_it_is(batch: Any) -> Any:
    return batch
