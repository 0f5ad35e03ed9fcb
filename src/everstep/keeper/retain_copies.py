"""Retention of copies: the rules of the disk, in the operations of a tier.

Nothing is deleted unless a copy stays that was read back and found whole (``adr/005``). A copy is
deleted in two steps (``adr/004``): a record beside its manifest condemns it, where a resume sees
it; then the fence is looked at once more; then its files go.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.commit.lineage import BaseId
from everstep.commit.retention import plan_retention
from everstep.errors import DamageError, FencedError, StorageError
from everstep.format.names import CONDEMNED, MANIFEST, parse_marker
from everstep.format.writer import ChunkRing
from everstep.keeper.place import ROOT, CopyPlace
from everstep.recover.scan import BaseFound
from everstep.recover.verify import verify_base
from everstep.seams.progress import silent

__all__ = ["CopyRetention"]

_CHUNKS, _READERS = 3, 1


class CopyRetention:
    """Retention in one place.

    Args:
        keep: copies to keep.
        post: told of a copy that is damaged.
        timeout_s: of a single transfer.
    """

    def __init__(
        self,
        place: CopyPlace,
        keep: int,
        post: Callable[[DamageError], None],
        *,
        timeout_s: float,
    ) -> None:
        self._place = place
        self._keep = keep
        self._post = post
        self._timeout_s = timeout_s
        self._verified: set[BaseId] = set()
        self._damaged: set[BaseId] = set()
        self.deleted = 0

    def run(self) -> None:
        """Deletes what may go.

        Raises:
            FencedError: a newer timeline has been opened; the copy is whole and there as before.
            StorageError, DeadlineError
        """
        inventory = self._place.inventory()
        bases = {base.id: base for base in inventory.bases if base.status == "committed"}
        while True:
            plan = plan_retention(
                bases,
                inventory.branches,
                keep=self._keep,
                verified=self._verified,
                damaged=self._damaged,
            )
            if plan.verify is None:
                break
            self._read_back(bases[plan.verify])
        for victim in plan.delete:
            self._delete(bases[victim])
        for base in inventory.bases:  # of a process that died while it deleted
            if base.status == "condemned" and base.id.timeline <= self._place.timeline:
                self._place.check_fence()
                self._delete_files(base)

    def _delete(self, base: BaseFound) -> None:
        assert base.manifest is not None
        mark = _name(base, CONDEMNED)
        self._place.check_fence()
        self._place.create(mark, base.manifest.encode())
        try:
            self._place.check_fence()
        except FencedError:
            self._place.tier.delete(mark)
            raise
        self._delete_files(base)
        self._verified.discard(base.id)
        self._damaged.discard(base.id)
        self.deleted += 1

    def _delete_files(self, base: BaseFound) -> None:
        """Records first: with them gone nothing can be made of the rest. The mark last: until
        then it says what this was."""
        names = [file.name for file in base.files if file.kind == "file"]
        records = [name for name in names if name == MANIFEST or parse_marker(name) is not None]
        rest = [name for name in names if name not in records and name != CONDEMNED]
        for name in [*records, *rest, CONDEMNED]:
            self._place.tier.delete(_name(base, name))

    def _read_back(self, base: BaseFound) -> None:
        ring = ChunkRing(_CHUNKS, _READERS)
        try:
            verdict = verify_base(
                self._place.files, base, ring, timeout_s=self._timeout_s, progress=silent
            )
        finally:
            ring.close()
        if not verdict.damages:
            self._verified.add(base.id)
            return
        first, tier = verdict.damages[0], self._place.tier
        where = f"{tier.url}{first.path}"
        if any(damage.unreadable for damage in verdict.damages):
            raise StorageError(
                f"the copy of {base.id} could not be read back: {first.problem}",
                step=base.id.step,
                tier=tier.traits.kind,
                path=where,
                hint="look at the store; nothing is deleted there meanwhile",
            )
        self._damaged.add(base.id)
        self._post(
            DamageError(
                f"the copy of {base.id} is damaged: {first.problem}; older copies are kept",
                entry=first.entry,
                step=base.id.step,
                tier=tier.traits.kind,
                path=where,
                hint="the store, or something on the way to it, damages data",
            )
        )


def _name(base: BaseFound, name: str) -> str:
    return (base.path / name).relative_to(ROOT).as_posix()
