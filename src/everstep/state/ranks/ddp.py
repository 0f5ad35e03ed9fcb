"""Parameters inside of DistributedDataParallel, which its ranks keep equal.

Optimizer steps that would make replicas diverge are refused before they change anything.

Order of DistributedDataParallel's buckets, which decides in which order gradients are summed.

DDP begins with buckets in the order of the parameters. The second forward of a process rebuilds
them, permanently, in the order in which the first backward made gradients ready on the first rank
of the group. With more than two ranks, the order of summation of an element depends on its place in
a bucket: a resumed process with initial buckets would take its first step with other last bits than
an uninterrupted one. So that order is part of the state, per rank, and is restored before the first
step.

To restore it, all ranks of a DDP rehearse a backward together. Each parameter is marked as ready in
the reducer, in the recorded order, while gradients are None or zero, so that zeros are summed. Then
the buckets are rebuilt as the next forward would do it. No operator of the model runs and nothing
is accumulated: hooks on parameters are not called, no random number is drawn, and gradients are put
back.

The rehearsal prevents a second difference. With ``gradient_as_bucket_view=True`` a gradient that is
a view of a bucket is divided by the number of ranks, and one that is not (the first) is multiplied
by its reciprocal, which gives the same bits for powers of two only.

Private names of torch are used, because there are no public ones. If a version of torch lacks them,
or a rehearsal is not possible, the notes of the recovery mention it, and it is not called exact.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import distributed, nn

from everstep.errors import UnsupportedStateError
from everstep.state.guards import canonical_key
from everstep.state.layout.entries import RESERVED
from everstep.state.providers import ModuleProvider, RestorePlan, SectionProvider, named_parameters
from everstep.state.providers.provider import Saved
from everstep.state.survey import SectionContents
from everstep.state.values.objects import Encoded, encode
from everstep.state.values.tree import find_referrers

if TYPE_CHECKING:
    from everstep.state.training_state import State


def ddp_replicas(module: nn.Module) -> tuple[tuple[int, ...] | None, frozenset[str]]:
    """Return the ranks that keep a module's parameters equal, and the keys of the parameters
    that DDP ignores."""
    ddp = find_ddp(module)
    if ddp is None:
        return None, frozenset()
    ranks = tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group)))
    # DDP has the names that torch uses, with the prefixes of wrappers inside the module.
    return ranks, frozenset(map(canonical_key, ddp.parameters_to_ignore))


def find_ddp(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP wrapper, which may be compiled, or in Lightning Fabric's; None if there is
    none."""
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        inner = getattr(module, "_forward_module", getattr(module, "_orig_mod", None))
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


def reduced_parameter_ids(ddp: nn.parallel.DistributedDataParallel) -> set[int]:
    """Return the ``id()`` of each parameter whose gradients a DDP reduces."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return {id(parameter) for name, parameter in named if name not in ignored}


# Weak keys: a DDP that the program has dropped is not kept alive.
_UNREDUCED: WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]] = WeakKeyDictionary()


def _unreduced(ddp: nn.parallel.DistributedDataParallel) -> tuple[nn.Parameter, ...]:
    """Return parameters whose gradients a DDP never reduces because they were frozen when it was
    made; without those that it was told to ignore."""
    if ddp not in _UNREDUCED:
        ignored = ddp.parameters_to_ignore
        inside = [p for name, p in ddp.module.named_parameters() if name not in ignored]
        reduced = _reduced_by(ddp, len(inside))
        found = () if reduced is None else tuple(p for p in inside if id(p) not in reduced)
        _UNREDUCED[ddp] = found
    return _UNREDUCED[ddp]


def _reduced_by(ddp: Any, count: int) -> set[int] | None:
    """Return ids of the parameters in DDP's reducer; None: all ``count`` of them."""
    if ddp._get_ddp_logging_data()["num_parameter_tensors"] == count:
        return None
    # This allocates gradients of zeros for a moment, but only for a partly frozen model.
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}


