"""Inputs of an optimizer update, as its record holds them: gradients and hyperparameters (I2).

Gradients are recorded rather than differentials of the state, as in LowDiff (section III-B and C):
replay runs the optimizer again. Most steps have the inputs of the step before in new tensors. So
the set of parameters with gradients, and the dtypes, shapes and strides of these, are compared; the
layout and the copies are reused if they are equal.

Records of declared updates: that a registered function ran, and when; not its result.

Replay runs a function registered for some entries again, so step marks leave these entries out
(I8). Besides them the function may read optimizer-owned tensors, which replay reproduces, and
buffers of modules, which the record of the update holds. Each mark holds a few elements of every
such entry: they show whether replay gives the result of training, and whether an entry changed
without a declared update.

A log refuses some updates only when they happen: sparse gradients, gradients that share memory. A
start of ``method="auto"`` without a log therefore lets the first updates of each optimizer pass
through the checks of the log, and emits the result. Only a loop that has passed them is logged by a
later start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from everstep.capture import Batch, plan_batches
from everstep.capture.spot_check import Probe
from everstep.compress.lossy import Lossy, lossy_copies
from everstep.errors import AuditError, EverstepError, UnsupportedStateError
from everstep.format.log import RecordHead
from everstep.link.recordable import (
    Grouping,
    Layouts,
    compressors_of,
    exchanges_of,
    form_entries,
    groupings_of,
    lossy_entries,
    refuse_encoded,
    refuse_options,
    replay_options,
    require_eager,
)
from everstep.replay import has_gaps, kind_name
from everstep.replay.optimizer_step import writes_gradients
from everstep.replay.updates import is_widening
from everstep.state.layout import GRADIENT, SAMPLE, ShardLayout
from everstep.state.layout.entries import HYPER, PART_OBJECT, SPOT, UPDATE_OBJECT
from everstep.state.layout.shards import overlaps
from everstep.state.providers import ZeroProvider, local_optimizer
from everstep.state.ranks import names_digest
from everstep.state.ranks.log_shares import LogShare, log_shares
from everstep.state.survey import Shape, Survey
from everstep.state.training_state import State
from everstep.state.values.tensors import DTYPE_CODES, byte_view, is_dtensor, local_tensor
from everstep.state.values.tree import split
from everstep.trainer.participant import Mark, Participant

_log = logging.getLogger("everstep")

_address_of = torch.Tensor.data_ptr
_SCALER = ("grad_scale", "found_inf")
_CHECKED_UPDATES = 3  # of each optimizer
_CHECKED_STEPS = 5
_LAST_MAX = 256  # optimizers, and choices of their parameters


@dataclass(frozen=True, slots=True, eq=False)
class UpdateInputs:
    """Inputs of an update, before they are copied.

    Attributes:
        about: description stored in the record as an object.
        layout: layout of all tensors in the record.
        batches: copies of all tensors into a block of ``layout.size_bytes``.
        in_host_memory: all tensors are in host memory.
        written: the update writes to its own gradients.
        tensors: all tensors, by their names in the record.
    """

    about: Mapping[str, Any]
    layout: ShardLayout
    batches: Sequence[Batch]
    in_host_memory: bool
    written: bool
    tensors: Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class _LastInputs:
    """Inputs of the last update of an optimizer.

    Attributes:
        members: names of gradients in a record, and parameters, in the optimizer's order; without
            those that this record leaves out.
        forms: names, dtypes, devices, shapes and strides of all tensors that ``layout`` lays out.
        layout: layout of the record.
        outline: outline of the copies; None if they must be planned each time.
        are_cast: some gradient has another dtype than its parameter.
    """

    members: Sequence[tuple[str, torch.Tensor]]
    forms: Sequence[Any] = ()
    layout: ShardLayout | None = None
    outline: Sequence[_Outline] | None = None
    are_cast: bool = False


class _Outline(NamedTuple):
    """Batch without its tensors, all of which are in host memory in row-major order.

    Attributes:
        begin: offset of the batch in the record, in bytes.
        end: end of the batch, in bytes.
        names: names of the tensors.
        skip: bytes of the first tensor that belong to the previous batch.
    """

    begin: int
    end: int
    names: tuple[str, ...]
    skip: int


_Gradients = Sequence[tuple[str, torch.Tensor, Any]]
"""Names of gradients in the record, parameters, and gradients (of a DTensor this rank's shard)."""


class InputReader:
    """Collect the inputs that the optimizers of a state are about to consume.

    Args:
        state: state with the optimizers.
        lossy_ratio: share of large elements kept in lossy copies of gradients
            (:mod:`everstep.compress.lossy`); None for exact gradients.
        sparse: record means that ranks exchanged in compressed form in that form.

    Raises:
        OptionError: a Compressor belongs to an optimizer that is not in the state.
    """

    def __init__(
        self, state: State, *, lossy_ratio: float | None = None, sparse: bool = False
    ) -> None:
        self._state = state
        self._lossy_ratio = lossy_ratio
        self._compressors = compressors_of(state)
        self._exchanges = exchanges_of(state) if sparse else []
        self._warned_mean_changed = False
        self._groupings: dict[str, Grouping] = {}
        self._checked_options: dict[str, Any] = {}  # by optimizer
        self._last: dict[tuple[str, frozenset[str] | None], _LastInputs] = {}
        self._layouts = Layouts()

    def regroup(self) -> Mapping[str, Grouping]:
        """Return the current parameter groups of all optimizers; later changes are relative
        to these."""
        self._groupings = groupings_of(self._state)
        self._last = {}
        self._checked_options = {}
        return self._groupings

    def grouped_as_before(self, key: str | None = None) -> bool:
        """Return True if an optimizer (None: each of them) has the same groups of the same
        parameters."""
        return all(
            grouping.holds(self._state.optimizers[other])
            for other, grouping in self._groupings.items()
            if key in (None, other)
        )

    @property
    def groupings(self) -> Mapping[str, Grouping]:
        """Return the parameter groups of all optimizers; the same object until :meth:`regroup`."""
        return self._groupings or self.regroup()

    def members(
        self, key: str, only: frozenset[str] | None = None
    ) -> Sequence[tuple[str, torch.Tensor]]:
        """Return the gradients' names in a record and the parameters that :meth:`look`
        collects from."""
        return self._last_inputs(key, only).members

    def look(self, key: str, only: frozenset[str] | None = None) -> UpdateInputs:
        """Collect the inputs of the next update of the optimizer ``key``, whose groups are
        unchanged.

        Args:
            key: key of the optimizer.
            only: names of the parameters to collect; None for all.

        Raises:
            UnsupportedStateError: no record can hold them.
        """
        if not self._groupings:
            self.regroup()
        optimizer = require_eager(key, self._state.optimizers[key])
        self._check_options(key, optimizer)
        last = self._last_inputs(key, only)
        present = [(name, p, _local_gradient(p)) for name, p in last.members if p.grad is not None]
        tensors = self._gradient_tensors(key, present)
        kind = type(local_optimizer(optimizer))
        written = writes_gradients(kind, optimizer.param_groups)
        groups = _hyperparameters(optimizer, tensors.others)
        for name in _SCALER:
            value = getattr(optimizer, name, None)
            if isinstance(value, torch.Tensor):
                tensors.others[name] = value.detach()
                written = True  # a fused kernel divides the gradients in place
        if written:
            _refuse_shared_memory(tensors.plain)
        forms = _forms(tensors.plain) + _forms(tensors.others)
        named = {**tensors.plain, **tensors.others}
        layout = last.layout
        if layout is None or forms != last.forms:
            _refuse_gaps(optimizer, named)
            last.are_cast = any(gradient.dtype != p.dtype for _, p, gradient in present)
            layout = self._layouts.of(named)
            last.forms = forms
            last.layout = layout
            last.outline = None
        # For every update, not only for new forms: the check depends on the momentum, which may
        # change.
        if last.are_cast:
            _refuse_other_dtypes(kind, optimizer, present)
        about: dict[str, Any] = {
            "optimizer": key,
            "kind": kind_name(kind),
            "groups": groups,
            "default_dtype": DTYPE_CODES.get(torch.get_default_dtype()),
        }
        if tensors.compressed:
            about["compressed"] = tensors.compressed
        if any("lossy" in fields for fields in tensors.compressed.values()):
            about["lossy"] = True
        batches = _batches(last, layout, named)
        in_host_memory = all(tensor.is_cpu for tensor in named.values())
        return UpdateInputs(about, layout, batches, in_host_memory, written, named)

    def _gradient_tensors(self, key: str, present: _Gradients) -> _GradientTensors:
        """Return the gradients as the record holds them: plain, compressed, or as lossy copies.

        Raises:
            UnsupportedStateError: a gradient cannot be recorded.
        """
        compact = self._compressed_forms(key, present)
        lossy = self._lossy(present, compact)
        found = _GradientTensors({}, {}, {})
        for name, parameter, gradient in present:
            bare = name.removeprefix(GRADIENT)
            form = compact.get(id(parameter)) if compact else None
            if form is not None and not has_gaps(gradient):
                found.compressed[bare] = form_entries(bare, gradient, form, found.others)
                continue
            if lossy and (copy := lossy.get(id(parameter))) is not None:
                found.compressed[bare] = lossy_entries(bare, gradient, copy, found.others)
                continue
            if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
                raise _unsupported_gradient(bare, parameter)
            if gradient.is_conj() or gradient.is_neg():
                gradient = gradient.resolve_conj().resolve_neg()
            found.plain[name] = gradient.detach() if gradient.requires_grad else gradient
        return found

    def _check_options(self, key: str, optimizer: Optimizer) -> None:
        """Refuse options that would have been refused at the start: a program may set them at any
        time, and so may a restored base."""
        present = replay_options(optimizer)
        if present != self._checked_options.get(key):
            refuse_options(key, optimizer)
            self._last.clear()  # equal forms were checked for other options
            self._checked_options[key] = present

    def _last_inputs(self, key: str, only: frozenset[str] | None) -> _LastInputs:
        last = self._last.get((key, only))
        if last is None:
            groups = self._state.optimizers[key].param_groups
            parameters = (parameter for group in groups for parameter in group["params"])
            named = zip(self._groupings[key].names, parameters, strict=True)
            chosen = [(GRADIENT + n, p) for n, p in named if only is None or n in only]
            if len(self._last) >= _LAST_MAX:
                self._last.clear()
            last = self._last[(key, only)] = _LastInputs(chosen)
        return last

    def _lossy(self, present: _Gradients, compact: Mapping[int, Any]) -> Mapping[int, Lossy]:
        """Return lossy copies of gradients, by ``id(parameter)``; empty if exact ones are
        recorded."""
        if self._lossy_ratio is None:
            return {}
        found = {id(p): grad for _, p, grad in present if type(grad) is torch.Tensor}
        found = {of: grad for of, grad in found.items() if of not in compact}
        return lossy_copies(found, self._lossy_ratio)

    def _compressed_forms(self, key: str, present: _Gradients) -> Mapping[int, Any]:
        """Return the gradients that training consumes in compressed form, by ``id(parameter)``."""
        compressor = self._compressors.get(key)
        if compressor is not None:
            if not compressor.is_last:
                compressor.check()
            return {key: form for key, form in compressor.last.items() if form is not None}
        found = {}
        for exchange in self._exchanges:
            for name, parameter, _ in present:
                if exchange.last.get(id(parameter)) is None:
                    continue
                form = found[id(parameter)] = exchange.form_of(parameter)
                if form is None and not self._warned_mean_changed:
                    self._warned_mean_changed = True
                    _log.warning(
                        "everstep: the gradient of %s differs from the exchanged one by more than "
                        "a factor: such gradients are recorded uncompressed",
                        name.removeprefix(GRADIENT),
                    )
        return found


class _GradientTensors(NamedTuple):
    """Gradients of an update as its record holds them.

    Attributes:
        plain: dense gradients, by name in the record.
        others: tensors of compressed gradients, and later of hyperparameters, by name.
        compressed: description of each compressed gradient, by parameter name.
    """

    plain: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]
    compressed: dict[str, Any]


