"""Training loops of the user's own, over loaders that a framework has set up.

A step ends where the loop asks its loader for the next batch: all that its body does after
``optimizer.step()`` belongs to it. The last step of an epoch ends when the loader does; code after
the inner loop is run again by a resume in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from everstep.checkpointer import Checkpointer
from everstep.data import ResumableLoader
from everstep.restore.start import Recovery
from everstep.state.values.generators import RngStates


class FollowedLoader:
    """A loader that a framework has set up, and its position in the state.

    Args:
        source: resumable loader that takes the place of the ``DataLoader`` inside of it.

    Attributes:
        trains: the last step's batch came from this loader; others may be for evaluations.
        everstep_restores_data: True; marks an object that restores the order of data.
    """

    everstep_restores_data = True

    def __init__(self, source: ResumableLoader) -> None:
        self.trains = False
        self._source = source

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return int(self.state_dict()["epoch"])

    def position(self) -> Mapping[str, Any]:
        """Return the position after the batch that the loop has."""
        return self._source.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {**self.position(), "trains": self.trains}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position: the next loop continues there."""
        self._source.load_state_dict(state)
        self.trains = state["trains"]

    def refusal(self, state: Any) -> str | None:
        """Return the reason why this loader cannot continue from a position; None: it can."""
        return self._source.refusal(state)

    def follow(self, run: Run) -> None:
        """Tell a run where steps end."""
        raise NotImplementedError

    def leave_epoch(self, run: Run) -> None:
        """Mark the step of the last batch, after which the loop has left the epoch by itself."""
        self._source.set_epoch(self.epoch + 1)
        run.is_over(self)


class IteratedLoader(FollowedLoader):
    """A loader whose batches the loop takes from this object."""

    def __init__(self, source: ResumableLoader) -> None:
        super().__init__(source)
        self._run: Run | None = None

    def follow(self, run: Run) -> None:
        """Tell a run where steps end."""
        self._run = run

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        assert run is not None
        if run.is_due(self):
            self.leave_epoch(run)
        run.begins()
        for batch in self._source:
            run.gives(self)
            yield batch
            # The loop asks for the next batch. After the last one this is still in its epoch, so
            # that a resume runs the code after the inner loop.
            run.is_over(self)


class Run:
    """Run of a training loop.

    Args:
        checkpointer: saves and restores the state.
        optimizers: optimizers that make the updates.
        loaders: loaders of the state.

    Attributes:
        recovery: result of the resume.
        checkpointer: the Checkpointer.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        optimizers: Sequence[Optimizer],
        loaders: Sequence[FollowedLoader],
    ) -> None:
        self.checkpointer = checkpointer
        self._loaders = loaders
        self._active: FollowedLoader | None = None
        self._due: FollowedLoader | None = None
        try:
            self.recovery: Recovery = checkpointer.resume()
        except BaseException as error:
            checkpointer.__exit__(type(error), error, error.__traceback__)
            raise
        self._steps = self.recovery.step
        self._generators: RngStates | None = RngStates.now()
        self._hooks = [one.register_step_post_hook(self._updated) for one in optimizers]
        for loader in loaders:
            loader.follow(self)

    @property
    def epoch(self) -> int:
        """Epoch in which the loop continues; from 0."""
        return next((one for one in self._loaders if one.trains), self._loaders[0]).epoch

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs from the one in which the loop continues, and :meth:`close` after the
        last.

        Args:
            total: number of epochs of the training.
        """
        yield from range(self.epoch, total)
        self.close()

    def begins(self) -> None:
        """Put the random generators back before the first batch: other code may have drawn."""
        if self._generators is not None:
            self._generators.put_back()
            self._generators = None

    def gives(self, loader: FollowedLoader) -> None:
        """Note that a loader gives a batch to the loop."""
        self._active = loader

    def is_due(self, loader: FollowedLoader) -> bool:
        """Return True if a step whose batch came from this loader is not marked yet."""
        return self._due is loader

    def is_over(self, loader: FollowedLoader) -> None:
        """Mark the step whose batch came from this loader, if there was an update."""
        if self.is_due(loader):
            self._due = None
            for one in self._loaders:
                one.trains = one is loader
            self._steps += 1
            self.checkpointer.step()

    def close(self) -> None:
        """Save the end of the training, and close the run."""
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
