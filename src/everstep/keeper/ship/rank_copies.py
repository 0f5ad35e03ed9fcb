"""Copies of bases that several ranks have saved: each rank's keeper copies its own files.

Rank 0 chooses the base (:mod:`everstep.commit.peer_copies`), so that all ranks copy the same one.
When every marker is in the tier, it creates the manifest (I5): the same as on the disks, as it
follows from the markers alone. If rank 0 dies before that, the next start of the job does so
(:mod:`everstep.restore.fetch.rank_copies`), or rank 0's next keeper. Only rank 0 deletes copies
(:class:`.base_copies.CopyRetention`).
"""

from __future__ import annotations

import logging
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR, CopyMessage
from everstep.commit.job.messages import CopyProgress, CopyReply, CopyRequest, CopySettled
from everstep.commit.peer_copies import CopyRound
from everstep.errors import DeadlineError, EverstepError, StorageError
from everstep.format import Manifest, base_dir
from everstep.format.message_codec import Stored
from everstep.keeper.ship.base_copies import BaseCopier, BaseCopies, CopyGroup
from everstep.keeper.ship.courier import Courier
from everstep.run import BaseFound
from everstep.seams import FileSystem, failpoint

_log = logging.getLogger("everstep.keeper")
_POLL_S = 0.1


class LeadingCopies(BaseCopies):
    """Rank 0's copies: it chooses the base, commits and deletes."""

    _round: CopyRound | None = None
    _base_in_turn: BaseId | None = None

    def base_durable(self, base: BaseId | None = None) -> None:
        super().base_durable(base)
        if base is not None and self.courier.refused:
            self.send_settled(base)

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        with self.courier.changed:
            if self._round is not None and isinstance(message, CopyReply):
                self._round.on_reply(sender, message.base, message.problem)
            elif self._round is not None:
                self._round.on_message(sender)
            self.courier.changed.notify_all()

    def send_settled(self, base: BaseId) -> None:
        """Tell the other ranks that ``base`` will not be requested any more."""
        self.group.send(CopySettled(self.group.number, base))

    def turn(self) -> None:
        try:
            super().turn()
        finally:
            # Also after errors: the other keepers must not wait for a request.
            if self._base_in_turn is not None:
                self.send_settled(self._base_in_turn)

    def _may_copy(self, base: BaseFound) -> bool:
        """Return True if the base was saved by the same number of ranks.

        Files of other ranks' bases are on disks that no running keeper reads.
        """
        self._base_in_turn = base.id
        return base.manifest is not None and len(base.manifest.markers) == self.group.world

    def _copy(self, base: BaseFound) -> bool:
        manifest = base.manifest
        assert manifest is not None
        group = self.group
        with self.courier.changed:
            self._round = CopyRound(base.id, group.followers, group.timeout_s)
        try:
            self._request_copies(manifest)
            mine = manifest.markers[group.rank]
            if not self.copier.has_files_of(mine):
                self.copier.copy_files(base, [mine])
            self._await_others(manifest)
            self._commit(base, manifest)
        except StorageError as error:
            if base.id.timeline == self._place.timeline:
                raise
            # A base of an earlier start: hosts that stored files of it may have been replaced.
            _log.info("%s is not copied: %s", base.id, error.message)
            return False
        else:
            self.retention.all_ranks_past(base.id)
            return True
        finally:
            with self.courier.changed:
                self._round = None

    def _commit(self, base: BaseFound, manifest: Manifest) -> None:
        """Write the manifest if all files are in the tier, whatever the ranks have reported."""
        # Checked in the tier: a report may come from a keeper whose files were lost since.
        if missing := self._missing(manifest):
            raise StorageError(
                f"the copy of {base.id} is not committed: files of rank {missing[0]} are missing "
                f"in {self._place.url}",
                step=base.id.step,
                rank=missing[0],
                tier=self._place.kind,
                path=self._place.url,
                hint="the next base will be copied",
            )
        failpoint("copy.before_manifest")
        self.copier.commit(base, manifest)

    def _missing(self, manifest: Manifest) -> list[int]:
        return [one.rank for one in manifest.markers if not self.copier.has_files_of(one)]

    def _request_copies(self, manifest: Manifest) -> None:
        with self.courier.changed:
            assert self._round is not None
            ranks = self._round.tick(self.group.last_receive_s)
        for rank in ranks:
            self.group.send_to(rank, CopyRequest(self.group.number, Stored(manifest)))

    def _await_others(self, manifest: Manifest) -> None:
        """Wait until every rank's files are in the tier, as reported or as found there."""
        while True:
            # Repeated: requests and replies may be lost.
            self._request_copies(manifest)
            self.group.report_progress()
            with self.courier.changed:
                current = self._round
                assert current is not None
                if self.courier.closed:
                    raise StorageError("copying was stopped while other ranks were copying")
                if current.problems:
                    raise self._failure(current, ())
                if not current.waits_for:
                    return
                ended = tuple(r for r in current.waits_for if self.group.is_disconnected(r))
                lost = current.silent or ended
                if not lost:
                    self.courier.changed.wait(_POLL_S)
                    continue
            # Outside the lock: this reads the tier, and messages must be handled meanwhile.
            missing = set(self._missing(manifest))
            if missing & set(lost):
                raise self._failure(current, lost)
            # Their files are there; only the message about it was lost.
            current.there |= set(lost)

    def _failure(self, current: CopyRound, lost: tuple[int, ...]) -> EverstepError:
        """Return the error for a copy that other ranks did not complete."""
        if current.problems:
            rank, problem = min(current.problems.items())
            return StorageError(
                f"{current.base} is not copied: rank {rank} could not copy its files: {problem}",
                step=current.base.step,
                rank=rank,
                tier=self._place.kind,
                path=self._place.url,
                hint="older copies are kept; the next base will be copied",
            )
        return DeadlineError(
            f"{current.base} is not copied: no message from rank(s) {', '.join(map(str, lost))}",
            step=current.base.step,
            tier=self._place.kind,
            path=self._place.url,
            hint="their keepers have ended or hang; the next base will be copied",
        )


