"""State at a step mark, and detection of changes made since.

A base may have to be taken after its step mark: training ends, and ``close()`` comes later. A
forward pass that has started since (and ended in an exception or a Ctrl-C) has drawn random
numbers, counted batches and fetched data; the state then belongs to no step, although no optimizer
has updated. Tensors that optimizers own still have their values of the mark, and encoded objects
were copied there. All other tensors are compared: small ones in host memory byte by byte, the rest
by torch's version counters, large ones in host memory by a few elements as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.seams.memory import copy_memory
from everstep.state.survey.survey import Survey
from everstep.state.values.tensors import host_bytes

Tag = tuple[int, int | None]
"""Address of a tensor and its version counter; see :func:`version_tag`."""


@dataclass(frozen=True, slots=True)
class LastMark:
    """State at a step mark, for a base of that mark taken later (all methods but multi-step).

    Holds references to the tensors, so their memory stays alive, and their version tags."""

    _survey: Survey
    _tensors: tuple[torch.Tensor, ...]
    _tags: tuple[Tag, ...]
    _random: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def survey(self) -> Survey:
        """Return the survey taken at the mark.

        Later surveys write the states of random generators into the same tensors; this property
        first restores the values they had at the mark."""
        for tensor, kept in self._random:
            # Not Tensor.copy_(), which would move the version counter that is part of the tag.
            copy_memory(tensor.data_ptr(), kept.data_ptr(), kept.nbytes)
        return self._survey

    @classmethod
    def of(cls, survey: Survey, names: Sequence[str], random: Sequence[str]) -> LastMark:
        """Return the current state as that of a step mark.

        Args:
            names: entries recorded by the log's step marks: mutable, and owned by no optimizer.
            random: subset of ``names``: states of random generators.
        """
        tensors = tuple(survey.tensors[name] for name in names)
        kept = tuple((one, one.clone()) for one in map(survey.tensors.__getitem__, random))
        return cls(survey, tensors, tuple(map(version_tag, tensors)), kept)

    @property
    def is_intact(self) -> bool:
        """Return True if the tensors that no optimizer owns are unchanged since the mark.

        A tensor replaced since then does not matter: this object refers to the old one. BatchNorm
        updates its statistics without a version counter, but its batch counter has one."""
        return self._tags == tuple(map(version_tag, self._tensors))


def version_tag(tensor: torch.Tensor) -> Tag:
    """Return a tensor's address and version counter; the counter is None for inference tensors."""
    # An inference tensor has no counter, and cannot be written in place outside inference mode.
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


_LARGE_BYTES = 1 << 16
_SOME = 64  # elements of a large tensor


@dataclass(frozen=True, slots=True)
class MarkSnapshot:
    """State at a step mark without the tensors that optimizers own (multi-step bases), or the
    complete state before any training.

    Attributes:
        survey: survey taken at the mark, with copies of the objects.
        values: bytes of the tensors that no optimizer owns, by entry name; of large ones a sample.
        tags: version tags, by entry name, of the tensors not completely held in ``values``.
    """

    survey: Survey
    values: Mapping[str, bytes]
    tags: Mapping[str, Tag]

    @classmethod
    def of(cls, survey: Survey, names: Iterable[str]) -> MarkSnapshot:
        """Return a snapshot of the current state.

        Args:
            names: entries to compare.
        """
        values = {}
        tags = {}
        for name in names:
            tensor = survey.tensors[name]
            small = tensor.numel() * tensor.element_size() <= _LARGE_BYTES
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                tags[name] = version_tag(tensor)
            elif small:
                values[name] = bytes(host_bytes(tensor))
            else:
                tags[name] = version_tag(tensor)
                # A name of its own keeps the copy alive: host_bytes() returns a view.
                some = _some(tensor)
                values[name] = bytes(host_bytes(some))
        return cls(survey, values, tags)

    def holds(self, survey: Survey) -> bool:
        """Return True if ``survey`` found the same values and objects."""
        now = MarkSnapshot.of(survey, list({**self.values, **self.tags}))
        if now.values != self.values or now.tags != self.tags:
            return False
        then = {section: tree.data for section, tree in self.survey.encoded().items()}
        return then == {section: tree.data for section, tree in survey.encoded().items()}


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return about ``_SOME`` evenly spaced elements of a contiguous tensor, as a copy."""
    return tensor.detach().view(-1)[:: max(1, tensor.numel() // _SOME)].clone()
