"""Recording of updates in the log: layouts of records, forms of gradients, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim import Optimizer

from everstep.compress.compressor import Compressor
from everstep.compress.lossy import Lossy
from everstep.compress.quantized import Int8
from everstep.compress.sparse import Sparse
from everstep.errors import OptionError, UnsupportedStateError
from everstep.format import BasePlan
from everstep.format.log import RecordHead
from everstep.link.capture import shard_offsets
from everstep.link.pool import BlockKeeper
from everstep.replay.exactness import options_refusal, refusal
from everstep.state.layout import OBJECT_PREFIX, Entry, Placed, ShardLayout
from everstep.state.layout.entries import INDICES, INT8, SCALES, VALUES, shape_digest
from everstep.state.layout.shards import LRUCache, plan_shards
from everstep.state.providers import OptimizerProvider, local_optimizer
from everstep.state.survey import Shape, Survey, same_objects
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tensors import tensor_entry
from everstep.state.values.tree import references

if TYPE_CHECKING:
    from everstep.compress.ddp import DDPCompression


class LogKeeper(BlockKeeper, Protocol):
    """Receiver of log records: the keeper process, or a keeper thread in this process."""

    def log(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """Accept a log record that is complete in the arena."""
        ...

    def forget_log(self, upto: int) -> None:
        """Drop records up to ``upto``: their memory is about to be reused."""
        ...

    def log_to_disk(self, on: bool) -> None:
        """Switch writing the log of later steps to disk on or off."""
        ...


_SPARSE = "SparseAdam consumes sparse gradients, and a log holds dense ones"


def record_layout(entries: Iterable[Entry]) -> ShardLayout:
    """Return the layout of a record: sorted by dtype within a width, so that each dtype is
    contiguous."""
    ordered = sorted(entries, key=lambda entry: entry.dtype)
    # Without a limit of the header: a record is never split into several shards.
    (layout,) = plan_shards(ordered, header_bytes_max=1 << 62)
    return layout


@dataclass(slots=True)
class Layouts:
    """Layouts of records, cached by everything that they depend on."""

    found: LRUCache[Any, ShardLayout] = field(default_factory=LRUCache)

    def of(self, named: Mapping[str, torch.Tensor]) -> ShardLayout:
        """Return the layout of a record of these tensors.

        The key holds the complete forms of the tensors: a gradient may have other strides or
        another dtype than in the previous step, and fused kernels read memory in its order.
        """
        key = tuple((name, t.shape, t.dtype, t.stride()) for name, t in named.items())
        layout = self.found.get(key)
        if layout is None:
            layout = record_layout([tensor_entry(name, tensor) for name, tensor in named.items()])
            self.found.add(key, layout, len(layout.placed))
        return layout


class Grouping:
    """Assignment of an optimizer's parameters to its groups.

    Attributes:
        groups: names of the parameters of each group.
    """

    def __init__(self, provider: OptimizerProvider, optimizer: Optimizer) -> None:
        self.groups = provider.groups()
        self._members = [list(group["params"]) for group in optimizer.param_groups]

    @property
    def names(self) -> Iterator[str]:
        """Names of all parameters, in order."""
        return chain.from_iterable(self.groups)

    def holds(self, optimizer: Optimizer) -> bool:
        """Return True if the groups still hold the same parameters in the same order."""
        groups = optimizer.param_groups
        return len(groups) == len(self._members) and all(
            same_objects(group["params"], members)
            for group, members in zip(groups, self._members, strict=True)
        )


class ReplacedTensors:
    """Detects tensors that were put in place of those that replay would update.

    Loading a state or swapping parameters does that; torch's own optimizers update in place. (For
    values written in place see :mod:`.untracked_writes`.)

    Args:
        state: state whose optimizers are watched.
    """

    def __init__(self, state: State) -> None:
        self._in_place = {
            key
            for key, optimizer in state.optimizers.items()
            if type(local_optimizer(optimizer)).__module__.startswith("torch.optim.")
        }
        self.start(None)

    def start(self, survey: Survey | None) -> None:
        """Start from a survey of a restored state; None if nothing is recorded."""
        self._entries: object = None
        self._names: tuple[str, ...] = ()
        self._tensors: Mapping[str, torch.Tensor] = {}
        if survey is not None:
            self.since(survey)

    def since(self, survey: Survey) -> str | None:
        """Return the name of a tensor replaced since the last call; None if the structure
        changed, too."""
        shape = survey.shape
        before = self._tensors
        self._tensors = now = survey.tensors
        if shape.entries is not self._entries:
            self._entries = shape.entries
            owners = shape.owners.items()
            self._names = tuple(
                name
                for name, owner in owners
                if owner.kind == "replayed" and owner.optimizer in self._in_place
            )
            return None
        # The usual case: an unchanged survey returns the same mapping.
        if now is before:
            return None
        return next((name for name in self._names if now[name] is not before[name]), None)


def require_eager(key: str, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose update is in progress.

    Raises:
        UnsupportedStateError: its step is compiled: it runs other kernels than replay does.
    """
    if torch.compiler.is_compiling():
        why = "its step() is compiled, and replay runs torch's own"
        raise UnsupportedStateError(
            f"the updates of {key} cannot be replayed from a log: {why}",
            leaves=((key, why),),
            hint='call optimizer.step() outside of what is compiled, or method="lazy"',
        )
    return optimizer


