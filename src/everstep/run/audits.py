"""Audits of the bases that a state descends from. No I/O and no torch."""

from __future__ import annotations

from everstep.commit.lineage import BaseId, history
from everstep.format.records import AuditRecord
from everstep.run.scan import Inventory

NAMES_MAX = 20
"""Maximum number of entries that an audit record names."""

_NAMES_IN_WORDS = 5


def audit_of(inventory: Inventory, state: BaseId) -> AuditRecord | None:
    """Return the audit that a state rests on.

    Of the bases in its history, this is the newest audit that found a difference, else the newest
    audit (I9).

    Args:
        state: timeline and step of the state; there need not be a base of it.
    """
    limits = dict(history(state.timeline, inventory.branches))
    # Later steps of the same timeline are not among the ancestors of the state.
    limits[state.timeline] = state.step
    found: list[AuditRecord] = []
    for base in sorted(inventory.bases, key=lambda base: base.id):
        limit = limits.get(base.id.timeline, -1)
        if base.audit is not None and (limit is None or base.id.step <= min(limit, state.step)):
            found.append(base.audit)
    # A difference is inherited: an equal audit after it only shows that replay repeats the wrong
    # state.
    wrong = [record for record in found if record.verdict == "different"]
    return max(wrong or found, key=lambda one: (one.step, one.timeline), default=None)


def describe_audit(record: AuditRecord) -> str:
    """Return one line for the user: the bases, the number of steps, and the verdict."""
    before = record.before[1]
    steps = f"{record.steps} step{'' if record.steps == 1 else 's'}"
    if record.verdict == "unchecked":
        return f"not audited: base {record.step}: {record.reason}"
    log = f"base {before} + log of {steps}"
    text = f"audited: {log} = base {record.step}, bit for bit, {record.entries} entries"
    if record.verdict == "different":
        text = f"audit failed: {log} is not base {record.step}"
    if record.count:
        shown = record.differing[:_NAMES_IN_WORDS]
        more = record.count - len(shown)
        text += f": {record.count} of {record.entries} entries differ: "
        text += ", ".join(map(repr, shown)) + (f" and {more} more" if more else "")
    return text + (f" ({record.reason})" if record.reason else "")