class FollowingCopies:
    """Copies of any other rank: its files of the bases that rank 0 chooses."""

    def __init__(
        self, courier: Courier, filesystem: FileSystem, run: PurePath, group: CopyGroup
    ) -> None:
        self.courier = courier
        self.copier = BaseCopier(courier, filesystem, run, group)
        self.group = group
        self._requested: Manifest | None = None
        # The newest base that rank 0 may still request.
        self._expected: BaseId | None = None
        # Rank 0 will request no base up to this one.
        self._settled: BaseId | None = None
        self._last_message_s = courier.clock.monotonic_s()
        self._refusal = ""

    @property
    def busy(self) -> bool:
        """True while files are being copied, or while rank 0 may still request some."""
        courier = self.courier
        with courier.changed:
            if courier.over:
                return False
            if courier.at_work or courier.due:
                return True
            waited_s = courier.clock.monotonic_s() - self._last_message_s
            # A keeper that ends must not wait for ever for a rank 0 that has died.
            silent = waited_s > self.group.timeout_s
            lost = silent or self.group.is_disconnected(COORDINATOR)
            return self._expected is not None and not lost

    def base_durable(self, base: BaseId | None = None) -> None:
        """Expect rank 0 to decide whether this new base is copied."""
        with self.courier.changed:
            if base is not None and (self._settled is None or base > self._settled):
                self._expected = base
                # Wakes the thread, which reports from now on that this rank is alive.
                self.courier.changed.notify_all()

    def expedite(self) -> None:
        """Wait for rank 0 no longer than the timeout from now on: the keeper is about to end."""
        with self.courier.changed:
            if not self.copier.expedited:
                self._last_message_s = self.courier.clock.monotonic_s()
            self.copier.expedited = True
            self.courier.changed.notify_all()

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        courier = self.courier
        with courier.changed:
            if sender != COORDINATOR or courier.closed:
                return
            self._last_message_s = courier.clock.monotonic_s()
            if isinstance(message, CopySettled):
                self._mark_settled(message.base)
            elif isinstance(message, CopyRequest):
                self._on_request(message.manifest.record)
            courier.changed.notify_all()

    def turn(self) -> None:
        """Copy this rank's files of the requested base, and reply."""
        manifest = self._requested
        assert manifest is not None
        base = _base_of(manifest)
        problem = ""
        try:
            self.copy_own_files(manifest)
            self.courier.stats.copied += 1
        except StorageError as error:
            problem = error.message
            if base.timeline == self.courier.place.timeline:
                raise
            # A base of an earlier start: a replaced host never had files of it.
            _log.info("%s is not copied: %s", base, problem)
        except EverstepError as error:
            problem = error.message
            raise
        except Exception as error:
            problem = repr(error)
            raise
        finally:
            # Also after errors: rank 0 waits for this reply.
            with self.courier.changed:
                self._refusal = problem or self._refusal
                self._mark_settled(base)
            self._reply(base, problem)

    def waiting(self) -> float | None:
        """Report that this rank is alive while rank 0 may request a copy."""
        if self._expected is None:
            return None
        self.group.report_progress()
        return self.group.report_interval_s

    def copy_own_files(self, manifest: Manifest) -> None:
        """Copy this rank's files of a base, unless they are already there.

        Raises:
            EverstepError: as :meth:`.base_copies.BaseCopier.copy_files`.
        """
        self.courier.place.check_fence()
        base = _base_of(manifest)
        mine = manifest.markers[self.group.rank]
        if not self.copier.has_files_of(mine):
            path = base_dir(self.copier.run, base.timeline, base.step)
            found = BaseFound(base, path, "committed", manifest, None, ())
            self.copier.copy_files(found, [mine])
        self.courier.stats.step = base.step

    def _on_request(self, manifest: Manifest) -> None:
        base = _base_of(manifest)
        if self.courier.refused:
            self._reply(base, self._refusal)
        elif self.courier.at_work and self._requested and base == _base_of(self._requested):
            # Repeated while it is being copied: rank 0 only wants to know that this rank is alive.
            self.group.send(CopyProgress(self.group.number))
        elif len(manifest.markers) != self.group.world:
            self._reply(base, "it was saved by another number of ranks")
        else:
            self._requested = manifest
            self.courier.wake()

    def _mark_settled(self, base: BaseId) -> None:
        """Note that rank 0 will not request ``base`` or an older one any more."""
        if self._settled is None or base > self._settled:
            self._settled = base
        if self._expected is not None and self._expected <= self._settled:
            self._expected = None

    def _reply(self, base: BaseId, problem: str) -> None:
        self.group.send(CopyReply(self.group.number, base, problem))


def _base_of(manifest: Manifest) -> BaseId:
    return BaseId(manifest.timeline, manifest.step)
