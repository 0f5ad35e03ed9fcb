"""Declared updates in replay: registered functions run where they ran in training."""

from __future__ import annotations

import torch

from everstep.capture.spot_check import Probe
from everstep.errors import FormatError, ReplayError
from everstep.format.log import LogRecord
from everstep.replay.exactness import Exactness
from everstep.run.tensors import copy_into, tensor_of
from everstep.state.layout.names import SAMPLE, SPOT
from everstep.state.layout.shards import Placed
from everstep.state.training_state import State

__all__ = ["DeclaredRedo"]


class DeclaredRedo:
    """Runs the functions that a live state has registered (I8).

    Attributes:
        exactness: whether they have given what training had, as far as its marks tell.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._probe = Probe()
        self.exactness = Exactness(True, "")

    def run(self, record: LogRecord) -> None:
        """Redoes one update; all those before it have been applied.

        Raises:
            ReplayError: there is no such function here, or it fails.
            FormatError: the record does not fit the state.
        """
        pattern = record.head.declared
        function = self._state.ownership_rules.updates.get(pattern)
        if function is None:
            raise ReplayError(f"{record.head}: no function is registered for {pattern!r}")
        if record.layout.placed:  # as the function has read them
            tensors = self._state.survey().tensors
            for place in record.layout.placed:
                _put(tensors.get(place.entry.name), record, place)
        self._state.replaying = True
        try:
            function()
        except Exception as error:
            raise ReplayError(
                f"the function registered for {pattern!r} failed in the replay of step "
                f"{record.head.step}: {error!r}",
                step=record.head.step,
                hint="it must work from the state alone",
            ) from error
        finally:
            self._state.replaying = False

    def settle(self, mark: LogRecord) -> None:
        """At the end of a step: takes what the mark has in full, because no function was
        registered then, and compares what functions have given with what the mark has of it.

        Raises:
            FormatError: the mark does not fit the state.
        """
        if not self._state.ownership_rules.updates:
            return
        survey = self._state.survey()
        for place in mark.layout.placed:
            owner = survey.shape.owners.get(place.entry.name)
            if owner is not None and owner.update is not None:
                _put(survey.tensors[place.entry.name], mark, place)
        found = self._probe.take(survey) if self.exactness.exact else {}
        logged = {place.entry.name: place for place in mark.layout.placed}
        if not self._state.ownership_rules.replays and any(
            name.startswith(SAMPLE) and not name.startswith(SPOT) for name in logged
        ):
            # Such logs were written once: they leave out what a function has updated.
            why = "what registered functions have read is with other ranks while each replays"
            self.exactness = Exactness(False, why)
        for name, mine in found.items():
            if name in logged and (other := self._other(name, mine, mark, logged[name])):
                pattern = name.removeprefix(SAMPLE).rsplit("/", 2)[0]
                why = f"the function registered for {pattern!r} gives {other} than training had"
                self.exactness = Exactness(False, f"{why}, at step {mark.head.step}")
                return

    def _other(self, name: str, mine: torch.Tensor, mark: LogRecord, place: Placed) -> str:
        theirs = tensor_of(mark, place)
        if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            return "other entries"
        differs = (theirs != mine.cpu()).nonzero()
        if not len(differs):
            return ""
        return f"another {self._probe.entry_at(name, int(differs[0]))!r}"


def _put(target: torch.Tensor | None, record: LogRecord, place: Placed) -> None:
    source = tensor_of(record, place)
    if target is None or (target.shape, target.dtype) != (source.shape, source.dtype):
        raise FormatError(f"{record.head} has another {place.entry.name!r} than the state")
    copy_into(target, source)
