"""A few elements of each entry that a registered function updates: in a mark, and in replay."""

from __future__ import annotations

from collections import defaultdict

import torch

from everstep.capture.audit import SpotCheck
from everstep.state.layout.names import SAMPLE
from everstep.state.layout.shards import plan_shards
from everstep.state.survey.survey import Survey, same_objects
from everstep.state.values.tensors import tensor_entry

__all__ = ["Probe"]


class Probe:
    """Takes the same elements of the same entries, survey after survey."""

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._checks: dict[str, SpotCheck] = {}

    def take(self, survey: Survey) -> dict[str, torch.Tensor]:
        """The elements as they are now, packed, by the name of the entry of a mark that holds
        them: for each pattern, width and device one."""
        owners = survey.shape.owners
        covered = [(name, owner.update) for name, owner in owners.items() if owner.update]
        tensors = tuple(survey.tensors[name] for name, _ in covered)
        if not same_objects(tensors, self._tensors):
            self._tensors = tensors
            self._checks = _checks(covered, tensors)
        return {
            f"{SAMPLE}{pattern}/{width}/{device}": values
            for pattern, check in self._checks.items()
            for (width, device), values in check.take().values.items()
        }

    def entry_at(self, sample: str, index: int) -> str:
        """The name of the entry that an element of a sample is of."""
        pattern, width, device = sample.removeprefix(SAMPLE).rsplit("/", 2)
        return self._checks[pattern].entry_at((int(width), torch.device(device)), index)


def _checks(
    covered: list[tuple[str, str]], tensors: tuple[torch.Tensor, ...]
) -> dict[str, SpotCheck]:
    by_pattern: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for (name, pattern), tensor in zip(covered, tensors, strict=True):
        by_pattern[pattern][name] = _as_it_lies(tensor)
    checks = {}
    for pattern, named in by_pattern.items():
        entries = [tensor_entry(name, tensor) for name, tensor in named.items()]
        (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
        checks[pattern] = SpotCheck([(layout, 0)], named, named.keys())
    return checks


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose dimensions come in the order of memory, so that one without gaps is
    contiguous."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)
