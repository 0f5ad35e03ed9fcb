"""What of an update can be recorded, and how: layouts, forms of gradients, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim import Optimizer

from everstep.compress.lossy import Lossy
from everstep.compress.quantized import Int8
from everstep.compress.sparse import Sparse
from everstep.compress.training import Compressor
from everstep.errors import EverstepError, OptionError, UnsupportedStateError
from everstep.format.log import RecordHead
from everstep.replay.exactness import options_refusal, refusal
from everstep.state.layout.entries import Entry, shape_digest
from everstep.state.layout.lru import LRUCache
from everstep.state.layout.names import INDICES, INT8, SCALES, VALUES
from everstep.state.layout.shards import ShardLayout, plan_shards
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import local_optimizer
from everstep.state.survey.survey import Shape, Survey, same_objects
from everstep.state.training_state import State
from everstep.state.values.tensors import tensor_entry

if TYPE_CHECKING:
    from everstep.compress.ddp import DDPCompression

__all__ = [
    "Grouping",
    "Layouts",
    "LogKeeper",
    "ReplacedTensors",
    "compressors_of",
    "exchanges_of",
    "form_entries",
    "groupings_of",
    "lossy_entries",
    "record_layout",
    "refuse_optimizers",
    "refuse_options",
    "replay_options",
    "replay_refusal",
    "require_eager",
    "state_digest",
]


class LogKeeper(Protocol):
    """Takes records: the keeper process, or a keeper in this one.

    Attributes:
        lost: why it is gone, if it is: it writes nothing any more.
    """

    lost: EverstepError | None

    @property
    def moves(self) -> int:
        """Changes as long as a base that is being written gets anywhere."""
        ...

    @property
    def log_moves(self) -> int:
        """Changes as long as the log gets anywhere."""
        ...

    def log(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """A record lies whole in the arena."""
        ...

    def forget_log(self, upto: int) -> None:
        """The memory of records up to this number is going to be used again."""
        ...

    def log_to_disk(self, on: bool) -> None:
        """Records of the steps from now on are written to disk, too; or they are not."""
        ...


_SPARSE = "SparseAdam consumes sparse gradients, and a log holds dense ones"


def record_layout(entries: Iterable[Entry]) -> ShardLayout:
    """The layout of a record: by dtype within a width, so that each dtype lies in one piece."""
    ordered = sorted(entries, key=lambda entry: entry.dtype)
    (layout,) = plan_shards(ordered, header_bytes_max=1 << 62)
    return layout


@dataclass(slots=True)
class Layouts:
    """Layouts of records, by all that they depend on."""

    found: LRUCache[Any, ShardLayout] = field(default_factory=LRUCache)

    def of(self, named: Mapping[str, torch.Tensor]) -> ShardLayout:
        """The layout of a record of these tensors.

        Nothing less than their forms will do as a key: a gradient may have other strides or
        another dtype than in the step before, and fused kernels read it as it lies in memory.
        """
        key = tuple((name, t.shape, t.dtype, t.stride()) for name, t in named.items())
        layout = self.found.get(key)
        if layout is None:
            layout = record_layout([tensor_entry(name, tensor) for name, tensor in named.items()])
            self.found.add(key, layout, len(layout.placed))
        return layout


class Grouping:
    """How an optimizer groups its parameters.

    Attributes:
        groups: names of the parameters of each group.
    """

    def __init__(self, provider: OptimizerProvider, optimizer: Optimizer) -> None:
        self.groups = provider.groups()
        self._members = [list(group["params"]) for group in optimizer.param_groups]

    @property
    def names(self) -> Iterator[str]:
        """Of all parameters, in their order."""
        return chain.from_iterable(self.groups)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the groups are the same parameters as they were, in the same order."""
        groups = optimizer.param_groups
        return len(groups) == len(self._members) and all(
            same_objects(group["params"], members)
            for group, members in zip(groups, self._members, strict=True)
        )


class ReplacedTensors:
    """Notices tensors that were put in the place of those that replay would update: a state that
    was loaded, parameters that were swapped. torch's own optimizers update in place, so that was
    somebody else. (Values that were written in place are for :mod:`.untold`.)

    Args:
        state: whose optimizers they belong to.
    """

    def __init__(self, state: State) -> None:
        self._in_place = {
            key
            for key, optimizer in state.optimizers.items()
            if type(local_optimizer(optimizer)).__module__.startswith("torch.optim.")
        }
        self.start(None)

    def start(self, survey: Survey | None) -> None:
        """Everything was restored, and surveyed then; None: nothing is recorded."""
        self._entries: object = None
        self._names: tuple[str, ...] = ()
        self._tensors: Mapping[str, torch.Tensor] = {}
        if survey is not None:
            self.since(survey)

    def since(self, survey: Survey) -> str | None:
        """The name of one that was replaced since the last call; None where the shape is another,
        too."""
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
        if now is before:  # mostly
            return None
        return next((name for name in self._names if now[name] is not before[name]), None)


