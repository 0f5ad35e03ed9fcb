"""The digest audit (I8): entries that nothing may have changed have not changed.

A base is captured behind the next step on the promise that only a registered optimizer (or
a declared update) writes to what it owns, and that both are seen. An optimizer step inside
a CUDA graph, or a write past torch, breaks the promise without a sign. The digests that are
computed anyway betray it: between two bases with no update in between, nothing that is
updated may differ; what was declared static may never differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.errors import AuditError
from everstep.format.plan import BasePlan
from everstep.format.writer import Written
from everstep.keeper.persist.persist import Audit

__all__ = ["DigestAudit", "digests_of"]


class DigestAudit:
    """Compares each base with the one before, of one timeline."""

    def __init__(self) -> None:
        self._lsn = -1
        self._digests: Mapping[str, str] = {}
        self._forms: Mapping[str, object] = {}

    def of(self, plan: BasePlan) -> Audit:
        """What to ask before a base is committed."""

        def audit(digests: Mapping[str, str]) -> None:
            forms = {
                place.entry.name: (place.entry.dtype, place.entry.shape)
                for shard in plan.shards
                for place in shard.layout.placed
                if place.entry.name in plan.kinds or place.entry.name not in shard.lsns
            }
            idle = plan.identity.lsn == self._lsn
            for name, kind in plan.kinds.items():
                same_form = self._forms.get(name) == forms.get(name)
                if not same_form or self._digests[name] == digests[name]:
                    continue
                if kind == "static":
                    raise AuditError(
                        f"{name!r} was declared static and has changed",
                        step=plan.identity.step,
                        hint="do not declare it static",
                    )
                if idle:
                    raise AuditError(
                        f"{name!r} has changed, but no update was seen since the base before: "
                        "something writes to it behind the optimizer's back",
                        step=plan.identity.step,
                        hint="call before_update() and after_update() around updates that go past "
                        'optimizer.step(), CUDA graphs among them, or use method="async"',
                    )
            self._lsn = plan.identity.lsn
            self._digests = digests
            self._forms = forms

        return audit


def digests_of(written: Sequence[Written]) -> dict[str, str]:
    """Of all entries of files that were written, by name."""
    return {name: digest for shard in written for name, digest in shard.digests.items()}