def _hyperparameters(optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Return the options of each parameter group; tensors among them are added to ``tensors``."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k != "params"}
        groups.append(split(options, f"{HYPER}/{number}", tensors))
    return groups


def _forms(named: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return names, dtypes, devices, shapes and strides: equal forms have equal layouts and
    copies."""
    forms: list[Any] = []
    for name, tensor in named.items():
        forms += name, tensor.dtype, tensor.device, tensor.shape, tensor.stride()
    return forms


def _batches(
    last: _LastInputs, layout: ShardLayout, named: Mapping[str, torch.Tensor]
) -> Sequence[Batch]:
    """Return the copies of an update's inputs, from the last outline if there is one."""
    if last.outline is not None:
        return [_batch(outline, named) for outline in last.outline]
    batches = plan_batches(layout, named, named.keys())
    last.outline = _outlines(layout, batches)
    return batches


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


def _local_gradient(parameter: torch.Tensor) -> Any:
    """Return a parameter's gradient; of a DTensor this rank's shard."""
    gradient: Any = parameter.grad
    if type(gradient) is not torch.Tensor and is_dtensor(gradient):
        return _local_shard(gradient, parameter)
    return gradient


def _local_shard(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's shard of a gradient, or None if it is not placed as its parameter is.

    An update would then redistribute it, which needs the other ranks."""
    if not _share_mesh(gradient, parameter):
        return None
    same = gradient.placements == parameter.placements  # type: ignore[attr-defined]
    return local_tensor(gradient) if same else None


def _share_mesh(gradient: Any, parameter: Any) -> bool:
    both = is_dtensor(gradient) and is_dtensor(parameter)
    return both and gradient.device_mesh == parameter.device_mesh


def _refuse_gaps(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> None:
    if not any(group.get("fused") for group in optimizer.param_groups):
        return
    for name, tensor in named.items():
        if name.startswith(GRADIENT) and has_gaps(tensor):
            gradient = f"the gradient of {name.removeprefix(GRADIENT)}"
            raise UnsupportedStateError(
                f"{gradient} has gaps between its elements in memory, which a fused kernel also "
                "reads; it cannot be logged",
                leaves=((name.removeprefix(GRADIENT), "a gradient with gaps"),),
                hint="gradient.contiguous(), or fused=False",
            )


def _refuse_shared_memory(gradients: Mapping[str, torch.Tensor]) -> None:
    """Refuse gradients in common memory, for an optimizer that writes to its gradients.

    torch accumulates the writes for all parameters in that one memory; replay has a separate
    gradient for each parameter."""
    if len(set(map(_address_of, gradients.values()))) == len(gradients):
        return
    first: dict[int, str] = {}
    for name, gradient in gradients.items():
        bare = name.removeprefix(GRADIENT)
        other = first.setdefault(gradient.data_ptr(), bare)
        if other != bare and gradient.numel():
            raise UnsupportedStateError(
                f"the gradients of {other} and {bare} share memory, which this optimizer writes "
                "to during its update (foreach SGD with nesterov, a scaler's fused kernel); they "
                "cannot be logged",
                leaves=((bare, "a gradient that shares memory with another one"),),
                hint="use gradient.clone(), or foreach=False",
            )


def _refuse_other_dtypes(
    kind: type[Optimizer],
    optimizer: Optimizer,
    present: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
) -> None:
    """Refuse gradients whose dtype differs from their parameter's, where replay would not be exact.

    ``Tensor.grad_dtype`` allows such gradients. torch computes with the gradient's dtype, replay
    with the parameter's. Both give the same result only if the gradient goes straight into a wider
    parameter; a moment has the gradient's dtype."""
    plain = kind is SGD and not any(group["momentum"] for group in optimizer.param_groups)
    for name, parameter, gradient in present:
        if gradient.dtype == parameter.dtype:
            continue
        if not (plain and is_widening(gradient.dtype, parameter.dtype)):
            bare = name.removeprefix(GRADIENT)
            description = f"a gradient of {gradient.dtype} for a parameter of {parameter.dtype}"
            raise UnsupportedStateError(
                f"{bare} has {description}; it cannot be logged",
                leaves=((bare, description),),
                hint='use method="lazy", or do not set grad_dtype',
            )


def _unsupported_gradient(name: str, parameter: Any) -> UnsupportedStateError:
    gradient = parameter.grad
    description = "not a plain dense tensor"
    hint = "a dense gradient"
    if _share_mesh(gradient, parameter):
        present = ", ".join(map(repr, gradient.placements))
        mine = ", ".join(map(repr, parameter.placements))
        description = f"placed as {present}, but its parameter as {mine}"
        hint = "p.grad = p.grad.redistribute(placements=p.placements) before optimizer.step()"
    return UnsupportedStateError(
        f"the gradient of {name} is {description}; it cannot be logged",
        leaves=((name, f"a gradient that is {description}"),),
        hint=f'use method="lazy", or {hint}',
    )


class RankInputReader:
    """Select the inputs of updates that this rank records (``docs/design/ranks.md``).

    DDP's ranks all consume the same gradients, so each records only a share of them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._groupings: Mapping[str, Grouping] | None = None
        self._shared_entries: Mapping[str, Mapping[str, LogShare]] = {}
        self._own: dict[str, frozenset[str]] = {}
        self._last: dict[str, tuple[list[str], list[Any]]] = {}

    def look(
        self, consumption: InputReader, key: str
    ) -> tuple[UpdateInputs, str, Mapping[str, Any]]:
        """Collect this rank's share of the inputs of the next update of the optimizer ``key``.

        Returns:
            The inputs, and the name and value of the object of their record.

        Raises:
            UnsupportedStateError: no record can hold them.
        """
        if self._groupings is not consumption.groupings:
            self._regroup(consumption.groupings)
        own = self._own.get(key)
        consumed = consumption.look(key, own)
        if own is None:
            return consumed, UPDATE_OBJECT, consumed.about
        about = {**consumed.about, "shared": self._shared(consumption, key)}
        if resting := [n for n, p in consumption.members(key, own) if p.grad is None]:
            about["resting"] = [name.removeprefix(GRADIENT) for name in resting]
        if isinstance(self._state.providers[key], ZeroProvider):
            about["spread"] = True
        return consumed, PART_OBJECT, about

    def _regroup(self, groupings: Mapping[str, Grouping]) -> None:
        self._shared_entries = log_shares(self._state)
        self._groupings = groupings
        self._own = {}
        self._last = {}
        me = self._state.ranks.rank
        for key, parts in self._shared_entries.items():
            names = groupings[key].names
            mine = [n for n in names if (part := parts.get(n)) is None or part.owner == me]
            self._own[key] = frozenset(mine)

    def _shared(self, consumption: InputReader, key: str) -> list[Any]:
        """Describe the gradients that several ranks consume, for each set of ranks.

        Returns:
            Ranks, digest of the names of all of their gradients, and names of those in this rank's
            record.
        """
        parts = self._shared_entries[key]
        members = [(n.removeprefix(GRADIENT), p) for n, p in consumption.members(key)]
        names = [n for n, p in members if n in parts and p.grad is not None]
        last = self._last.get(key)
        if last is not None and last[0] == names:
            return last[1]
        me = self._state.ranks.rank
        names_by_ranks = dict[tuple[int, ...], list[str]]()
        for part in parts.values():
            names_by_ranks.setdefault(part.ranks, [])
        for name in names:
            names_by_ranks[parts[name].ranks].append(name)
        shared: list[Any] = [
            [list(ranks), names_digest(found), [n for n in found if parts[n].owner == me]]
            for ranks, found in sorted(names_by_ranks.items())
        ]
        self._last[key] = names, shared
        return shared


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


class LoggableUpdates(Participant):
    """Find out whether the first updates could be logged.

    Args:
        report: called once, with the reason why an update cannot be logged; empty if all can.
        known: such a reason, which an earlier start has found; it is reported again, as later
            starts read the events of the newest starts only.
    """

    follows_updates = True

    def __init__(self, state: State, report: Callable[[str], None], known: str = "") -> None:
        self._state = state
        self._report = report
        self._known = known
        self._checked: dict[str, int] = {}
        self._steps = 0
        self._is_over = False

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """Check the gradients of an update."""
        count = self._checked.get(key, 0)
        if self._is_over or self._known or count == _CHECKED_UPDATES:
            return
        self._checked[key] = count + 1
        try:
            InputReader(self._state).look(key)
        except EverstepError as error:
            self._end(" ".join(error.message.split()))

    def mark(self, mark: Mark) -> bool:
        """End the check some steps after each optimizer has made an update."""
        every_one = self._checked and self._checked.keys() >= self._state.optimizers.keys()
        if self._is_over:
            return False
        if self._known:
            self._end(self._known)
        elif every_one:
            self._steps += 1
            if self._steps == _CHECKED_STEPS:
                self._end(self._why_encoded())
        return False

    def _why_encoded(self) -> str:
        try:
            self._state.survey()  # which finds out
            refuse_encoded(self._state)
        except EverstepError as error:
            return " ".join(error.message.split())
        return ""

    def _end(self, why_not: str) -> None:
        self._is_over = True
        self._report(why_not)
