"""What the log holds of declared updates: not what they give, but that they ran, and when.

A function that is registered for some entries is run again by replay, so step marks leave these
entries out (I8). What it may read besides is what optimizers own, which replay has just as it
was, and buffers of modules, which the record of the update holds for it. Whether a function gives
what training had is for a few elements of each entry to say, which every mark holds; they say as
well when an entry has changed and no update was declared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from everstep.capture.probe import Probe
from everstep.errors import AuditError
from everstep.format.log import RecordHead
from everstep.state.layout.names import SAMPLE, SPOT
from everstep.state.layout.shards import ShardLayout
from everstep.state.survey.survey import Shape, Survey
from everstep.state.training_state import State

__all__ = ["DeclaredLog"]


class DeclaredLog:
    """What records hold for the sake of declared updates.

    Args:
        state: with the functions that are registered.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._probe = Probe()
        self._shape: Shape | None = None
        self._buffers: frozenset[str] = frozenset()
        self._ran: set[str] = set()  # since the last mark
        self._before: Mapping[str, bytes] = {}  # samples of the last mark, which was that of
        self._step = 0

    def start(self) -> None:
        """What comes next does not follow what was last."""
        self._ran = set()
        self._before = {}

    def ran(self, pattern: str) -> dict[str, torch.Tensor]:
        """A declared update is over; returns buffers as it has read them, by entry name."""
        self._ran.add(pattern)
        if self._shape is not None and not self._buffers:
            return {}  # if some have come since the last mark, a new base is due at the next
        survey = self._state.survey()
        self._look(survey)
        return {name: survey.tensors[name] for name in self._buffers}

    def samples(self, survey: Survey) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """For a mark: the elements, by the names of their entries in it; and the patterns of the
        updates that have run since the mark before."""
        if self._state.ownership_rules.updates:
            self._look(survey)
        ran = frozenset(self._ran)
        self._ran = set()
        return self._probe.take(survey), ran

    def check(
        self, head: RecordHead, layout: ShardLayout, data: torch.Tensor, ran: Collection[str]
    ) -> None:
        """Compares the samples of a mark with those of the mark before; in the lane's thread.

        Args:
            data: the record's block (flat ``uint8``), copied.

        Raises:
            AuditError: an entry has changed, and no update of it was declared.
        """
        samples = {
            place.entry.name: data[place.begin : place.end].numpy().tobytes()
            for place in layout.placed
            if place.entry.name.startswith(SAMPLE) and not place.entry.name.startswith(SPOT)
        }
        follows = head.step == self._step + 1  # no mark has been lost between
        before = self._before if follows else {}
        self._before = samples
        self._step = head.step
        for name, found in samples.items():
            pattern = name.removeprefix(SAMPLE).rsplit("/", 2)[0]
            if pattern not in ran and before.get(name, found) != found:
                raise AuditError(
                    f"what {pattern!r} declares has changed in step {head.step}, but no such "
                    "update was told of",
                    step=head.step,
                    hint=f"ckpt.before_update(), the registered function, "
                    f"ckpt.after_update({pattern!r}); ckpt.after_update() after anything else "
                    "that changes it",
                )

    def _look(self, survey: Survey) -> None:
        """Finds the entries in the marks that are buffers of a module."""
        if survey.shape is self._shape:
            return
        places = {
            buffer.data_ptr()
            for value in self._state.values.values()
            if isinstance(value, nn.Module)
            for buffer in value.buffers()
        }
        self._shape = survey.shape
        self._buffers = frozenset(
            name
            for name, tensor in survey.tensors.items()
            if survey.shape.owners[name].in_marks and tensor.data_ptr() in places
        )