def require_eager(key: str, optimizer: Optimizer) -> Optimizer:
    """The optimizer whose update is under way.

    Raises:
        UnsupportedStateError: its step is compiled: other kernels than those that replay runs.
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
    """The Compressors among the values of a state, by the key of their optimizer.

    Raises:
        OptionError: one is of an optimizer that is not in the state.
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
    """The communication hooks among the values of a state whose means are compressed."""
    loaded = sys.modules.get("everstep.compress.ddp")  # not loaded: nobody uses it
    if loaded is None:
        return []
    return [value for value in state.values.values() if isinstance(value, loaded.DDPCompression)]


def groupings_of(state: State) -> dict[str, Grouping]:
    """How each optimizer groups its parameters now, by its key."""
    found = {}
    for key, optimizer in state.optimizers.items():
        provider = state.providers[key]
        assert isinstance(provider, OptimizerProvider)
        found[key] = Grouping(provider, optimizer)
    return found


def state_digest(shape: Shape, groupings: Mapping[str, Grouping]) -> str:
    """What a state consists of, in the digest that its records carry."""
    groups = {key: grouping.groups for key, grouping in groupings.items()}
    return shape_digest(shape.entries, shape.aliases, groups)


def form_entries(
    name: str, gradient: torch.Tensor, form: Sparse | Int8, named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Adds the tensors of a form to ``named``; returns the rest of it."""
    about: dict[str, Any] = {
        "shape": tuple(gradient.shape),
        "stride": None if gradient.is_contiguous() else tuple(gradient.stride()),
    }
    if isinstance(form, Sparse):
        named[INDICES + name] = form.indices
        named[VALUES + name] = form.values
        return {**about, "counts": form.counts}
    named[INT8 + name] = form.values
    named[SCALES + name] = form.scales
    return {**about, "dtype": form.dtype}


def lossy_entries(
    name: str, gradient: torch.Tensor, copy: Lossy, named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """:func:`form_entries` of a lossy copy."""
    about = form_entries(name, gradient, copy.form, named)
    return {**about, "dtype": copy.dtype, "lossy": True, "exponent": copy.exponent}


def replay_refusal(optimizer: Optimizer) -> str | None:
    """Why no record of this optimizer's updates could be replayed; None if one can. Of parameters
    that are spread over ranks, be it over one, each replays its own part."""
    if type(optimizer) is torch.optim.SparseAdam:
        return _SPARSE
    return refusal(optimizer, parts=True)


def replay_options(optimizer: Optimizer) -> list[tuple[bool, ...]]:
    """What of the options of its groups :func:`refuse_options` goes by, to be compared: in each
    step, so little more than look-ups."""
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
    """Not by all that :func:`replay_refusal` goes by: within a step wrappers may have put another
    ``step()`` on the optimizer for a moment (accelerate's).

    Raises:
        UnsupportedStateError: updates with the options that its groups have now cannot be replayed.
    """
    kind = type(
        local_optimizer(optimizer)
    )  # which takes over the outer one's options as it updates
    for number, group in enumerate(optimizer.param_groups):
        if why := options_refusal(kind, group, group["params"]):
            raise UnsupportedStateError(
                f"group {number} of {key} has options now with which no log can be replayed: {why}",
                leaves=((key, why),),
                hint='set them back, or method="lazy", which needs no log',
            )


def refuse_optimizers(state: State, log: str) -> None:
    """Raises:
    UnsupportedStateError: an optimizer whose updates cannot be replayed, with the reason; or one
        that trains what no base has: weight decay, say, reads that.
    OptionError: ``log="topk"``, and one has no Compressor, nor a parameter of which compressed
        gradients are exchanged.
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
            f"it trains are in no part of the state ({', '.join(names[:3])})",
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
            hint='{"compressor": everstep.compress.Compressor(optimizer), ...} in the state, or '
            'the DDPCompression that is DDP\'s hook, or method="logged"',
        )


def _is_exchanged(optimizer: Optimizer, exchanges: Sequence[DDPCompression]) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return any(one.has(parameter) for one in exchanges for parameter in parameters)
