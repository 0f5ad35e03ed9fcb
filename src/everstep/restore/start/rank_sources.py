"""Sources of one rank at the start of a job: its disk, memory of keepers, copies in tiers.

The ranks choose from what each of them offers, and each reads its share of the choice from the
cheapest place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR, Choice, Needs, Offer, Source
from everstep.commit.job.agreement import OpenTimeline, TakeInventory
from everstep.commit.log_reach import LogRun
from everstep.commit.retention import VOLATILE_TIERS
from everstep.format import Manifest, Marker
from everstep.restore.fetch import Copies, FetchCopies, Meeting, StartChannel
from everstep.restore.fetch.node_reads import NodeReads
from everstep.restore.fetch.peer_plan import Coverage
from everstep.restore.fetch.peers import FetchedBase, OfferExtras, coverage_on_disk
from everstep.restore.fetch.rank_copies import offer_of, open_on_disk
from everstep.restore.fetch.sources import CopiesAhead, Place, Places
from everstep.restore.load.saved_ranks import needs_of
from everstep.restore.start.rank_log import RankLog
from everstep.restore.start.report import ResumeRequest
from everstep.run import BaseFound, Inventory, TimelineCache, scan_run
from everstep.run.scan import candidates
from everstep.state.training_state import State

_SCANS_MAX = 8


class RankSources:
    """Bases and log that this rank can read, and the places to read them from.

    Args:
        copies: copies in tiers, readable by every rank.
        log: log of this rank; None: there is none.

    Attributes:
        inventory: last scan of the run folder.
        needs: which ranks' files a rank reads.
    """

    def __init__(
        self,
        request: ResumeRequest,
        meeting: Meeting,
        copies: Copies,
        log: RankLog | None,
        needs: Needs,
        node: NodeReads | None,
    ) -> None:
        self.inventory = Inventory(request.run)
        self.needs = needs
        self._request = request
        self._meeting = meeting
        self._copies = copies
        self._log = log
        self._held = request.recalled.base
        # A job of one rank also takes what keepers held for the other ranks of an earlier job.
        self._fetched = [
            FetchedBase.of_own(copy)
            for copy in request.recalled.copies
            if meeting.world == 1 or copy.marker.rank == meeting.rank
        ]
        # Files that ranks of this node read together are not read ahead by each of them.
        alone = needs if node is None else node.needs_alone
        self._ahead = CopiesAhead(request.run, meeting.rank, alone)
        self._timelines = TimelineCache()
        self._asked = TakeInventory()
        self._early_offer: Offer | None = None
        # The base that all ranks will choose, unless something is damaged: only the log after it is
        # looked up in copies.
        self._expected: BaseId | None = None
        self._is_sound = True  # nothing was damaged so far

    @property
    def rank(self) -> int:
        """Rank that reads."""
        return self._meeting.rank

    def offer(self, asked: TakeInventory) -> Offer:
        """Return what this rank can read."""
        self._asked = asked
        # Asked again, the ranks could not use their choice: the log after another base counts, too.
        if not self._is_sound:
            self._expected = None
        self._is_sound = False
        early = self._early_offer
        self._early_offer = None
        return early or self._offer()

    def _offer(self, *, lossy: bool = True) -> Offer:
        """Return the bases and logs that this rank can read.

        Keepers may still withdraw captures of the previous process. If a listed file disappears
        meanwhile, the scan is repeated.
        """
        for _ in range(_SCANS_MAX - 1):
            with contextlib.suppress(FileNotFoundError):
                return self._scan(lossy)
        return self._scan(lossy)

    def _scan(self, lossy: bool) -> Offer:
        self.inventory = inventory = scan_run(
            self._request.seams.filesystem, self._request.run, self._timelines
        )
        rank = self._meeting.rank
        disk = self._meeting.disks[rank]
        held = []
        # Contents of another history were removed before, by comparing records
        # (KeeperContents.of_history).
        if self._held is not None and self._held.id.timeline in inventory.timelines:
            held.append((self._held.marker, "memory"))
            held += [(one.marker, "memory") for one in self._request.recalled.nearby]
        mine = [one for one in self._fetched if one.is_of(inventory)]
        held += [(one.held.marker, one.tier) for one in mine]
        offer = offer_of(
            self._request.seams.filesystem, inventory, rank, disk, held, partly=self._asked.partly
        )
        named = {one.record.timeline: one.record for one in mine}
        named |= {} if self._log is None else self._log.timelines(inventory)
        offer = self._copies.add_to(replace(offer, timelines={**offer.timelines, **named}))
        if self._log is None:
            return offer
        near = [other for other, name in enumerate(self._meeting.disks) if name == disk]
        others = self._log.resharded.look(
            inventory, self._copies.logs, offer.bases, near=near, relaid=self._asked.relaid
        )
        return replace(offer, log=self._log_runs(offer, lossy=lossy), others=others)

    def _log_runs(self, offer: Offer, *, lossy: bool = True) -> tuple[LogRun, ...]:
        """Return the runs of steps of this rank's log."""
        assert self._log is not None
        return self._log.runs(
            self.inventory,
            self._copies.logs,
            offer.bases if self._expected is None else (self._expected,),
            lossy=lossy,
            read_from=self._ahead.files,
        )

    def fetch(self, fetch: FetchCopies, others: StartChannel) -> None:
        """Fetch bases and log records that this rank needs from other nodes.

        Records of which copies have only lossy versions are fetched as well, since a peer may have
        the exact ones. Meanwhile this rank reads ahead from copies, and the log in them is scanned
        after the base that will be chosen: all ranks read the same copies, so other steps matter
        only if that base is damaged. If nothing was fetched, the agreement uses this scan.
        """
        offer = self._offer(lossy=False)
        scans: list[Future[tuple[LogRun, ...]]] = []

        def meanwhile(choice: Choice) -> None:
            self._expected = choice.base
            if self._request.restores:
                log = {} if self._log is None else self._log.in_copies(choice)
                self._ahead.begin(choice, self._copies.places, log)
            if self._log is not None and self._copies.places:
                scans.append(thread.submit(self._log_runs, offer))

        def remains() -> tuple[Offer, Coverage]:
            # Scans the log as well: no earlier scan is that of the log found last.
            scans.clear()
            return self._remains()

        held = self._held
        known = held is None or held.id.timeline in self.inventory.timelines
        unproven = None if held is None or known else held.marker
        # One thread: each scan replaces the log that was found before, and the last one counts.
        with ThreadPoolExecutor(1, "everstep-look") as thread:
            brought = fetch(others, offer, OfferExtras(meanwhile, unproven, remains))
        # This disk lacks the timeline of the base in its keeper's memory, but the manifest on
        # another disk lists exactly these files (I7).
        if brought.proven is not None and held is not None:
            brought.bases.append(FetchedBase(held, brought.proven, "memory"))
            # From now on it is offered with its proven record, not by the number of its timeline.
            self._held = None
        if not brought.bases and not brought.logs:
            if self._log is None or not self._copies.places:
                self._early_offer = offer
            elif scans:
                with contextlib.suppress(FileNotFoundError):  # a file disappeared: scan again later
                    self._early_offer = replace(offer, log=scans[-1].result())
        self._fetched += brought.bases
        if self._log is not None:
            self._log.lent = brought.logs

    def _remains(self) -> tuple[Offer, Coverage]:
        """Return the offer with incomplete bases, and what this disk has of them.

        It is not offered in the agreement before all ranks ask for it.
        """
        asked = self._asked
        self._asked = replace(asked, partly=True)
        found = self._offer(lossy=False)
        self._asked = asked
        return found, coverage_on_disk(self._request.seams.filesystem, self.inventory.bases)

    def older_than(self, base: BaseId) -> list[BaseFound]:
        """Return the older bases on this disk that can be used."""
        return [one for one in candidates(self.inventory).ordered if one.id < base]

    def places(self, choice: Choice, manifest: Manifest) -> Places:
        """Return the places where this rank can read the files of each rank."""
        found: dict[int, list[Place]] = {}
        for marker in manifest.markers:
            for source in choice.sources[marker.rank]:
                if source.rank == self._meeting.rank:
                    found.setdefault(marker.rank, []).extend(self._at(source, marker))
        return Places(found)

    def _at(self, source: Source, marker: Marker) -> list[Place]:
        if source.tier in VOLATILE_TIERS:
            held = [one.held for one in self._fetched if one.tier == source.tier]
            if self._held is not None and source.tier == "memory":
                held += [self._held, *self._request.recalled.nearby]
            return [Place(source, one) for one in held if one.marker == marker]
        if source.tier == "disk":
            return [Place(source, self._request.seams.filesystem, self._meeting.disks[source.rank])]
        copies = [copy for copy in self._copies.places if copy.kind == source.tier]
        return [Place(source, self._ahead.files(copy.files), copy.tier.url) for copy in copies]

    def stop_reading_ahead(self, but: BaseId | None) -> None:
        """Release what was read ahead of another base than this one."""
        self._ahead.only(but)

    def log_may_be_elsewhere(self, choice: Choice) -> bool:
        """Return True if this rank's log may be on the disk of another rank, as its files were."""
        if self._asked.relaid or choice.partly or choice.reach is not None or self._log is None:
            return False
        mine = choice.base, self._meeting.rank
        return any((one.held.id, one.held.marker.rank) == mine for one in self._fetched if one.disk)

    def open(self, out: OpenTimeline) -> bool:
        """Open a timeline, in the copies first, as a run of one rank does (``adr/019``)."""
        leads = self._meeting.rank == COORDINATOR
        # The coordinator opens the timeline in the copies first. A copy with an older timeline
        # would let another process continue there.
        if leads:
            self._copies.prepare(out.choice)
        unique = f"{self._meeting.session}-{self._meeting.rank}"
        ours = self._copies.open_timeline(out.record) and open_on_disk(
            self._request.seams.filesystem, self._request.run, out.record, out.choice, unique
        )
        # Only after the fence: an older process could delete the base again.
        if ours and leads and out.choice.base is not None:
            self._copies.take_back(out.choice.base)
        # The inventory that follows confirms the choice. It is not a sign of damage.
        self._is_sound = True
        return ours

    def close(self) -> None:
        """Stop reading ahead. Idempotent."""
        self._ahead.close()


def needs_on_disk(
    state: State, disks: Sequence[str], shared: Sequence[bool] | None = None
) -> Needs:
    """Return a function giving the ranks whose files this rank reads, of those on its disk.

    Shared tensors are written once to each disk. So a job on the same disks with as many ranks
    needs no files from other disks.

    Args:
        disks: name of the disk of each rank.
        shared: as for :func:`.saved_ranks.needs_of`; must be the same on every rank.
    """
    needs = needs_of(state, shared)

    def here(rank: int, manifest: Manifest) -> Collection[int]:
        wanted = needs(rank, manifest)
        if len(set(disks)) == 1 or len(manifest.markers) != len(disks):
            return wanted
        return [other for other in wanted if disks[other] == disks[rank]]

    return here
