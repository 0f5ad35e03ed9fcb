"""The state at the last step mark, for a base that is taken when training ends after it.

A forward that has begun since (an exception within it, a Ctrl-C) has drawn random numbers, counted
batches and fetched data: the state as it is then belongs to no step, although no optimizer has
updated. What optimizers own is still that of the mark, objects were copied there, and for the rest
version counters tell.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from everstep.seams.memory import copy_memory
from everstep.state.survey.survey import Survey

__all__ = ["FreshStart", "LastMark", "Tag", "tag_of"]

Tag = tuple[int, int | None]
"""What :func:`tag_of` gives."""


@dataclass(frozen=True, slots=True)
class LastMark:
    """The state at a step mark; keeps its tensors' memory, and their counters."""

    _survey: Survey
    _tensors: tuple[torch.Tensor, ...]
    _tags: tuple[Tag, ...]
    _random: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def survey(self) -> Survey:
        """As it was taken there. Later surveys put the states of random generators into the same
        tensors: those of the mark are put back."""
        for tensor, kept in self._random:
            copy_memory(tensor.data_ptr(), kept.data_ptr(), kept.nbytes)
        return self._survey

    @classmethod
    def of(cls, survey: Survey, names: Sequence[str], random: Sequence[str]) -> LastMark:
        """The state as it is now.

        Args:
            names: of what no optimizer owns, and may change: what the log's marks record.
            random: of these, states of random generators.
        """
        tensors = tuple(survey.tensors[name] for name in names)
        kept = tuple((one, one.clone()) for one in map(survey.tensors.__getitem__, random))
        return cls(survey, tensors, tuple(map(tag_of, tensors)), kept)

    @property
    def is_intact(self) -> bool:
        """Whether :attr:`survey` still has what it had, as far as no optimizer owns it.

        A tensor that was replaced since does not matter: the old one is here. BatchNorm moves its
        statistics unseen, but counts batches where it is seen.
        """
        return self._tags == tuple(map(tag_of, self._tensors))


class FreshStart:
    """The state as the program has made it, before anything trains.

    Args:
        survey: of it.
        random: names of the states of random generators, which each survey copies.
    """

    def __init__(self, survey: Survey, random: Collection[str]) -> None:
        self._random = {name: survey.tensors[name].clone() for name in random}
        named = survey.tensors.items()
        self._tensors = {name: one for name, one in named if name not in self._random}
        self._tags = {name: tag_of(tensor) for name, tensor in self._tensors.items()}
        self._objects = survey.objects()

    def is_that_of(self, survey: Survey) -> bool:
        """Whether nothing was changed since, as far as version counters tell."""
        tensors = survey.tensors
        return (
            tensors.keys() == self._tags.keys() | self._random.keys()
            and all(tensors[name] is one for name, one in self._tensors.items())
            and all(tag_of(tensors[name]) == tag for name, tag in self._tags.items())
            and all(torch.equal(tensors[name], one) for name, one in self._random.items())
            and survey.objects() == self._objects
        )


def tag_of(tensor: torch.Tensor) -> Tag:
    """Where a tensor lies, and how often torch has written to it; None: it does not count."""
    # An inference tensor has no counter, and cannot be written to in place outside that mode.
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version
