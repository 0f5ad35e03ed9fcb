"""Whether the state still is that of the last step mark, but for what optimizers own.

A base over several steps may end at a mark that has passed: training ends, and ``close()`` comes
after it. A forward that has begun since (an exception within it, a Ctrl-C) has drawn random numbers
and counted batches; such a state belongs to no step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.state.survey import Survey
from everstep.state.tensors import host_bytes

__all__ = ["AtMark"]

_LARGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class AtMark:
    """The state at a step mark.

    Attributes:
        survey: with copies of the objects.
        values: of tensors that no optimizer owns, by name.
    """

    survey: Survey
    values: Mapping[str, bytes]

    @classmethod
    def of(cls, survey: Survey, names: Sequence[str]) -> AtMark | None:
        """The state as it is now; None where that is too much to remember.

        Args:
            names: of entries that no optimizer owns.
        """
        values = {}
        for name in names:
            tensor = survey.tensors[name]
            large = tensor.numel() * tensor.element_size() > _LARGE_BYTES
            if large or tensor.device.type != "cpu" or not tensor.is_contiguous():
                return None
            values[name] = bytes(host_bytes(tensor))
        return cls(survey, values)

    def holds(self, survey: Survey) -> bool:
        """Whether ``survey`` found the same."""
        now = AtMark.of(survey, list(self.values))
        if now is None or now.values != self.values:
            return False
        then = {section: tree.data for section, tree in self.survey.encoded().items()}
        return then == {section: tree.data for section, tree in survey.encoded().items()}
