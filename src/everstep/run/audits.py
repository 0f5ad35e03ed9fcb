"""What audits have said of the bases that a state descends from. Without I/O, and without torch."""

from __future__ import annotations

from everstep.commit.lineage import BaseId, history
from everstep.format.records import AuditRecord
from everstep.run.scan import Inventory

__all__ = ["NAMES_MAX", "audit_of", "describe_audit"]

NAMES_MAX = 20
"""Entries that the record of an audit names, at most."""

_NAMES_IN_WORDS = 5


def audit_of(inventory: Inventory, state: BaseId) -> AuditRecord | None:
    """The audit that a state rests on: of the bases in its history, the newest that was found
    different, else the newest that was audited at all (I9).

    Args:
        state: its timeline and step; there need not be a base.
    """
    limits = dict(history(state.timeline, inventory.branches))
    limits[state.timeline] = state.step
    found: list[AuditRecord] = []
    for base in sorted(inventory.bases, key=lambda base: base.id):
        limit = limits.get(base.id.timeline, -1)
        if base.audit is not None and (limit is None or base.id.step <= min(limit, state.step)):
            found.append(base.audit)
    wrong = [record for record in found if record.verdict == "different"]
    return max(wrong or found, key=lambda one: (one.step, one.timeline), default=None)


def describe_audit(record: AuditRecord) -> str:
    """One line for people: which bases, how many steps, and whether they agree."""
    before = record.before[1]
    steps = f"{record.steps} step{'' if record.steps == 1 else 's'}"
    if record.verdict == "unchecked":
        return f"not audited: base {record.step}: {record.reason}"
    log = f"base {before} + log of {steps}"
    told = f"audited: {log} = base {record.step}, bit for bit, {record.entries} entries"
    if record.verdict == "different":
        told = f"audit failed: {log} is not base {record.step}"
    if record.count:
        shown = record.differing[:_NAMES_IN_WORDS]
        more = record.count - len(shown)
        told += f": {record.count} of {record.entries} entries differ: "
        told += ", ".join(map(repr, shown)) + (f" and {more} more" if more else "")
    return told + (f" ({record.reason})" if record.reason else "")