def compressors_of(state: State) -> dict[str, Compressor]:
    """Return the Compressors among the values of a state, by the key of their optimizer.

    Raises:
        OptionError: the optimizer of one is not in the state.
    """
    keys = {id(optimizer): key for key, optimizer in state.optimizers.items()}
    found = {}
    for name, value in state.values.items():
        if isinstance(value, Compressor):
            key = keys.get(id(value.optimizer))
            if key is None:
                raise OptionError(
                    f"{name}: the optimizer of this Compressor is not in the state",
                    hint="put both into the state dict",
                )
            found[key] = value
    return found


def exchanges_of(state: State) -> list[DDPCompression]:
    """Return the DDP communication hooks among the values of a state that compress their means."""
    # Not imported here: if the module is not loaded, no value can be of its class.
    loaded = sys.modules.get("everstep.compress.ddp")
    if loaded is None:
        return []
    return [value for value in state.values.values() if isinstance(value, loaded.DDPCompression)]


def groupings_of(state: State) -> dict[str, Grouping]:
    """Return the current grouping of each optimizer, by key."""
    found = {}
    for key, optimizer in state.optimizers.items():
        provider = state.providers[key]
        assert isinstance(provider, OptimizerProvider)
        found[key] = Grouping(provider, optimizer)
    return found


def state_digest(shape: Shape, groupings: Mapping[str, Grouping]) -> str:
    """Return the digest of a state's structure, as its log records carry it."""
    groups = {key: grouping.groups for key, grouping in groupings.items()}
    return shape_digest(shape.entries, shape.aliases, groups)


