"""What an optimizer's update consumes, as its record holds it: gradients and hyperparameters (I2).

Most steps consume what the last one did, in new tensors: which parameters have gradients, and
shapes, dtypes and strides of these are compared, and the rest is taken from the last step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Optimizer

from everstep.capture.lanes.batches import Batch, plan_batches
from everstep.compress.lossy import Lossy, lossy_copies
from everstep.errors import UnsupportedStateError
from everstep.link.recordable import (
    Grouping,
    Layouts,
    compressors_of,
    exchanges_of,
    form_entries,
    groupings_of,
    lossy_entries,
    refuse_options,
    replay_options,
    require_eager,
)
from everstep.replay.checks import widens
from everstep.replay.exactness import kind_name
from everstep.replay.fused.cuts import has_gaps
from everstep.replay.own import writes_gradients
from everstep.state.layout.names import GRADIENT, HYPER
from everstep.state.layout.shards import ShardLayout, overlaps
from everstep.state.providers.zero import local_optimizer
from everstep.state.training_state import State
from everstep.state.values.tensors import byte_view, dtype_code, is_dtensor, local_tensor
from everstep.state.values.tree import split

__all__ = ["Consumed", "Consumption"]

_log = logging.getLogger("everstep")

_address_of = torch.Tensor.data_ptr
_SCALER = ("grad_scale", "found_inf")
_LAST_MAX = 256  # optimizers, and choices of their parameters


@dataclass(frozen=True, slots=True, eq=False)
class Consumed:
    """An update, before it is copied.

    Attributes:
        about: what the record says of it, as an object.
        batches: copies of all tensors into a room of ``layout.size_bytes``.
        in_host_memory: all of them lie there.
        written: the update itself writes to its gradients.
        tensors: all of them, by their names in the record.
    """

    about: Mapping[str, Any]
    layout: ShardLayout
    batches: Sequence[Batch]
    in_host_memory: bool
    written: bool
    tensors: Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class _Last:
    """What an optimizer consumed last.

    Attributes:
        members: names of gradients in a record, and parameters, in the order of these; without
            those that it leaves out.
        forms: names, dtypes, shapes and strides of all tensors, which ``layout`` is of.
        outline: of their copies; None where these have to be planned each time.
        are_cast: some gradient has another dtype than its parameter.
    """

    members: Sequence[tuple[str, torch.Tensor]]
    forms: Sequence[Any] = ()
    layout: ShardLayout | None = None
    outline: Sequence[_Outline] | None = None
    are_cast: bool = False


class _Outline(NamedTuple):
    """A batch without its tensors, all of which lie in host memory in row-major order.

    Attributes:
        names: of the tensors.
        skip: bytes of the first that belong to the batch before.
    """

    begin: int
    end: int
    names: tuple[str, ...]
    skip: int


_There = Sequence[tuple[str, torch.Tensor, Any]]
"""Gradients' names in the record, parameters, gradients: of a DTensor this rank's part."""


class Consumption:
    """Looks at what the optimizers of a state are going to consume.

    Args:
        lossy_ratio: gradients are looked at in lossy copies, which keep this share of large ones
            (:mod:`everstep.compress.lossy`); None: as they are.
        sparse: means that ranks have exchanged compressed are looked at in that form.

    Raises:
        OptionError: a Compressor is of an optimizer that is not in the state.
    """

    def __init__(
        self, state: State, *, lossy_ratio: float | None = None, sparse: bool = False
    ) -> None:
        self._state = state
        self._lossy_ratio = lossy_ratio
        self._compressors = compressors_of(state)
        self._exchanges = exchanges_of(state) if sparse else []
        self._told = False  # of a mean that was changed
        self._groupings: dict[str, Grouping] = {}
        self._allowed: dict[str, Any] = {}  # what of their options was looked at
        self._last: dict[tuple[str, frozenset[str] | None], _Last] = {}
        self._layouts = Layouts()

    def regroup(self) -> Mapping[str, Grouping]:
        """How optimizers group their parameters now; from now on this is as it was before."""
        self._groupings = groupings_of(self._state)
        self._last = {}
        self._allowed = {}
        return self._groupings

    def grouped_as_before(self, key: str | None = None) -> bool:
        """Whether an optimizer (any of them) has the same groups of the same parameters."""
        return all(
            grouping.holds(self._state.optimizers[other])
            for other, grouping in self._groupings.items()
            if key in (None, other)
        )

    @property
    def groupings(self) -> Mapping[str, Grouping]:
        """How optimizers group their parameters: the same object until that is looked at anew."""
        return self._groupings or self.regroup()

    def members(
        self, key: str, only: frozenset[str] | None = None
    ) -> Sequence[tuple[str, torch.Tensor]]:
        """What :meth:`look` looks at, which is called before: gradients' names in the record, and
        parameters."""
        return self._last_of(key, only).members

    def expect(self, key: str, only: frozenset[str]) -> None:
        """Lays out a record of these gradients before there are any, as most will be: like their
        parameters. Arguments as for :meth:`look`, which compares."""
        if not self._groupings:
            self.regroup()
        named = {name: p for name, p in self._last_of(key, only).members if p.requires_grad}
        if not any(is_dtensor(parameter) for parameter in named.values()):
            self._layouts.of(named)

    def look(self, key: str, only: frozenset[str] | None = None) -> Consumed:
        """What the optimizer ``key`` consumes now; it is grouped as before.

        Args:
            only: names of parameters, to leave out the gradients of all others.

        Raises:
            UnsupportedStateError: no record can hold it.
        """
        if not self._groupings:
            self.regroup()
        optimizer = require_eager(key, self._state.optimizers[key])
        self._check_options(key, optimizer)
        last = self._last_of(key, only)
        there = [(name, p, _plain(p)) for name, p in last.members if p.grad is not None]
        compact = self._compact(key, there)
        lossy = self._lossy(there, compact)
        named: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        compressed: dict[str, Any] = {}
        forms: list[Any] = []
        for name, parameter, gradient in there:
            form = compact.get(id(parameter)) if compact else None
            if form is not None and not has_gaps(gradient):
                bare = name.removeprefix(GRADIENT)
                compressed[bare] = form_entries(bare, gradient, form, others)
                continue
            if lossy and (copy := lossy.get(id(parameter))) is not None:
                bare = name.removeprefix(GRADIENT)
                compressed[bare] = lossy_entries(bare, gradient, copy, others)
                continue
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                raise _not_plain(name.removeprefix(GRADIENT), parameter)
            if gradient.is_conj() or gradient.is_neg():
                gradient = gradient.resolve_conj().resolve_neg()
            named[name] = gradient.detach() if gradient.requires_grad else gradient
            forms += name, gradient.dtype, gradient.shape, gradient.stride()
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in group.items() if k != "params"}
            groups.append(split(options, f"{HYPER}/{number}", others))
        kind = type(local_optimizer(optimizer))
        written = writes_gradients(kind, optimizer.param_groups)
        for name in _SCALER:
            value = getattr(optimizer, name, None)
            if isinstance(value, torch.Tensor):
                others[name] = value.detach()
                written = True  # a fused kernel divides them in place
        if written and len(set(map(_address_of, named.values()))) < len(named):
            _refuse_in_common(named)
        for name, tensor in others.items():
            forms += name, tensor.dtype, tensor.shape, tensor.stride()
        named |= others
        layout = last.layout
        if layout is None or forms != last.forms:
            _refuse_gaps(optimizer, named)
            last.are_cast = any(gradient.dtype != p.dtype for _, p, gradient in there)
            layout = self._layouts.of(named)
            last.forms = forms
            last.layout = layout
            last.outline = None
        if last.are_cast:
            _refuse_other_dtypes(kind, optimizer, there)
        about: dict[str, Any] = {
            "optimizer": key,
            "kind": kind_name(kind),
            "groups": groups,
            "default_dtype": dtype_code(torch.get_default_dtype()),
        }
        if compressed:
            about["compressed"] = compressed
        if any("lossy" in fields for fields in compressed.values()):
            about["lossy"] = True
        in_host_memory = all(tensor.is_cpu for tensor in named.values())
        batches: Sequence[Batch]
        if last.outline is not None and in_host_memory:
            batches = [_batch(outline, named) for outline in last.outline]
        else:
            batches = plan_batches(layout, named, named.keys())
            if in_host_memory and not others:
                last.outline = _outlines(layout, batches)
        return Consumed(about, layout, batches, in_host_memory, written, named)

    def _check_options(self, key: str, optimizer: Optimizer) -> None:
        """Refuses what would have been refused at the start: a program may set options at any time,
        and a base may have brought them."""
        there = replay_options(optimizer)
        if there != self._allowed.get(key):
            refuse_options(key, optimizer)
            self._allowed[key] = there

    def _last_of(self, key: str, only: frozenset[str] | None) -> _Last:
        last = self._last.get((key, only))
        if last is None:
            groups = self._state.optimizers[key].param_groups
            parameters = (parameter for group in groups for parameter in group["params"])
            named = zip(self._groupings[key].names, parameters, strict=True)
            chosen = [(GRADIENT + n, p) for n, p in named if only is None or n in only]
            if len(self._last) >= _LAST_MAX:
                self._last.clear()
            last = self._last[(key, only)] = _Last(chosen)
        return last

    def _lossy(self, there: _There, compact: Mapping[int, Any]) -> Mapping[int, Lossy]:
        """Lossy copies of gradients, by ``id(parameter)``, if these are what is recorded."""
        if self._lossy_ratio is None:
            return {}
        found = {id(p): grad for _, p, grad in there if type(grad) is torch.Tensor}
        found = {of: grad for of, grad in found.items() if of not in compact}
        return lossy_copies(found, self._lossy_ratio)

    def _compact(self, key: str, there: _There) -> Mapping[int, Any]:
        """Forms of the gradients that training consumes compressed, by ``id(parameter)``."""
        compressor = self._compressors.get(key)
        if compressor is not None:
            if not compressor.is_last:
                compressor.check()
            return {key: form for key, form in compressor.last.items() if form is not None}
        found = {}
        for exchange in self._exchanges:
            for name, parameter, _ in there:
                if exchange.last.get(id(parameter)) is None:
                    continue
                form = found[id(parameter)] = exchange.form_of(parameter)
                if form is None and not self._told:
                    self._told = True
                    _log.warning(
                        "everstep: %s has other gradients than ranks have exchanged, not only "
                        "scaled: such ones are recorded whole",
                        name.removeprefix(GRADIENT),
                    )
        return found


def _outlines(layout: ShardLayout, batches: Sequence[Batch]) -> list[_Outline] | None:
    placed = [place for place in layout.placed if place.end > place.begin]
    ends = [place.end for place in placed]
    found = []
    for batch in batches:
        if batch.rearranged is not None:
            return None
        within = [p for p, _, _ in overlaps(placed, ends, batch.begin, batch.end - batch.begin)]
        names = tuple(place.entry.name for place in within)
        found.append(_Outline(batch.begin, batch.end, names, batch.begin - within[0].begin))
    return found


def _batch(outline: _Outline, named: Mapping[str, torch.Tensor]) -> Batch:
    begin, end, names, skip = outline
    sources = tuple([byte_view(named[name]) for name in names])
    if len(sources) == 1 and sources[0].numel() != end - begin:
        sources = (sources[0][skip : skip + end - begin],)
    return Batch(begin, end, sources)


def _plain(parameter: torch.Tensor) -> Any:
    """Its gradient; of a DTensor this rank's part."""
    gradient: Any = parameter.grad
    if type(gradient) is not torch.Tensor and is_dtensor(gradient):
        return _part_of(gradient, parameter)
    return gradient


