"""Whether the state still is that of the last step mark, but for what optimizers own.

A base over several steps may end at a mark that has passed: training ends, and ``close()`` comes
after it. A forward that has begun since (an exception within it, a Ctrl-C) has drawn random numbers
and counted batches; such a state belongs to no step.

Small tensors are remembered. Of those that are large, or lie on a device, version counters tell,
as in :mod:`.last_mark`, and of large ones in host memory some elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.state.survey.survey import Survey
from everstep.state.values.tensors import host_bytes
from everstep.trainer.base.last_mark import Tag, tag_of

__all__ = ["AtMark"]

_LARGE_BYTES = 1 << 16
_SOME = 64  # elements of a large tensor


@dataclass(frozen=True, slots=True)
class AtMark:
    """The state at a step mark.

    Attributes:
        survey: with copies of the objects.
        values: of tensors that no optimizer owns, by name; of large ones some.
        tags: of those of which not all is among the values.
    """

    survey: Survey
    values: Mapping[str, bytes]
    tags: Mapping[str, Tag]

    @classmethod
    def of(cls, survey: Survey, names: Sequence[str]) -> AtMark:
        """The state as it is now.

        Args:
            names: of entries that no optimizer owns.
        """
        values = {}
        tags = {}
        for name in names:
            tensor = survey.tensors[name]
            small = tensor.numel() * tensor.element_size() <= _LARGE_BYTES
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                tags[name] = tag_of(tensor)
            elif small:
                values[name] = bytes(host_bytes(tensor))
            else:
                tags[name] = tag_of(tensor)
                some = _some(tensor)  # host_bytes() does not keep it alive
                values[name] = bytes(host_bytes(some))
        return cls(survey, values, tags)

    def holds(self, survey: Survey) -> bool:
        """Whether ``survey`` found the same."""
        now = AtMark.of(survey, list({**self.values, **self.tags}))
        if now.values != self.values or now.tags != self.tags:
            return False
        then = {section: tree.data for section, tree in self.survey.encoded().items()}
        return then == {section: tree.data for section, tree in survey.encoded().items()}


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a contiguous tensor, from its first to its last."""
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // _SOME)].clone()