def form_entries(
    name: str, gradient: torch.Tensor, form: Sparse | Int8, named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Add the tensors of a compressed form to ``named``; return its other fields."""
    fields: dict[str, Any] = {
        "shape": tuple(gradient.shape),
        "stride": None if gradient.is_contiguous() else tuple(gradient.stride()),
    }
    if isinstance(form, Sparse):
        named[INDICES + name] = form.indices
        named[VALUES + name] = form.values
        return {**fields, "counts": (form.indices.numel(),)}
    named[INT8 + name] = form.values
    named[SCALES + name] = form.scales
    return {**fields, "dtype": form.dtype}


def lossy_entries(
    name: str, gradient: torch.Tensor, copy: Lossy, named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Add the tensors of a lossy copy to ``named``; return its other fields, as
    :func:`form_entries`."""
    fields = form_entries(name, gradient, copy.form, named)
    return {**fields, "dtype": copy.dtype, "lossy": True, "exponent": copy.exponent}


def replay_refusal(optimizer: Optimizer) -> str | None:
    """Return why this optimizer's updates cannot be replayed; None if they can.

    Of parameters that are sharded over ranks (or over one), each rank replays its own shards.
    """
    if type(optimizer) is torch.optim.SparseAdam:
        return _SPARSE
    return refusal(optimizer, parts=True)


def replay_options(optimizer: Optimizer) -> list[tuple[bool, ...]]:
    """Return the options of the groups that :func:`refuse_options` depends on, for comparison.

    Called in each step, so it does little more than look-ups.
    """
    return [
        (
            bool(fused := group.get("fused")),
            bool(fused and group.get("momentum")),
            bool(group.get("capturable")),
            bool(group.get("differentiable")),
        )
        for group in optimizer.param_groups
    ]


def refuse_options(key: str, optimizer: Optimizer) -> None:
    """Refuse updates that cannot be replayed with the current options of the groups.

    Checks less than :func:`replay_refusal`: within a step, wrappers such as accelerate's may have
    replaced ``step()`` of the optimizer for a moment.

    Raises:
        UnsupportedStateError: an option rules out replay.
    """
    # The inner optimizer takes over the options of the outer one when it updates.
    kind = type(local_optimizer(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        if why := options_refusal(kind, group, group["params"]):
            raise UnsupportedStateError(
                f"group {number} of {key} now has options that rule out replay of a log: {why}",
                leaves=((key, why),),
                hint='restore them, or use method="lazy", which needs no log',
            )


def refuse_optimizers(state: State, log: str) -> None:
    """Refuse a state whose updates cannot be replayed from a log.

    Raises:
        UnsupportedStateError: an optimizer cannot be replayed, for the given reason, or it trains
            parameters that are not in the state, which replay would need (weight decay reads them).
        OptionError: ``log="topk"``, and an optimizer has neither a Compressor nor compressed
            gradients.
    """
    optimizers = state.optimizers
    found = [
        (key, why) for key, o in optimizers.items() if (why := replay_refusal(local_optimizer(o)))
    ]
    if found:
        listed = "\n".join(f"  {key}: {why}" for key, why in found)
        raise UnsupportedStateError(
            f"the updates of {len(found)} optimizer(s) cannot be replayed from a log:\n{listed}",
            leaves=tuple(found),
            hint='method="lazy" needs no log',
        )
    if unsaved := {**state.coverage.unsaved_frozen, **state.coverage.unsaved}:
        key, names = next(iter(unsaved.items()))
        raise UnsupportedStateError(
            f"the updates of {key!r} cannot be replayed from a log: {len(names)} parameter(s) that "
            f"it trains are not in the state ({', '.join(names[:3])})",
            leaves=tuple((key, name) for name in names),
            hint='add the module or the tensors to the state; method="lazy" needs no log',
        )
    if log != "topk":
        return
    exchanges = exchanges_of(state)
    compressed = compressors_of(state)
    dense = [
        key
        for key, optimizer in sorted(optimizers.items())
        if key not in compressed and not _is_exchanged(optimizer, exchanges)
    ]
    if dense:
        raise OptionError(
            f'log="topk" records compressed training; there is no Compressor of {dense}',
            hint='add {"compressor": everstep.compress.Compressor(optimizer), ...} to the state, '
            'or the DDPCompression that is DDP\'s hook, or use method="logged"',
        )


def refuse_encoded(state: State) -> None:
    """Refuse optimizers whose ``state_dict()`` has another form than their state.

    Raises:
        UnsupportedStateError: the last survey has found some.
    """
    if encoded := state.coverage.encoded:
        keys = ", ".join(map(repr, encoded))
        raise UnsupportedStateError(
            f"the state_dict() of {keys} encodes the optimizer's state (with a state_dict hook "
            "or in a subclass): the log of its updates cannot be replayed without the optimizer "
            "itself",
            leaves=tuple((key, "encoded optimizer state") for key in encoded),
            hint='method="lazy" needs no log',
        )


def _is_exchanged(optimizer: Optimizer, exchanges: Sequence[DDPCompression]) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any(one.has(parameter) for one in exchanges for parameter in parameters)


def tensor_hyperparameters(
    plan: BasePlan, memory: memoryview, objects: Mapping[str, bytes]
) -> dict[str, tuple[Entry, memoryview]]:
    """Return the hyperparameters of all optimizers that are tensors, by entry name.

    A step mark carries them for replay: a scheduler may have changed them since the last update.

    Args:
        memory: memory block of a base.
        objects: encoded objects of the same step.
    """
    aliases: dict[str, str] = {}
    places: dict[str, tuple[Placed, int]] = {}
    for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
        aliases.update(shard.aliases)
        places |= {place.entry.name: (place, offset) for place in shard.layout.placed}
    found: dict[str, tuple[Entry, memoryview]] = {}
    for name, encoded in objects.items():
        tree: Any = decode(encoded) if name.startswith(OBJECT_PREFIX) else None
        if OptimizerProvider.groups_of(tree) is None:
            continue
        for reference in references(tree["param_groups"]):
            place, offset = places[aliases.get(reference, reference)]
            data = memory[offset + place.begin : offset + place.end]
            found[place.entry.name] = place.entry, data
    return found


def pack_tensors(tensors: Mapping[str, tuple[Entry, memoryview]]) -> tuple[ShardLayout, bytes]:
    """Lay entries out as the data of a record."""
    layout = record_layout(entry for entry, _ in tensors.values())
    return layout, b"".join(tensors[place.entry.name][1] for place in layout.placed)
