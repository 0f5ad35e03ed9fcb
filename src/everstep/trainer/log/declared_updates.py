"""Records of declared updates: that a registered function ran, and when; not its result.

Replay runs a function registered for some entries again, so step marks leave these entries out
(I8). Besides them the function may read optimizer-owned tensors, which replay reproduces, and
buffers of modules, which the record of the update holds. Each mark holds a few elements of every
such entry: they show whether replay gives the result of training, and whether an entry changed
without a declared update."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from everstep.capture.spot_check import Probe
from everstep.errors import AuditError
from everstep.format.log import RecordHead
from everstep.state.layout.names import SAMPLE, SPOT
from everstep.state.layout.shards import ShardLayout
from everstep.state.survey.survey import Shape, Survey
from everstep.state.training_state import State


class DeclaredUpdates:
    """Contents of records for the sake of declared updates.

    Args:
        state: state with the registered functions.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._probe = Probe()
        self._shape: Shape | None = None
        self._buffers: frozenset[str] = frozenset()
        self._ran: set[str] = set()  # since the last mark
        self._before: Mapping[str, bytes] = {}  # samples of the last mark
        self._step = 0

    def start(self) -> None:
        """Forget the last mark: the next one does not follow it."""
        self._ran = set()
        self._before = {}

    def ran(self, pattern: str) -> dict[str, torch.Tensor]:
        """Note that a declared update has run; return the buffers it may have read, by entry
        name."""
        self._ran.add(pattern)
        if self._shape is not None and not self._buffers:
            return {}  # new buffers would make a base due at the next mark
        survey = self._state.survey()
        self._find_buffers(survey)
        return {name: survey.tensors[name] for name in self._buffers}

    def samples(self, survey: Survey) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """Return the samples for a step mark, by name, and the patterns of the updates since the
        last."""
        if self._state.ownership_rules.updates:
            self._find_buffers(survey)
        ran = frozenset(self._ran)
        self._ran = set()
        return self._probe.take(survey), ran

    def check(
        self, head: RecordHead, layout: ShardLayout, data: torch.Tensor, ran: Collection[str]
    ) -> None:
        """Compare the samples of a mark with those of the mark before; in the lane's thread.

        Args:
            head: header of the mark.
            layout: layout of ``data``.
            data: block of the record (flat ``uint8``), copied.
            ran: patterns of the declared updates since the last mark.

        Raises:
            AuditError: an entry changed, and no update of it was declared.
        """
        samples = {
            place.entry.name: data[place.begin : place.end].numpy().tobytes()
            for place in layout.placed
            if place.entry.name.startswith(SAMPLE) and not place.entry.name.startswith(SPOT)
        }
        follows = head.step == self._step + 1  # no mark is missing in between
        before = self._before if follows else {}
        self._before = samples
        self._step = head.step
        for name, found in samples.items():
            pattern = name.removeprefix(SAMPLE).rsplit("/", 2)[0]
            if pattern not in ran and before.get(name, found) != found:
                raise AuditError(
                    f"an entry declared by {pattern!r} changed in step {head.step}, but its "
                    "update was not announced",
                    step=head.step,
                    hint="call ckpt.before_update(), the registered function, and "
                    f"ckpt.after_update({pattern!r}); call ckpt.after_update() after any other "
                    "change of it",
                )

    def _find_buffers(self, survey: Survey) -> None:
        """Find the entries in marks that are buffers of a module."""
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