_LOCAL_SGD = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def refuse_divergent_updates(state: State, gate: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``gate``, preceded by a check that refuses updates that would make DDP replicas
    diverge.

    One rank writes replicated state for all ranks. Once ranks consume different gradients their
    replicas differ, and a base would mix them. So such an update is refused before anything has
    changed. Detected are optimizer steps within ``no_sync()``, uneven inputs (``Join``), local
    SGD (``post_localSGD_hook``) and layers that were frozen when DDP was made; gradients that the
    program changes after DDP has reduced them are not.
    """
    if state.ranks.world == 1:
        return gate
    found = [(key, p.outer) for key, p in state.providers.items() if isinstance(p, ModuleProvider)]
    ddps = [(section, ddp) for section, module in found if (ddp := find_ddp(module)) is not None]
    if not ddps:
        return gate
    updated: dict[tuple[str, int], list[tuple[str, Any, list[nn.Parameter]]]] = {}

    def look(key: str) -> None:
        groups = state.optimizers[key].param_groups
        # Looked up once, as this runs before each update; add_param_group() makes it look again.
        if (at := (key, len(groups))) not in updated:
            theirs = {id(parameter) for group in groups for parameter in group["params"]}
            updated[at] = [
                (section, ddp, [p for p in _unreduced(ddp) if id(p) in theirs])
                for section, ddp in ddps
                if not theirs.isdisjoint(reduced_parameter_ids(ddp))
            ]
        for section, ddp, unreduced in updated[at]:
            if (why := _divergence(ddp, unreduced)) is not None:
                raise UnsupportedStateError(
                    f'the ranks would diverge: "{section}" is in '
                    f"DistributedDataParallel, and {why}; nothing was updated",
                    leaves=((section, why),),
                    rank=state.ranks.rank,
                    hint=f'put {{"{section}": ddp.module}} into the state: then each rank saves it',
                )
        gate(key)

    return look


def _divergence(
    ddp: nn.parallel.DistributedDataParallel, unreduced: Sequence[nn.Parameter]
) -> str | None:
    if not ddp.require_backward_grad_sync:
        return "its optimizer is called within no_sync()"
    join: Any = ddp._join_config
    if join.enable and not join.throw_on_early_termination:
        return (
            "inputs may be uneven (Join): a rank that runs out makes fewer updates (with "
            "throw_on_early_termination=True it ends the step of all)"
        )
    if any(parameter.grad is not None for parameter in unreduced):
        return (
            "it does not reduce the gradients of parameters that were frozen when it was made: "
            "make it again after unfreezing them"
        )
    hooks = sys.modules.get(_LOCAL_SGD)  # not imported: not in use
    if hooks is not None and any(
        isinstance(kept, hooks.PostLocalSGDState) for _, kept in ddp._comm_hooks
    ):
        return "its gradients are reduced within groups of ranks only (post_localSGD_hook)"
    return None


_log = logging.getLogger("everstep")

BUCKETS_SECTION = f"{RESERVED}/ddp"

_RANKS_MIN = 3  # two ranks sum to the same bits in any order
_SAMPLED = 10  # iterations of which DDP's logger notes each; later it notes few of them
_STATELESS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_REASONS = {
    "unknown": "this version of torch does not report the order of its buckets",
    "unsaved": "the base does not have the order of its buckets",
    "static": "with static_graph=True its first two backwards cannot be rehearsed",
    "sparse": "it expects sparse gradients",
    "hook": "it has a communication hook, which would be called",
    "cap": "bucket_cap_mb, or the number of parameters, has changed",
    "first": "the base was saved with initial buckets, and this process has rebuilt them",
    "frozen": "other parameters require a gradient than when it was made",
    "other": "this process has rebuilt its buckets in another order",
}


@dataclass(frozen=True, slots=True)
class _Order:
    """Order of the parameters in the buckets of a DDP, by their numbers in its reducer.

    Attributes:
        rebuilt: the buckets have been rebuilt; otherwise the next forward will do that.
        numbers: empty before the first backward; None if unknown.
    """

    rebuilt: bool
    numbers: tuple[int, ...] | None


class DDPBuckets(SectionProvider):
    """Provider of the bucket order of all DDPs that train parameters of a state, for more than two
    ranks.

    A DDP is identified by the name of its first parameter.

    Args:
        providers: all other providers, by section.
    """

    section = BUCKETS_SECTION

    def __init__(self, providers: Mapping[str, SectionProvider]) -> None:
        self._providers = providers
        self._known: dict[str, weakref.ref[nn.parallel.DistributedDataParallel]] = {}
        self._saved: Mapping[str, Any] = {}
        self._wanted: dict[str, tuple[int, ...]] = {}  # orders to rehearse
        self._missed: bool | None = False  # None: not searched for yet
        self._part: SectionContents | None = None  # once nothing of it changes any more
        self._find()

    @property
    def are_saved(self) -> bool:
        """True if there is a DDP that rebuilds its buckets."""
        return any(_rebuilds(ddp) for _, ddp in self._ddps())

    def collect(self) -> dict[str, Any]:
        return {name: _record(ddp) for name, ddp in self._ddps() if _rebuilds(ddp)}

    def look(self) -> SectionContents:
        if self._part is not None:
            return self._part  # the usual case
        part = SectionContents((), Encoded(encode(self.collect(), self.section)))
        orders = (_order_of(ddp) for _, ddp in self._ddps() if _rebuilds(ddp))
        if all(order.rebuilt for order in orders):
            self._part = part
        return part

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        return RestorePlan(saved.tree)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        # Only noted here: the rehearsal is collective, and begins after all ranks have restored.
        self._saved = tree if isinstance(tree, dict) else {}
        return []

    def settle(self, *, as_many: bool) -> tuple[str, ...]:
        """Decide which DDPs this rank rehearses for the state that was restored last.

        Args:
            as_many: the state was saved by the same number of ranks. Another number sums to other
                last bits in any case.

        Returns:
            Reasons why the next step may differ from that of an uninterrupted training.
        """
        self._wanted = {}
        self._missed = None if as_many else False
        self._find()
        doubts = list[str]()
        for name, ddp in self._ddps() if as_many else ():
            why = self._settle(name, ddp)
            if why is not None:
                self._wanted.pop(name, None)
                doubts.append(
                    f"the next step may sum the gradients of {name!r} and the other parameters in "
                    "its DistributedDataParallel in another order than an uninterrupted training, "
                    f"with other last bits: {_REASONS[why]}"
                )
        return tuple(doubts)

    def _settle(self, name: str, ddp: nn.parallel.DistributedDataParallel) -> str | None:
        """Decide for one DDP; return a key of ``_REASONS``, or None without doubts."""
        divides = _lost_its_views(ddp)
        if not _rebuilds(ddp):
            if not divides:
                return None
            if _count(ddp) != _trained_count(ddp):
                return "frozen"
            self._wanted[name] = tuple(range(_count(ddp)))
            return _rehearsal_obstacle(ddp)
        saved = self._saved.get(name)
        live = _record(ddp)
        order = _order_of(ddp)
        if not isinstance(saved, dict) or saved.get("order") is None:
            return "static" if ddp.static_graph and saved is not None else "unsaved"
        if order.numbers is None:
            return "unknown"
        if [saved.get(key) for key in ("caps", "count")] != [live["caps"], live["count"]]:
            return "cap"
        wanted = tuple(map(int, saved["order"]))
        if order.numbers and order.numbers != wanted:
            return "other" if wanted else "first"
        if not wanted or (order.numbers and not divides):
            return None
        if sorted(wanted) != list(range(live["count"])):
            return "unsaved"
        self._wanted[name] = wanted
        return _rehearsal_obstacle(ddp)

    def rehearsals(self) -> list[list[Any]]:
        """Return the DDPs that this rank will rehearse, for the other ranks: name and ranks of
        the group of each."""
        return [[n, _ranks(ddp)] for n, ddp in self._ddps() if n in self._wanted]

    def rebuild(self, said: Sequence[Collection[Any]]) -> list[str]:
        """Rehearse DDPs for which all ranks of the group are ready. All ranks must call it.

        Args:
            said: :meth:`rehearsals` of all ranks, by rank.

        Returns:
            Descriptions of the DDPs that are not in the recorded order.

        Raises:
            RuntimeError: from torch's backends, if a rank has failed.
        """
        lost = list[str]()
        for name, ddp in list(self._ddps()):
            ranks = _ranks(ddp)
            if name not in self._wanted:
                continue
            if not all([name, ranks] in said[rank] for rank in ranks):
                lost.append(f"not all ranks can restore the order of the buckets of {name!r}")
                continue
            rehearse(ddp, self._wanted[name])
            if _rebuilds(ddp) and _order_of(ddp) != _Order(True, self._wanted[name]):
                lost.append(f"the buckets of {name!r} are not in the recorded order")
        self._wanted = {}
        self._part = None
        return lost

    def missed(self) -> bool:
        """Return True if a DDP that rebuilds its buckets was made after the state was restored;
        warn once.

        Call it after a step.
        """
        if self._missed is None:
            before = set(self._known)
            self._find()
            late = [n for n, ddp in self._ddps() if n not in before and _rebuilds(ddp)]
            self._missed = bool(late)
            if late:
                _log.warning(
                    "everstep: the DistributedDataParallel of %r was made after resume(): its "
                    "first step may have summed gradients in another order than an uninterrupted "
                    "training, so bases from now on are not called exact\n"
                    "  hint: make it before the Checkpointer",
                    late[0],
                )
        return self._missed

    def _ddps(self) -> Iterator[tuple[str, nn.parallel.DistributedDataParallel]]:
        for name, reference in self._known.items():
            if (ddp := reference()) is not None:
                yield name, ddp

    def _find(self) -> None:
        """Find new DDPs: in modules of the state, and around them, since a state often has the
        wrapped module instead of the DDP."""
        if not distributed.is_available() or not distributed.is_initialized():
            return
        if distributed.get_world_size() < _RANKS_MIN:
            return
        names = {id(parameter): name for name, parameter in named_parameters(self._providers)}
        kind = nn.parallel.DistributedDataParallel
        modules = [p.outer for p in self._providers.values() if isinstance(p, ModuleProvider)]
        inside: list[Any] = [m for outer in modules for m in outer.modules() if isinstance(m, kind)]
        around: list[Any] = []
        if names.keys() - {id(parameter) for one in inside for parameter in one.parameters()}:
            around = _ddps_around(modules, kind)
        for one in (*around, *inside):  # the latter are those that count
            first = next((names[id(p)] for p in one.module.parameters() if id(p) in names), None)
            if (
                first is None
                or one.process_group.size() < _RANKS_MIN
                or not hasattr(one, "reducer")
            ):
                continue
            if not getattr(one, "_use_python_reducer", False):
                self._known[first] = weakref.ref(one)


def _ddps_around(modules: Sequence[nn.Module], kind: type) -> list[Any]:
    """Return the DDPs that contain one of the modules, at any depth."""
    found: list[Any] = []
    seen: set[int] = set()
    while modules:
        # A module has another one in the dict of its modules, which is in its own dict.
        parents = find_referrers(modules, nn.Module, depth=3)
        new = [one for one in parents if id(one) not in seen]
        seen.update(map(id, new))
        found += [one for one in new if kind in type(one).__mro__]
        modules = [one for one in new if kind not in type(one).__mro__]
    return found


def _rebuilds(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Return True if a DDP rebuilds its buckets, and its sums depend on that."""
    if any(_gathers(kept) for _, kept in getattr(ddp, "_comm_hooks", ())):
        return False
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def _gathers(kept: object) -> bool:
    """Return True if a hook sums in the order of ranks, regardless of the buckets."""
    loaded = sys.modules.get("everstep.compress.ddp")  # not imported: not in use
    return loaded is not None and isinstance(kept, loaded.DDPCompression)


def _record(ddp: Any) -> dict[str, Any]:
    """Return the saved record of a DDP."""
    numbers = _order_of(ddp).numbers
    caps = [*getattr(ddp, "bucket_bytes_cap_list", ())]
    return {
        "order": None if numbers is None else np.array(numbers, np.int32),
        "caps": [int(getattr(ddp, "bucket_bytes_cap", 0)), *map(int, caps)],
        "count": _count(ddp),
    }


def _count(ddp: Any) -> int:
    """Return the number of parameters in the reducer; -1 if torch does not report it."""
    try:
        return int(ddp._get_ddp_logging_data()["num_parameter_tensors"])
    except (AttributeError, KeyError, RuntimeError):
        return -1


def _order_of(ddp: Any) -> _Order:
    try:
        about = ddp._get_ddp_logging_data()
        if about.get("has_rebuilt_buckets") != 1:
            # Otherwise the statistics are those before the last forward.
            ddp.logger.set_runtime_stats_and_log()
            about = ddp._get_ddp_logging_data()
        if about.get("has_rebuilt_buckets") == 1:
            return _Order(True, _numbers(about["rebuilt_per_bucket_param_indices"]))
        if about.get("iteration", 0) >= (1 if ddp.static_graph else _SAMPLED):
            return _Order(False, None)  # of a static graph the first backward has no order
        return _Order(False, _numbers(about.get("prev_iteration_grad_ready_order_indices", "")))
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return _Order(False, None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.replace(",", " ").split()))


