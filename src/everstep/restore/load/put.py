"""Puts a state that lies in host memory into live objects, by name, or leaves them untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from everstep.errors import MismatchError
from everstep.restore.load.targets import Targets
from everstep.restore.load.ties import sharing_values
from everstep.state.layout.entries import Entry
from everstep.state.providers.gradients import forget_gradients
from everstep.state.providers.modules import ModuleProvider
from everstep.state.training_state import State
from everstep.state.values.tree import join

__all__ = ["put_into"]


def put_into(
    state: State,
    trees: Mapping[str, Any],
    entries: Mapping[str, Entry],
    tensors: Mapping[str, torch.Tensor],
    *,
    step: int,
    takes: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Restore all parts of ``state`` and return what could not be taken back, in words.

    Args:
        trees: object trees of the parts that the state has.
        entries: of whole tensors, by every name that the trees use.
        tensors: their values on the host, by the names of the entries.
        step: for the error.
        takes: says which entries of modules are restored; other parts are restored whole.

    Raises:
        MismatchError: listing every difference in names, shapes or dtypes; nothing was touched.
    """
    modules = {name for name, one in state.providers.items() if isinstance(one, ModuleProvider)}
    chosen = {
        section: {key: value for key, value in tree.items() if takes(f"{section}/{key}")}
        if section in modules and isinstance(tree, dict)
        else tree
        for section, tree in trees.items()
    }
    plans = state.plan_restore(chosen, entries)
    mismatches = tuple(
        (name, what)
        for section, plan in plans.items()
        for name, what in plan.mismatches
        if section not in modules or name == section or takes(name)
    )
    targets = None if mismatches else Targets.of(plans, entries)
    if targets is not None:
        mismatches = tuple(sharing_values(targets, entries, tensors))
    if mismatches or targets is None:
        listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
        raise MismatchError(
            f"the checkpoint and the objects of into= differ in {len(mismatches)} place(s):\n"
            f"{listed}",
            mismatches=mismatches,
            step=step,
            hint="build the same objects, and give the modules that an optimizer trains along with "
            "it; load() without into= gives what is there",
        )
    for name, (memory, box) in targets.memory.items():
        whole = tensors[entries[name].name]
        for dim, (begin, size) in enumerate(zip(box.offset, memory.shape, strict=False)):
            whole = whole.narrow(dim, begin, size)
        with torch.no_grad():
            memory.copy_(whole)
    made = targets.finish()
    notes = list[str]()
    for section in state.restore_order():
        plan = plans[section]
        provider = state.providers[section]
        partly = section in modules and len(plan.tree) < len(trees[section])
        notes += provider.restore(join(plan.tree, made), strict=not partly)
    return notes + forget_gradients(state.stateful, state.optimizers.values())
