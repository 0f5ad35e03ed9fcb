"""Replay of declared updates: run registered functions where they ran in training."""

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


class DeclaredRedo:
    """Run the functions registered on a live state (I8).

    Attributes:
        exactness: False once a function gave a value that differs from the samples in a mark.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._probe = Probe()
        self.exactness = Exactness(True, "")

    def run(self, record: LogRecord) -> None:
        """Replay one declared update. All earlier updates must have been applied.

        Raises:
            ReplayError: no function is registered for the pattern, or it fails.
            FormatError: the record does not fit the state.
        """
        pattern = record.head.declared
        function = self._state.ownership_rules.updates.get(pattern)
        if function is None:
            raise ReplayError(f"{record.head}: no function is registered for {pattern!r}")
        # The record holds the inputs as the function read them in training.
        if record.layout.placed:
            tensors = self._state.survey().tensors
            for place in record.layout.placed:
                _put(tensors.get(place.entry.name), record, place)
        # Tells hooks of the state that these writes are replay, not training.
        self._state.replaying = True
        try:
            function()
        except Exception as error:
            raise ReplayError(
                f"the function registered for {pattern!r} failed in replay of step "
                f"{record.head.step}: {error!r}",
                step=record.head.step,
                hint="the function must depend on nothing but the state",
            ) from error
        finally:
            self._state.replaying = False

    def settle(self, mark: LogRecord) -> None:
        """Finish a step: restore declared entries that the mark holds in full because no function
        was registered at that time, and compare the results of functions with the samples in the
        mark.

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
            # Older logs leave out entries that a function updated; they cannot be compared.
            why = "inputs of registered functions are on other ranks during replay"
            self.exactness = Exactness(False, why)
        for name, mine in found.items():
            if name in logged and (other := self._difference(name, mine, mark, logged[name])):
                pattern = name.removeprefix(SAMPLE).rsplit("/", 2)[0]
                why = f"the function registered for {pattern!r} gives {other} than training had"
                self.exactness = Exactness(False, f"{why}, at step {mark.head.step}")
                return

    def _difference(self, name: str, mine: torch.Tensor, mark: LogRecord, place: Placed) -> str:
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
        raise FormatError(
            f"{record.head}: shape or dtype of {place.entry.name!r} differs from the state's"
        )
    copy_into(target, source)
