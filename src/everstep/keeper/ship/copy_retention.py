"""Retention of copies: the rules of the disk, in the operations of a tier.

Nothing is deleted unless a copy stays that was read back and found whole (``adr/005``). A copy is
deleted in two steps (``adr/004``): a record beside its manifest condemns it, where a resume sees
it; then the fence is looked at once more; then its files go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FencedError
from everstep.format.names import CONDEMNED, MANIFEST, parse_marker
from everstep.format.writer import ChunkRing
from everstep.keeper.retain.readback import ReadBack
from everstep.keeper.ship.place import ROOT, CopyPlace
from everstep.run.scan import BaseFound, Inventory
from everstep.run.uncondemn import uncondemn_in_tier

__all__ = ["CopyRetention"]

_CHUNKS = 3
_READERS = 1


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
        self._post = post
        self._read_back = ReadBack(
            place.files,
            lambda: contextlib.closing(ChunkRing(_CHUNKS, _READERS)),
            keep=keep,
            timeout_s=timeout_s,
            tier=place.tier.traits.kind,
            url=place.tier.url,
        )
        self._swept: set[BaseId] = set()
        self.deleted = 0

    def run(self) -> None:
        """Deletes what may go.

        Raises:
            FencedError: a newer timeline has been opened; the copy is whole and there as before.
            StorageError, DeadlineError
        """
        inventory = self._place.inventory()
        bases = {base.id: base for base in inventory.bases if self._is_candidate(base)}
        going = self._read_back.plan(bases, inventory.branches, self._post)
        for base in bases.values():  # condemned by a process that died: it is kept after all
            if base.status == "condemned" and base.id not in going:
                self._place.check_fence()
                uncondemn_in_tier(self._place.tier, _name(base))
        for victim in going:
            self._delete(bases[victim])
        for base in inventory.bases:  # half deleted, by a process that died
            mine = base.id.timeline <= self._place.timeline
            if base.status == "condemned" and mine and not base.is_usable:
                self._place.check_fence()
                self._delete_files(base)
        self._clean_older_timelines(inventory)

    def _clean_older_timelines(self, inventory: Inventory) -> None:
        """What processes that died have left of older timelines, once there is a copy of this one:
        until then the last base of the one before may be being copied."""
        own = self._place.timeline
        if not any(b.status == "committed" and b.id.timeline == own for b in inventory.bases):
            return
        older = [base for base in inventory.bases if base.id.timeline < own]
        for base in older:
            if base.status == "incomplete":
                if self._place.size_of(_name(base, MANIFEST)) is not None:
                    continue  # the listing was some time old
                self._place.check_fence()
                self._delete_files(base)
            if base.id not in self._swept:
                self._place.tier.sweep(_name(base))
                self._swept.add(base.id)

    def _is_candidate(self, base: BaseFound) -> bool:
        """As on the disk: also what is condemned, as long as nothing of it is gone."""
        spared = base.status == "condemned" and base.is_usable
        return base.status == "committed" or (spared and base.id.timeline <= self._place.timeline)

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
        self._read_back.forget(base.id)
        self.deleted += 1

    def _delete_files(self, base: BaseFound) -> None:
        """Records first: with them gone nothing can be made of the rest. The mark last: until
        then it says what this was."""
        names = [file.name for file in base.files if file.kind == "file"]
        records = [name for name in names if name == MANIFEST or parse_marker(name) is not None]
        rest = [name for name in names if name not in records and name != CONDEMNED]
        for name in [*records, *rest, CONDEMNED]:
            self._place.tier.delete(_name(base, name))


def _name(base: BaseFound, name: str = "") -> str:
    return (base.path / name).relative_to(ROOT).as_posix()
