"""Retention of copies: the same rules as on disk, with the operations of a tier.

A copy is deleted only if another one stays that was read back and found intact (``adr/005``). It is
deleted in two steps (``adr/004``): a record next to its manifest condemns it, which a resume sees;
then the fence is checked once more; then its files are deleted.
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

_CHUNKS = 3
_READERS = 1


class CopyRetention:
    """Retention of copies in one place.

    With several ranks, rank 0 alone runs it. It then also commits copies that lack only their
    manifest, and removes copies that can never be complete: incomplete ones older than a copy that
    was read back, when no rank copies them any more.

    Args:
        keep: number of copies to keep.
        post: called with the error of a damaged copy.
        timeout_s: timeout of a single transfer, in seconds.
        several: True if several ranks make the copies.
    """

    def __init__(
        self,
        place: CopyPlace,
        keep: int,
        post: Callable[[DamageError], None],
        *,
        timeout_s: float,
        several: bool = False,
    ) -> None:
        self._place = place
        self._post = post
        self._several = several
        self._all_past: BaseId | None = None
        self._read_back = ReadBack(
            place.files,
            lambda: contextlib.closing(ChunkRing(_CHUNKS, _READERS)),
            keep=keep,
            timeout_s=timeout_s,
            tier=place.kind,
            url=place.url,
        )
        self._swept: set[BaseId] = set()

    @property
    def verified(self) -> set[BaseId]:
        """Copies that were read back and found intact."""
        return self._read_back.verified

    def all_ranks_past(self, base: BaseId) -> None:
        """Note that every rank has copied ``base``: none of them is copying an older one."""
        self._all_past = base

    def run(self) -> None:
        """Delete copies that are no longer needed.

        Raises:
            FencedError: a newer timeline was opened; the copy in question is unchanged.
            StorageError: the tier failed.
            DeadlineError: the tier hangs.
        """
        if self._several:
            self._roll_forward()
        inventory = self._place.inventory()
        bases = {base.id: base for base in inventory.bases if self._is_candidate(base)}
        victims = self._read_back.plan(bases, inventory.branches, self._post)
        for base in bases.values():
            # Condemned by a process that crashed before the deletion, and needed after all.
            if base.status == "condemned" and base.id not in victims:
                self._place.check_fence()
                uncondemn_in_tier(self._place.tier, _name(base))
        for victim in victims:
            self._delete(bases[victim])
        for base in inventory.bases:
            # Partly deleted by a process that crashed: finish the deletion.
            not_newer = base.id.timeline <= self._place.timeline
            if base.status == "condemned" and not_newer and not base.is_usable:
                self._place.check_fence()
                self._delete_files(base)
        self._clean_older_timelines(inventory)
        if self._several:
            self._sweep()

    def _clean_older_timelines(self, inventory: Inventory) -> None:
        """Remove files left by crashed processes of older timelines.

        Only once there is a copy of this timeline: until then the last base of the previous
        timeline may still be in the process of being copied.
        """
        own = self._place.timeline
        if not any(b.status == "committed" and b.id.timeline == own for b in inventory.bases):
            return
        older = [base for base in inventory.bases if base.id.timeline < own]
        for base in older:
            if base.status == "incomplete":
                # The listing may be outdated: never delete a copy that has been committed since.
                if self._place.size_of(_name(base, MANIFEST)) is not None:
                    continue
                self._place.check_fence()
                self._delete_files(base)
            if base.id not in self._swept:
                self._place.tier.sweep(_name(base))
                self._swept.add(base.id)

    def _is_candidate(self, base: BaseFound) -> bool:
        """Return True for committed copies, and for condemned ones that still have all their
        files.
        """
        if base.status == "committed":
            return True
        usable = base.status == "condemned" and base.is_usable
        return usable and base.id.timeline <= self._place.timeline

    def _delete(self, base: BaseFound) -> None:
        assert base.manifest is not None
        condemned = _name(base, CONDEMNED)
        self._place.check_fence()
        self._place.create(condemned, base.manifest.encode())
        # Checked again after the record: a timeline opened before it has taken its inventory
        # without it and may rely on this copy; one opened later sees the record.
        try:
            self._place.check_fence()
        except FencedError:
            self._place.tier.delete(condemned)
            raise
        self._delete_files(base)
        self._read_back.forget(base.id)

    def _delete_files(self, base: BaseFound) -> None:
        """Delete the files of a copy: records first, the condemned record last.

        Without its records nobody reads the rest; the condemned record marks what is left until the
        end.
        """
        names = [file.name for file in base.files if file.kind == "file"]
        records = [name for name in names if name == MANIFEST or parse_marker(name) is not None]
        rest = [name for name in names if name not in records and name != CONDEMNED]
        for name in [*records, *rest, CONDEMNED]:
            self._place.tier.delete(_name(base, name))

    def _roll_forward(self) -> None:
        """Commit copies whose files are all there."""
        for base in self._place.inventory().bases:
            if base.status == "complete" and base.id.timeline <= self._place.timeline:
                assert base.manifest is not None
                folder = _name(base)
                if all(self._place.has_rank_files(folder, one) for one in base.manifest.markers):
                    # Before every commit: a process of an older timeline must not commit (I11).
                    self._place.check_fence()
                    self._place.create(_name(base, MANIFEST), base.manifest.encode())

    def _sweep(self) -> None:
        """Delete incomplete copies that no rank copies any more."""
        newest = max(self.verified, default=None)
        if newest is None or self._all_past is None:
            return
        for base in self._place.inventory().bases:
            # Younger incomplete copies may be in progress.
            unfinished = base.status == "incomplete" and base.id < min(newest, self._all_past)
            # The listing may be outdated: the manifest may exist by now.
            if unfinished and self._place.size_of(_name(base, MANIFEST)) is None:
                self._place.check_fence()
                self._delete_files(base)


def _name(base: BaseFound, name: str = "") -> str:
    return (base.path / name).relative_to(ROOT).as_posix()