def _trained_count(ddp: nn.parallel.DistributedDataParallel) -> int:
    """Return the number of parameters that require a gradient now."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return sum(one.requires_grad and name not in ignored for name, one in named)


def _ranks(ddp: nn.parallel.DistributedDataParallel) -> list[int]:
    return sorted(distributed.get_process_group_ranks(ddp.process_group))


def _lost_its_views(ddp: Any) -> bool:
    """Return True if restored gradients are not views of buckets as they were before.

    The next backward would then multiply by the reciprocal of the number of ranks instead of
    dividing by it.
    """
    size = ddp.process_group.size()
    # For a power of two, division and multiplication by the reciprocal give the same bits.
    if not ddp.gradient_as_bucket_view or not size & (size - 1) or _hooks(ddp):
        return False
    gradients = (parameter.grad for parameter in ddp.module.parameters())
    return any(one is not None and not one._is_view() for one in gradients)


def _rehearsal_obstacle(ddp: Any) -> str | None:
    """Return a key of ``_REASONS``; None if a rehearsal is possible."""
    if ddp.static_graph:
        return "static"
    tables = (m for m in ddp.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    if any(table.sparse for table in tables):
        return "sparse"
    if any(not _is_stateless(hook) for hook in _hooks(ddp)):
        return "hook"
    try:
        reducer = ddp.reducer
        _ = ddp.logger.set_runtime_stats_and_log
        _ = reducer._autograd_hook, reducer._rebuild_buckets, reducer.prepare_for_backward
        _ = reducer.prepare_for_forward
    except AttributeError:
        return "unknown"
    return None


def _hooks(ddp: Any) -> list[object]:
    """Return the communication hooks: one built into torch by its name, and None for the one
    that the first forward registers if optimizers update within backward."""
    found: list[object] = [hook for hook, _ in getattr(ddp, "_comm_hooks", ())]
    built_in = ddp._get_ddp_logging_data().get("comm_hook", "")
    within = any(hasattr(one, "_in_backward_optimizers") for one in ddp.module.parameters())
    return found or ([built_in] if built_in else []) or ([None] if within else [])


def _is_stateless(hook: Any) -> bool:
    """Return True for a hook of torch without state between steps."""
    if isinstance(hook, str):
        return True
    known = getattr(hook, "__module__", "") == _STATELESS
    return known and "." not in getattr(hook, "__qualname__", ".")


class _MarkReady(torch.autograd.Function):
    """Autograd node whose backward marks parameters as ready in a reducer, in a given order.

    The parameters are inputs, for a reducer that searches the graph for them, and get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, reducer: Any, order: Any, *_: Any) -> torch.Tensor:
        ctx.reducer = reducer
        ctx.order = order
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        for number in ctx.order:
            ctx.reducer._autograd_hook(number)
        return (None,) * len(ctx.needs_input_grad)


def rehearse(ddp: Any, order: Sequence[int]) -> None:
    """Run a backward that is reduced like any other, and adds nothing to any gradient."""
    reducer = ddp.reducer
    parameters = list(ddp.module.parameters())
    reducer._rebuild_buckets()  # for a previous backward, as any forward does
    gradients = [parameter.grad for parameter in parameters]
    views = bool(ddp.gradient_as_bucket_view)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        there = views and gradient is not None  # only existing gradients become views
        parameter.grad = torch.zeros_like(gradient) if there else None
    try:
        # A program may call resume() in inference mode or without gradients.
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that all parameters are used
            start = torch.zeros((), device=ddp.device, requires_grad=True)
            trained = (parameter for parameter in parameters if parameter.requires_grad)
            apply: Any = _MarkReady.apply
            end = apply(start, reducer, order, *trained)
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([end])
            torch.autograd.backward(end, inputs=[start])
        reducer._rebuild_buckets()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            view = parameter.grad
            if gradient is None or view is None or not views:
                parameter.grad = gradient
            else:  # the gradient is now a view of its bucket, as in every backward but the first
                view.detach().copy_(gradient)
