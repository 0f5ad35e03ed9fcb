"""Which base and how much of the log to take for a step. Without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.commit.job.nothing import way_back
from everstep.commit.lineage import BaseId, had_steps
from everstep.errors import RecoveryError
from everstep.run.candidates import Candidates, Skipped, candidates, newest_unreachable
from everstep.run.chain import Chain, LogIndex, chains, path_of
from everstep.run.scan import BaseFound, Inventory

__all__ = ["Reachable", "current_first", "nothing_restorable", "reachable"]


@dataclass(frozen=True, slots=True)
class Reachable:
    """Bases to try, best first, each with the steps of the log to redo on it."""

    ordered: tuple[tuple[BaseFound, Chain], ...]
    candidates: Candidates


def reachable(inventory: Inventory, index: LogIndex, *, step: int | None = None) -> Reachable:
    """What can be restored: the newest step along the history of the newest timeline, or one
    particular step.

    Args:
        step: in any timeline, that of the history first, then the younger ones; who takes one that
            is not of the history has to say so (:func:`everstep.commit.lineage.left_at`).

    Raises:
        RecoveryError: no base and no log has ``step``.
    """
    if not index.marks:
        chosen = candidates(inventory, step=step)
        return Reachable(tuple((base, Chain(base.id, (), "")) for base in chosen.ordered), chosen)
    everything = candidates(inventory)
    usable = {b.id: b for b in inventory.bases if b.is_usable}
    lsns: dict[BaseId, tuple[int, str | None]] = {}
    for base in usable.values():
        assert base.manifest is not None
        own = index.marks.get((base.id.timeline, base.id.step))  # what the state consists of there
        lsns[base.id] = (base.manifest.markers[0].lsn, None if own is None else own.shape)
    if step is None:
        here = {base.id for base in everything.ordered}
        known = {key: value for key, value in lsns.items() if key in here}
        path = path_of(_trained(inventory, index), inventory.timelines) if known else []
        found = chains(known, index, path)
        there = {chain.base for chain in found}
        # In no history that its records tell, but not to be hidden either.
        found += [Chain(key, (), "") for key in known if key not in there]
        found.sort(key=lambda chain: (chain.end, chain.base), reverse=True)
        return Reachable(tuple((usable[chain.base], chain) for chain in found), everything)
    ordered: dict[BaseId, Chain] = {}
    for timeline in current_first(inventory, index):
        path = path_of(timeline, inventory.timelines)
        early = {key: value for key, value in lsns.items() if key.step <= step}
        cut = [_cut(chain, step) for chain in chains(early, index, path)]
        for chain in sorted(cut, key=lambda chain: chain.base, reverse=True):
            if chain.end[1] == step and chain.base not in ordered:
                ordered[chain.base] = chain
    for key in sorted(lsns, reverse=True):  # in no history: a base of this very step all the same
        if key.step == step:
            ordered.setdefault(key, Chain(key, (), ""))
    if not ordered:
        raise RecoveryError(
            f"neither a base nor the log has step {step}",
            step=step,
            path=inventory.path,
            hint="steps there are: "
            + (_listed(lsns, index, inventory) or "none")
            + ("" if (hidden := newest_unreachable(inventory)) is None else f"; {hidden.message}"),
        )
    return Reachable(tuple((usable[key], chain) for key, chain in ordered.items()), everything)


def nothing_restorable(
    inventory: Inventory,
    chosen: Reachable,
    skipped: Sequence[Skipped],
    *,
    step: int | None,
    apart: bool = False,
) -> RecoveryError | None:
    """Return what is said where nothing of what was chosen can be restored; None: there was
    nothing, and training may start afresh.

    Args:
        skipped: what was tried, and why it would not do.
        apart: a base fits the live state in part, and the log behind it does not.
    """
    if chosen.candidates.unreachable is not None:
        return chosen.candidates.unreachable.error()
    had = None if step is not None else had_steps(inventory.timelines, inventory.branches)
    if not chosen.ordered and not chosen.candidates.damaged and had is None:
        return None
    listed = "\n".join(f"  step {s.step}, timeline {s.timeline}: {s.reason}" for s in skipped)
    hint = "everstep verify names what is damaged; resume(step=0) starts from scratch"
    if apart:
        steps = sorted({base.id.step for base in inventory.bases if base.is_usable})
        hint = f"strict=False leads to steps of bases only: {', '.join(map(str, steps))}"
        hint += "; to any other the model and the optimizer that there were then"
    of_step = f"no base, nor the log behind one, gives step {step}"
    what = "there are bases, but none can be used" if step is None else of_step
    if not chosen.ordered and not chosen.candidates.damaged:
        usable = (base.id for base in inventory.bases if base.is_usable)
        what = had or what
        hint = way_back(sorted(usable, reverse=True))
    told = f"{what}:\n{listed}" if listed else what
    return RecoveryError(told, path=inventory.path, hint=hint)


def current_first(inventory: Inventory, index: LogIndex) -> list[int]:
    """All timelines: first the one whose history is the present one, then the younger ones. That is
    not the newest where nobody has trained on it, and what it forked from is gone."""
    numbers = sorted(inventory.branches, reverse=True)
    return sorted(numbers, key=_trained(inventory, index).__ne__) if numbers else []


def _trained(inventory: Inventory, index: LogIndex) -> int:
    """The newest timeline that its record puts where it is in the history, or that has a log."""
    branches = inventory.branches
    newest = max(branches)
    logged = {timeline for timeline, _ in index.marks}
    while (record := inventory.timelines[newest]) is not None and record.parent is not None:
        if newest in logged:
            break
        branch = branches[newest]
        if branch.fork_step is not None or branch.parent is None:
            break
        newest = branch.parent
    return newest


def _cut(chain: Chain, step: int) -> Chain:
    steps = tuple(item for item in chain.steps if item[1] <= step)
    return replace(chain, steps=steps, lost=None)


def _listed(
    lsns: Mapping[BaseId, tuple[int, str | None]], index: LogIndex, inventory: Inventory
) -> str:
    spans = set()
    for timeline in inventory.branches:
        for chain in chains(lsns, index, path_of(timeline, inventory.timelines)):
            spans.add((chain.base.step, chain.end[1]))
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in found[-20:])
