"""Choice of a base and of the log steps to replay. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.commit import BaseId
from everstep.commit.job.offers import recovery_hint
from everstep.commit.lineage import describe_missing_steps
from everstep.errors import RecoveryError
from everstep.run import BaseFound, Chain, Inventory, Skipped
from everstep.run.chain import LogIndex, chains, path_of
from everstep.run.scan import Candidates, candidates


@dataclass(frozen=True, slots=True)
class Reachable:
    """Bases to try, best first, each with the log steps to replay on it."""

    ordered: tuple[tuple[BaseFound, Chain], ...]
    candidates: Candidates


def reachable(inventory: Inventory, index: LogIndex, *, step: int | None = None) -> Reachable:
    """Return the ways to the newest step along the history of the newest timeline, or to a given
    step.

    Args:
        step: in any timeline: that of the history first, then younger ones. The caller has to
            report a step outside the history (:func:`everstep.commit.lineage.describe_abandoned`).

    Raises:
        RecoveryError: no base and no log has ``step``.
    """
    if not index.marks:
        chosen = candidates(inventory, step=step)
        return Reachable(tuple((base, Chain(base.id, (), "")) for base in chosen.ordered), chosen)
    # Not restricted to ``step``: the log may lead to it from a base before it.
    everything = candidates(inventory)
    usable = {b.id: b for b in inventory.bases if b.is_usable}
    lsns: dict[BaseId, tuple[int, str | None]] = {}
    for base in usable.values():
        assert base.manifest is not None
        own = index.marks.get((base.id.timeline, base.id.step))  # for the shape digest
        lsns[base.id] = (base.manifest.markers[0].lsn, None if own is None else own.shape)
    if step is None:
        found = _newest_first(inventory, index, lsns, everything)
    else:
        found = _leading_to(step, inventory, index, lsns)
    return Reachable(tuple((usable[chain.base], chain) for chain in found), everything)


def _newest_first(
    inventory: Inventory,
    index: LogIndex,
    lsns: Mapping[BaseId, tuple[int, str | None]],
    everything: Candidates,
) -> list[Chain]:
    """Return the ways along the current history, farthest first."""
    here = {base.id for base in everything.ordered}
    known = {key: value for key, value in lsns.items() if key in here}
    path = path_of(_trained(inventory, index), inventory.timelines) if known else []
    found = chains(known, index, path)
    there = {chain.base for chain in found}
    # Bases outside every recorded history are still offered, after the others.
    found += [Chain(key, (), "") for key in known if key not in there]
    # Of several ways to one end, the newest base is tried first, as the least must be replayed on
    # it.
    return sorted(found, key=lambda chain: (chain.end, chain.base), reverse=True)


def _leading_to(
    step: int,
    inventory: Inventory,
    index: LogIndex,
    lsns: Mapping[BaseId, tuple[int, str | None]],
) -> list[Chain]:
    """Return the ways to a step in any timeline.

    Raises:
        RecoveryError: there are none.
    """
    ordered: dict[BaseId, Chain] = {}
    early = {key: value for key, value in lsns.items() if key.step <= step}
    for timeline in current_first(inventory, index):
        path = path_of(timeline, inventory.timelines)
        cut = [_cut(chain, step) for chain in chains(early, index, path)]
        for chain in sorted(cut, key=lambda chain: chain.base, reverse=True):
            if chain.end[1] == step:
                # The first timeline that leads there is that of the current history, if it has the
                # step.
                ordered.setdefault(chain.base, chain)
    for key in sorted(lsns, reverse=True):  # outside every history, but of this step
        if key.step == step:
            ordered.setdefault(key, Chain(key, (), ""))
    if ordered:
        return list(ordered.values())
    raise RecoveryError(
        f"neither a base nor the log has step {step}",
        step=step,
        path=inventory.path,
        hint="existing steps: " + (_listed(lsns, index, inventory) or "none"),
    )


def nothing_restorable(
    inventory: Inventory,
    chosen: Reachable,
    skipped: Sequence[Skipped],
    *,
    step: int | None,
    apart: bool = False,
) -> RecoveryError | None:
    """Return the error to raise if none of the choices can be restored; None if there was never
    anything, so training may start afresh.

    Args:
        skipped: choices tried, with the reasons.
        apart: a base fits the live state incompletely, and the log after it does not.
    """
    had = (
        None
        if step is not None
        else describe_missing_steps(inventory.timelines, inventory.branches)
    )
    if not chosen.ordered and not chosen.candidates.damaged and had is None:
        return None
    listed = "\n".join(f"  step {s.step}, timeline {s.timeline}: {s.reason}" for s in skipped)
    hint = "everstep verify lists the damage; resume(step=0) starts from scratch"
    if apart:
        steps = sorted({base.id.step for base in inventory.bases if base.is_usable})
        hint = f"strict=False can restore steps of bases only: {', '.join(map(str, steps))}"
        hint += "; any other step needs the model and the optimizer of that time"
    of_step = f"no base and no log after one leads to step {step}"
    problem = "bases exist, but none can be used" if step is None else of_step
    if not chosen.ordered and not chosen.candidates.damaged:
        usable = (base.id for base in inventory.bases if base.is_usable)
        problem = had or problem
        hint = recovery_hint(sorted(usable, reverse=True))
    message = f"{problem}:\n{listed}" if listed else problem
    return RecoveryError(message, path=inventory.path, hint=hint)


def current_first(inventory: Inventory, index: LogIndex) -> list[int]:
    """Return all timelines: first the one whose history is current, then from young to old.

    The current one is not the newest if nobody trained on that and its fork point is lost.
    """
    numbers = sorted(inventory.branches, reverse=True)
    # False sorts before True, and the sort is stable.
    return sorted(numbers, key=_trained(inventory, index).__ne__) if numbers else []


def _trained(inventory: Inventory, index: LogIndex) -> int:
    """Return the newest timeline that has a log, or whose place in the history its record
    proves."""
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
    # Steps after the requested one are not reported as lost.
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