def _part_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient; None where it is not spread as its parameter is, so that an
    update would ask other ranks for theirs."""
    if not _have_one_mesh(gradient, parameter):
        return None
    alike = gradient.placements == parameter.placements  # type: ignore[attr-defined]
    return local_tensor(gradient) if alike else None


def _have_one_mesh(gradient: Any, parameter: Any) -> bool:
    both = is_dtensor(gradient) and is_dtensor(parameter)
    return both and gradient.device_mesh == parameter.device_mesh


def _refuse_gaps(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> None:
    if not any(group.get("fused") for group in optimizer.param_groups):
        return
    for name, tensor in named.items():
        if name.startswith(GRADIENT) and has_gaps(tensor):
            gradient = f"the gradient of {name.removeprefix(GRADIENT)}"
            raise UnsupportedStateError(
                f"{gradient} has gaps between its elements in memory, which a fused kernel reads, "
                "too; it cannot be logged",
                leaves=((name.removeprefix(GRADIENT), "a gradient with gaps"),),
                hint="gradient.contiguous(), or fused=False",
            )


def _refuse_in_common(gradients: Mapping[str, torch.Tensor]) -> None:
    """Of an optimizer that writes to them: torch adds what belongs to each parameter to the one
    memory that some of them have in common, and replay has as many as there are parameters."""
    first: dict[int, str] = {}
    for name, gradient in gradients.items():
        bare = name.removeprefix(GRADIENT)
        other = first.setdefault(gradient.data_ptr(), bare)
        if other != bare and gradient.numel():
            raise UnsupportedStateError(
                f"the gradients of {other} and {bare} are one memory, which this optimizer writes "
                "to as it updates (foreach SGD with nesterov, a scaler's fused kernel): it cannot "
                "be logged",
                leaves=((bare, "a gradient that is another one's, too"),),
                hint="gradient.clone(), or foreach=False",
            )


def _refuse_other_dtypes(
    kind: type[Optimizer],
    optimizer: Optimizer,
    there: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
) -> None:
    """``Tensor.grad_dtype`` allows gradients of another dtype than their parameter's. torch
    computes with them in their own, and replay in the parameter's: only where they go straight
    into parameters that are wider is that the same (a moment that is made of one has its dtype)."""
    plain = kind is SGD and not any(group["momentum"] for group in optimizer.param_groups)
    for name, parameter, gradient in there:
        if gradient.dtype == parameter.dtype:
            continue
        if not (plain and widens(gradient.dtype, parameter.dtype)):
            bare = name.removeprefix(GRADIENT)
            what = f"a gradient in {gradient.dtype}, of a parameter in {parameter.dtype}"
            raise UnsupportedStateError(
                f"{bare} has {what}; it cannot be logged",
                leaves=((bare, what),),
                hint='method="lazy", or leave grad_dtype as it is',
            )


def _not_plain(name: str, parameter: Any) -> UnsupportedStateError:
    gradient = parameter.grad
    what = "no plain dense tensor"
    hint = "a dense gradient"
    if _have_one_mesh(gradient, parameter):
        there, mine = (", ".join(map(repr, one.placements)) for one in (gradient, parameter))
        what = f"placed as {there}, and its parameter as {mine}"
        hint = "p.grad = p.grad.redistribute(placements=p.placements) before optimizer.step()"
    return UnsupportedStateError(
        f"the gradient of {name} is {what}; it cannot be logged",
        leaves=((name, f"a gradient that is {what}"),),
        hint=f'method="lazy", or {hint}',
    )
