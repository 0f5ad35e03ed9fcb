"""Tiny trainings for crash enumeration: every bit of them is known beforehand."""

from __future__ import annotations

import contextlib
import random
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import nn

from everstep.checkpointer import Checkpointer
from everstep.errors import EverstepError
from everstep.format.names import SLOTS_DIR, TEMPORARY_SUFFIX
from everstep.seams import FileSystem, ManualClock, Seams
from tests.crash.sim.crashes import Scenario
from tests.crash.sim.faults import Fault, Operation, SimulatedCrash
from tests.crash.sim.filesystem import SimFileSystem
from tests.crash.sim.invariants import assert_nothing_vouches_for_torn_bytes

__all__ = ["TinyTraining", "TrainingScenario", "freeze", "known_names"]

_TIMEOUT_S = 30.0
_ERRORS_MAX = 4  # that one failing operation may lead to


def freeze(value: Any) -> Any:
    """Plain, comparable data that is equal only where ``value`` is, bit for bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [freeze(item) for item in value])
    return (type(value).__name__, value)


class TinyTraining:
    """A model of two layers, AdamW and some plain data.

    Every step depends on all of it and on the RNGs of torch, NumPy and Python: a part that
    came back wrong shows, if not at once, then a step later.

    Args:
        frozen: the first layer is not trained.
    """

    def __init__(self, seed: int, *, frozen: bool = False) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.model[0].requires_grad_(not frozen)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01 + seed / 1000)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": {"steps": 0, "loss": "", "shape": (3, 5), 7: f"seed {seed}"},
        }

    def train_step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        noise = float(np.random.rand()) + random.random()
        loss = (self.model(torch.randn(4, 3)) * noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.state["data"]["steps"] += 1
        # Of the same length every time, so that a recycled file can fit exactly.
        self.state["data"]["loss"] = struct.pack("<d", loss.item()).hex()

    def snapshot(self) -> Any:
        """Everything that a checkpoint must bring back, as comparable data."""
        return freeze(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "data": self.state["data"],
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "python": repr(random.getstate()),
            }
        )


class TrainingScenario(Scenario):
    """A training that is resumed and saves; resuming must give the last base or the new one.

    Args:
        done: bases taken durably before the act, one per step.
        saves: steps and bases that the act adds after resuming; 0: it only resumes.
        method, keep: of the :class:`Checkpointer`.
        static: the first layer is frozen, and said to be.
        wrap: puts something between the simulated file system and the act, e.g. a planted bug.
        crash_first: before the act, one more such process is ended by this crash; its ``at``
            counts that process's own operations.
        thorough: the check also resumes twice in a row.
    """

    run = PurePath("/disk/run")

    def __init__(
        self,
        *,
        done: int,
        saves: int = 1,
        method: Literal["sync", "async"] = "sync",
        keep: int = 3,
        static: bool = False,
        wrap: Callable[[SimFileSystem], FileSystem] | None = None,
        crash_first: Fault | None = None,
        thorough: bool = False,
    ) -> None:
        self._bases = done
        self._saves = saves
        self._crash_first = crash_first
        self._thorough = thorough
        self._done = self._floor = done
        self._method = method
        self._keep = keep
        self._wrap: Callable[[SimFileSystem], FileSystem] = wrap or (lambda fs: fs)
        self._begun = done
        self._names = random.Random()
        self._last: Checkpointer | None = None
        self._live: tuple[TinyTraining, Checkpointer] | None = None
        self._static = static
        training = TinyTraining(1, frozen=static)
        self._expected = [training.snapshot()]
        for _ in range(done + 2 * saves + 1):
            training.train_step()
            self._expected.append(training.snapshot())

    def prepare(self, fs: SimFileSystem) -> None:
        self._done = self._floor = self._bases
        fs.make_dir(self.run.parent)
        fs.sync_dir(self.run.parent.parent)
        if self._done:
            training, checkpointer = self.start(fs, seed=1)
            self._resume(training, checkpointer, {0: self._expected[0]})
            for _ in range(self._done):
                self._train_and_save(training, checkpointer)
            checkpointer.close()
        if self._crash_first is not None:
            fs.inject(replace(self._crash_first, at=len(fs.log) + self._crash_first.at))
            with contextlib.suppress(SimulatedCrash):
                self._act(fs, "first")
            assert fs.crashed, "the operation to crash at was not reached"
            self._floor, _ = self.promised()
            probe, checkpointer = self.start(fs.survive_all(), seed=2)
            allowed = dict(enumerate(self._expected[: self._begun + 1]))
            self._done = self._resume(probe, checkpointer, allowed)
            checkpointer.close()

    def act(self, fs: SimFileSystem) -> None:
        self._act(fs, "act")

    def _act(self, fs: SimFileSystem, process: str) -> None:
        self._begun = self._done
        self._last = None
        self._live = None
        training, checkpointer = self.start(self._wrap(fs), seed=1, process=process)
        self._last = checkpointer
        try:
            self._resume(training, checkpointer, {self._done: self._expected[self._done]})
            self._live = training, checkpointer
            for _ in range(self._saves):
                self._begun += 1
                self._train_and_save(training, checkpointer)
            self._live = None
            checkpointer.close()
        except BaseException:
            if fs.crashed or self._live is None:
                with contextlib.suppress(SimulatedCrash, EverstepError):
                    checkpointer.close()  # ends its threads
            raise

    def go_on(self, fs: SimFileSystem) -> None:
        if self._live is None:
            return
        (training, checkpointer) = self._live
        self._live = None
        for _ in range(_ERRORS_MAX):  # what a future carried is told once more at the next call
            with contextlib.suppress(EverstepError):
                checkpointer.wait(_TIMEOUT_S)
                break
        self._begun += 1
        self._train_and_save(training, checkpointer)
        checkpointer.close()
        self._assert_tidy(fs)

    def check(self, fs: SimFileSystem, promised: tuple[int, int]) -> None:
        assert_nothing_vouches_for_torn_bytes(fs)
        self.check_resuming(fs, promised)

    def check_resuming(self, fs: SimFileSystem, promised: tuple[int, int]) -> None:
        """The part of :meth:`check` that a new process does."""
        durable, begun = promised
        allowed = {n: self._expected[n] for n in range(durable, begun + 1)}
        first, checkpointer = self.start(fs, seed=2)
        if durable == 0:
            allowed[0] = first.snapshot()  # nothing to resume: untouched
        step = self._resume(first, checkpointer, allowed)
        if self._thorough:  # resuming once more, with nothing saved in between
            checkpointer.close()
            first, checkpointer = self.start(fs, seed=2)
            self._resume(first, checkpointer, {step: allowed[step]})
        self._train_and_save(first, checkpointer)
        saved = first.snapshot()  # before another training touches the global RNGs
        checkpointer.close()
        self._assert_tidy(fs)
        second, checkpointer = self.start(fs, seed=3)
        self._resume(second, checkpointer, {step + 1: saved})
        checkpointer.close()

    def promised(self) -> tuple[int, int]:
        """The newest step reported durable, and the newest one that a save was begun of."""
        durable = None if self._last is None else self._last.stats().durable_step
        return self._floor if durable is None else durable, self._begun

    def tolerates(self, operation: Operation) -> bool:
        """Empty directories and parked files that stay are removed by the next sweep."""
        parked = operation.op == "unlink" and PurePath(operation.path).parent.name == SLOTS_DIR
        return operation.op in ("reuse", "remove_dir") or parked

    def start(
        self, fs: FileSystem, *, seed: int, process: str = "other"
    ) -> tuple[TinyTraining, Checkpointer]:
        training = TinyTraining(seed, frozen=self._static)
        self._names = random.Random(f"{process} {seed}")
        with known_names(self._names):
            checkpointer = Checkpointer(
                str(self.run),
                training.state,
                method=self._method,
                every=None,
                keep=self._keep,
                static=["model/0.*"] if self._static else [],
                seams=Seams(filesystem=fs, clock=ManualClock()),
            )
        return training, checkpointer

    def _resume(
        self, training: TinyTraining, checkpointer: Checkpointer, allowed: Mapping[int, Any]
    ) -> int:
        """Resumes; what comes back must be exactly what is allowed at the step it claims."""
        with known_names(self._names):
            recovery = checkpointer.resume()
        step = recovery.step
        skipped = f"; passed over: {recovery.skipped}" if recovery.skipped else ""
        assert step in allowed, f"resumed at step {step}, not at one of {sorted(allowed)}{skipped}"
        found = training.snapshot()
        wanted = allowed[step]
        wrong = [part for part in wanted if found[part] != wanted[part]]
        assert not wrong, f"resumed at step {step}, but {', '.join(wrong)} came back changed"
        return step

    def _train_and_save(self, training: TinyTraining, checkpointer: Checkpointer) -> None:
        training.train_step()
        checkpointer.step()
        checkpointer.save().durable.result(_TIMEOUT_S)

    def _assert_tidy(self, fs: SimFileSystem) -> None:
        left = [path for path in fs.paths() if path.endswith(TEMPORARY_SUFFIX)]
        assert not left, f"left over by a save that succeeded: {', '.join(left)}"


@contextlib.contextmanager
def known_names(draws: random.Random) -> Iterator[None]:
    """Ids and names of temporary files that are the same every time: states of the disk that
    are alike then look alike, and a violation can be replayed."""
    make = mock.Mock(side_effect=lambda: uuid.UUID(int=draws.getrandbits(128), version=4))
    with mock.patch("uuid.uuid4", make):
        yield
