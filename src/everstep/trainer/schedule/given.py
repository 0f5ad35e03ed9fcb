"""A plan from a file, followed by a training (``Method(plan=...)``)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePath

from torch import nn

from everstep.capture.step_events import Observed
from everstep.errors import OptionError
from everstep.plan.schedule import Leaving, StepPlan, follow_placements
from everstep.plan.schedule.plan_file import PlanFile, placements_of
from everstep.plan.schedule.schedule import Placement
from everstep.seams import FileSystem
from everstep.state.providers.modules import unwrap
from everstep.state.training_state import State
from everstep.tiers.durable_files import storage_errors
from everstep.trainer.base import PreparedBase

_HINT = "everstep plan schedule --model FILE.py:factory --out {}"


@dataclass(slots=True)
class GivenPlan:
    """A plan from a file.

    Attributes:
        path: its file.
        misfit: why it does not fit the steps; None once one of them fits.
        fits: True once it was bound to a step.
        bound: True if it was bound to the step that was compared last.
    """

    path: str
    plan: PlanFile
    misfit: str | None = None
    fits: bool = False
    bound: bool = False

    @classmethod
    def read(cls, path: str, filesystem: FileSystem, state: State) -> GivenPlan:
        """Read a plan, and compare it with the parameters of the state.

        Raises:
            StorageError: The file cannot be read.
            FormatError: It is not a plan.
            OptionError: There is no such file, or it is a plan of another model.
        """
        with storage_errors("read the plan", PurePath(path)):
            try:
                file = filesystem.open(PurePath(path))
            except FileNotFoundError as error:
                there_is_none = f"Method.plan={path!r}: there is no such file"
                raise OptionError(there_is_none, hint=_HINT.format(path)) from error
            with contextlib.closing(file):
                data = bytearray(file.size_bytes)
                file.read_into(memoryview(data), 0)
        plan = PlanFile.decode(bytes(data), path)
        for key, module in state.values.items():
            named = unwrap(module).named_parameters() if isinstance(module, nn.Module) else ()
            for name, parameter in named:
                size_bytes = parameter.numel() * parameter.element_size()
                planned = plan.tensors.get(f"{key}/{name}", 0)
                if planned != size_bytes:
                    there = "not in it" if not planned else f"{planned} bytes there"
                    raise OptionError(
                        f"{path} is the plan of another model: {key}/{name} has {size_bytes} bytes "
                        f"and is {there}",
                        hint=_HINT.format(path),
                    )
        return cls(path, plan)

    def bind(
        self,
        prepared: PreparedBase,
        sources: Sequence[tuple[int, int]],
        leaving: Sequence[Leaving],
        observed: Observed,
        events: Sequence[str],
        link_bytes_per_s: float,
        *,
        duplicates: bool = True,
        duplicate_bytes_per_s: float = float("inf"),
    ) -> StepPlan | None:
        """Return the plan for the copies of this training; None if it does not fit it.

        Args:
            prepared: layout of the state.
            sources: byte range in the block of memory of each copy.
            leaving: the same copies with the events of their updates.
            observed: a step.
            events: names of its events.
            duplicates, duplicate_bytes_per_s: see :func:`follow_placements`.
        """
        found = self._placements(prepared, sources, leaving, events)
        self.bound = not isinstance(found, str)
        self.fits = self.fits or self.bound
        if isinstance(found, str):
            self.misfit = None if self.fits else found
            return None
        self.misfit = None
        return follow_placements(
            observed.seconds,
            leaving,
            found,
            link_bytes_per_s,
            duplicates=duplicates,
            duplicate_bytes_per_s=duplicate_bytes_per_s,
        )

    def _placements(
        self,
        prepared: PreparedBase,
        sources: Sequence[tuple[int, int]],
        leaving: Sequence[Leaving],
        events: Sequence[str],
    ) -> list[Placement] | str:
        """Return the plan's copies; or why it does not fit the step."""
        other = self._other_event(events)
        if other is not None:
            return other
        places = {
            place.entry.name: (offset + place.begin, offset + place.end)
            for layout, offset in prepared.layouts
            for place in layout.placed
        }
        updates = [min(one.update, len(events)) for one in leaving]
        return placements_of(self.plan, places, prepared.gated, sources, updates)

    def _other_event(self, events: Sequence[str]) -> str | None:
        """Return the first event that differs from the plan's, in words."""
        for number, (planned, here) in enumerate(zip_longest(self.plan.events, events)):
            if planned != here:
                return (
                    f"event {number} of a step is {planned or 'none'} in the plan and "
                    f"{here or 'none'} in this training"
                )
        return None


def given_plan(path: str | None, filesystem: FileSystem, state: State) -> GivenPlan | None:
    """Return the plan of ``Method(plan=)``; see :meth:`GivenPlan.read`."""
    return None if path is None else GivenPlan.read(path, filesystem, state)
