"""Choose a base, load it, and replay the log on it.

A failing update leaves the state in a mixture of steps. Then the base is loaded again, and the
log is replayed up to the step before. A resume always ends in the state of one step, or raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from everstep.commit import BaseId
from everstep.errors import (
    DamageError,
    EverstepError,
    FormatError,
    MismatchError,
    NewerFormatError,
    ReplayError,
)
from everstep.format import MANIFEST, TimelineRecord
from everstep.format.log import NOT_EXACT
from everstep.restore.fetch.copies import switch_to_copy, write_manifest
from everstep.restore.load import OTHER_STATE, LoadedBase, Reads, Restored, load_ranks
from everstep.restore.log import LogFound, LogReader, base_is_there, nothing_restorable, reachable
from everstep.restore.offline.rank_files import complete_live_base
from everstep.restore.redo import (
    LiveMemory,
    ReplayDriver,
    UnknownClassError,
    doubt_about,
    fingerprint_difference,
)
from everstep.restore.redo.driver import STEPS_AT_ONCE, verified_steps
from everstep.restore.start.report import ResumeRequest, missing_sections
from everstep.run import BaseFound, Chain, Inventory, OpenBase, Skipped, scan_run
from everstep.run.log_reads import Prefetch
from everstep.run.scan import candidates
from everstep.seams.progress import log_or_print, progress


class ChoiceGoneError(Exception):
    """The chosen base was deleted, or a newer one was committed: choose again."""


class OneRankChoice:
    """Bases that lead to the requested step, and the results of trying them, best first.

    Attributes:
        source: source of the base loaded last.
    """

    def __init__(self, request: ResumeRequest, inventory: Inventory, log: LogFound) -> None:
        self.source = "disk"
        self._request = request
        self._filesystem = request.seams.filesystem
        self._step = request.step
        self._inventory = inventory
        self._log = log.reader(self._filesystem, request.ring, request.timeout_s)
        self._reachable = reachable(inventory, log.index, step=self._step)
        # Best last, as restore() takes from the end.
        self._remaining = list(reversed(self._reachable.ordered))
        self._skipped = [*self._reachable.candidates.skipped, *log.skipped]
        self._incomplete = dict[BaseId, str]()  # bases that lack sections, which are tried last
        self._other_state = False

    def restore(self) -> Restored | None:
        """Restore the first base that can be used, and replay the log on it; None if several ranks
        saved it.

        Raises:
            RecoveryError, MismatchError
        """
        if not self._request.strict:
            tried = [base for base, _ in self._reachable.ordered]
            self._incomplete = self._lacking(tried)
            # Incomplete bases move to the front, so they are tried last. The sort is stable.
            self._remaining.sort(key=lambda way: way[0].id not in self._incomplete)
        while self._remaining:
            base, whole = self._remaining.pop()
            if base.manifest is not None and base.manifest.markers[0].world > 1:
                return None  # newer bases of one rank are damaged
            chain = replayable(base, whole, self._request, self._log.found, self._skipped)
            if self._step is not None and chain.end[1] != self._step:
                continue
            restored = self._try(base, whole, chain)
            if restored is None:
                continue
            # After it was loaded, since a base that cannot be read must not be committed.
            self._commit(base)
            self._skipped += restored.skipped
            assert restored.end is not None
            if self._step is not None and restored.end.step != self._step:
                continue  # the log is damaged; another base may need less of it
            return self._finished(restored, base, whole, chain)
        return self._nothing()

    def _try(self, base: BaseFound, whole: Chain, chain: Chain) -> Restored | None:
        """Restore a base; return None if it cannot be used."""
        at = base.id
        try:
            return self._roll_forward(base, chain)
        except NewerFormatError:
            raise
        except MismatchError:
            older = [other for other, _ in reversed(self._remaining)]
            found = self._lacking([base, *older])
            if at not in found:
                raise
            self._incomplete[at] = found[at]
        except (DamageError, FormatError, ReplayError) as error:
            self._skipped.append(Skipped(at.timeline, at.step, error.message))
            if isinstance(error.__cause__, MismatchError):
                self._other_state = True
            if not isinstance(error, ReplayError):
                self._try_copy(base, whole)
        except OSError as error:
            deleted = isinstance(error, FileNotFoundError)
            # Older processes may delete bases until the new timeline fences them off.
            if deleted and not base_is_there(self._filesystem, self._inventory.path, at):
                raise ChoiceGoneError from error
            reason = f"{error.filename or base.path}: {error.strerror or error}"
            self._skipped.append(Skipped(at.timeline, at.step, reason))
            self._try_copy(base, whole)
        return None

    def _roll_forward(self, base: BaseFound, chain: Chain) -> Restored:
        """Load ``base`` and replay ``chain`` on it, as far as possible.

        Raises:
            DamageError, FormatError, MismatchError, RecoveryError, OSError: of the base.
            MismatchError: in strict mode, the class of an optimizer is unknown here.
            ReplayError: a step was requested, and one before it cannot be replayed. If the reason
                is another composition of the state, nothing was modified.
        """
        clock = self._request.seams.clock
        run = self._inventory.path
        skipped: list[Skipped] = []
        doubt = ""
        # First all steps in few passes. If that fails, step by step to find the failing step, then
        # the steps before it again in few passes.
        for together in (True, False, True):
            restored = self._load(base, strict=self._step is not None and bool(chain.steps))
            restored.skipped += skipped
            start_s = clock.monotonic_s()
            try:
                if chain.steps:
                    timelines = self._inventory.timelines
                    replay(restored, chain, self._request, self._log, timelines, together)
            except EverstepError as error:
                self._refuse(error, restored, base)
                if together and len(chain.steps) > 1 and not skipped:
                    continue  # replay step by step to find the failing step
                doubt = doubt_about(error) or doubt
                timeline, at = chain.steps[min(restored.replayed, len(chain.steps) - 1)]
                why = f"the log cannot be replayed: {error.message}"
                skipped.append(Skipped(timeline, at, why))
                log_or_print(f"{run}: step {at}: {why}", level=logging.WARNING)
                # In one pass over several steps the failing one is unknown. Step by step, the log
                # is cut before it.
                steps = () if together else chain.steps[: restored.replayed]
                chain = replace(chain, steps=steps)
                continue
            restored.replay_s = clock.monotonic_s() - start_s
            restored.inexact = restored.inexact or (doubt if restored.replayed else "")
            return restored
        restored = self._load(base, strict=False)
        restored.skipped += skipped
        return restored

    def _load(self, base: BaseFound, *, strict: bool) -> Restored:
        """Load a base, from memory if possible.

        Args:
            strict: refuse any mismatch, whatever was requested, since a log is to be replayed on
                the state.

        Raises:
            DamageError, FormatError, MismatchError, RecoveryError, OSError: of the base.
            ReplayError: it does not match, although only ``strict`` requires it.
        """
        clock = self._request.seams.clock
        start_s = clock.monotonic_s()
        try:
            loaded, inexact = self._load_nearest(base, self._request.strict or strict)
        except MismatchError as error:
            if self._request.strict:
                raise
            first, problem = error.mismatches[0]
            raise ReplayError(f"{OTHER_STATE} ({first}: {problem})", step=base.id.step) from error
        load_s = clock.monotonic_s() - start_s
        return Restored(base, loaded, base.id, loaded.marker.lsn, inexact=inexact, load_s=load_s)

    def _load_nearest(self, base: BaseFound, strict: bool) -> tuple[LoadedBase, str]:
        assert base.manifest is not None
        marker = base.manifest.markers[0]
        # Copied in by hand, its digests are right, but it is of another training.
        if marker.run != self._inventory.run:
            raise FormatError(f"{base.path} belongs to another run", path=base.path)
        held = self._request.recalled.newest
        # Equal markers contain equal digests, so the memory has the bytes of that base.
        if held is not None and held.marker == marker:
            self.source = "memory"
            try:
                return self._load_from(base, held.open(), strict)
            except (DamageError, FormatError):
                # The same base is on disk, unless only memory has it.
                if not held.durable:
                    raise
        self.source = "disk"
        return self._load_from(base, OpenBase.open(self._filesystem, base, rank=0), strict)

    def _load_from(self, base: BaseFound, opened: OpenBase, strict: bool) -> tuple[LoadedBase, str]:
        """Load a base; return also why it is not exact, apart from its lineage; "" if it is."""
        request = self._request
        label = f"resume from step {base.id.step} ({self.source})"
        with contextlib.closing(opened), progress(label, opened.size_bytes) as bar:
            reads = Reads(request.ring, request.timeout_s, bar)
            loaded = load_ranks(
                [opened], request.state, reads, strict=strict, on_touch=request.on_touch
            )
            if opened.redo is None:
                return loaded, ""
            trained = self._inventory.timelines.get(opened.marker.timeline)
            return complete_live_base(opened, loaded, request.state, reads, trained)

    def _refuse(self, error: EverstepError, restored: Restored, base: BaseFound) -> None:
        """Raise the error for a step that cannot be replayed, unless an earlier one is accepted."""
        if isinstance(error, UnknownClassError) and self._request.strict:
            assert restored.end is not None
            raise error.refused(restored.end.step, base.path) from error
        if self._step is not None:
            why = f"the log after it cannot be replayed: {error.message}"
            raise ReplayError(why, step=error.step, hint=error.hint) from error

    def _try_copy(self, base: BaseFound, whole: Chain) -> None:
        """Try the base again, if there is a copy of it in another tier."""
        if switch_to_copy(self._filesystem, base.path):
            self._remaining.append((base, whole))

    def _lacking(self, bases: Sequence[BaseFound]) -> dict[BaseId, str]:
        return missing_sections(self._filesystem, bases, self._request.state.providers)

    def _commit(self, base: BaseFound) -> None:
        """Write the manifest of a base whose writer died between the last marker and the manifest.

        All markers are durable, so the base exists.
        """
        if base.status == "complete":
            assert base.manifest is not None
            with contextlib.suppress(IsADirectoryError):  # a directory of that name is left alone
                write_manifest(self._filesystem, base.path / MANIFEST, base.manifest.encode())

    def _finished(
        self, restored: Restored, base: BaseFound, whole: Chain, chain: Chain
    ) -> Restored:
        """Add the reasons why newer steps were not restored."""
        skipped = self._skipped
        assert restored.end is not None
        if whole.end[1] > restored.end.step:
            at = restored.end.step + 1
            reasons = [one.reason for one in skipped if one.step == at]
            why = reasons[-1] if reasons else f"step {at} could not be replayed"
            restored.unreplayed = BaseId(*whole.end), why
        if chain.lost is not None:
            timeline, end = chain.end
            why = f"log: {chain.stopped}; its records up to step {chain.lost} are unusable"
            skipped.append(Skipped(timeline, end + 1, why))
        restored.skipped = [*skipped, *_skipped(self._incomplete)]
        if self._incomplete and base.id not in self._incomplete:
            restored.passed_over = self._incomplete[max(self._incomplete)]
        return restored

    def _nothing(self) -> Restored:
        """Return a fresh start, if it discards nothing.

        Raises:
            RecoveryError: it would.
        """
        self._skipped += _skipped(self._incomplete)
        chosen = self._reachable
        refused = nothing_restorable(
            self._inventory, chosen, self._skipped, step=self._step, apart=self._other_state
        )
        if refused is None:
            return Restored(skipped=self._skipped)
        nobody = not chosen.ordered and not chosen.candidates.damaged
        # The scan may have fallen between a commit and a deletion of an older process: scan again.
        if nobody and candidates(scan_run(self._filesystem, self._inventory.path)).ordered:
            raise ChoiceGoneError
        raise refused


def _skipped(bases: Mapping[BaseId, str]) -> list[Skipped]:
    return [Skipped(base.timeline, base.step, why) for base, why in bases.items()]


def replayable(
    base: BaseFound, chain: Chain, request: ResumeRequest, log: LogFound, skipped: list[Skipped]
) -> Chain:
    """Return the beginning of a chain that needs no function that this program has not registered
    (I8).

    Raises:
        MismatchError: in strict mode, if that is not the entire chain.
    """
    assert base.manifest is not None
    functions = request.state.ownership_rules.updates
    beyond = log.index.first_unregistered(chain, base.manifest.markers[0].lsn, functions)
    if beyond is None:
        return chain
    place, pattern = beyond
    cut = replace(chain, steps=chain.steps[:place])
    timeline, step = chain.steps[place]
    why = f"the log needs a function that updates {pattern!r}, but none is registered"
    if request.strict:
        raise MismatchError(
            f"from step {step} on {why}",
            mismatches=((pattern, "a declared update without a registered function"),),
            step=step,
            path=base.path,
            hint=f"Checkpointer(..., declared={{{pattern!r}: function}}), or "
            f"resume(strict=False) to continue from step {cut.end[1]}",
        )
    skipped.append(Skipped(timeline, step, why))
    return cut


def replay(
    restored: Restored,
    chain: Chain,
    request: ResumeRequest,
    log: LogReader,
    timelines: Mapping[int, TimelineRecord | None],
    together: bool,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Replay the steps of a chain, as far as its records are intact.

    Args:
        restored: state restored so far; updated.
        timelines: timeline records.
        together: replay several steps in one pass; otherwise an error concerns step
            ``restored.replayed``.
        alive: called at each step.

    Raises:
        EverstepError: a step cannot be replayed; the state is a mixture of steps.
    """
    loaded = restored.loaded
    assert loaded is not None
    if why := _why_not_replayed(loaded, log.found.index.marks[chain.steps[0]].shape):
        restored.skipped.append(Skipped(*chain.steps[0], why))
        return
    redo = ReplayDriver(
        LiveMemory(request.state, loaded.restrided, loaded.aliases, loaded.names),
        compares=not fingerprint_difference(timelines.get(number) for number, _ in chain.steps),
        together=together,
    )
    before = restored.replayed  # steps of earlier calls
    _apply(redo, restored, chain, log, alive)
    restored.skipped += log.take_repaired()
    try:
        notes = redo.finish()
    except EverstepError:
        restored.replayed -= 1  # the last mark does not fit
        raise
    trained = [timelines.get(timeline) for timeline, _ in chain.steps[: restored.replayed - before]]
    restored.inexact = restored.inexact or fingerprint_difference(trained)
    restored.inexact = restored.inexact or redo.exactness.why
    if notes:
        restored.loaded = replace(loaded, notes=(*loaded.notes, *notes))


def _why_not_replayed(loaded: LoadedBase, shape: str) -> str:
    """Return why a log cannot be replayed on a restored state at all; "" if it can."""
    if loaded.shape != shape or loaded.mismatches:
        which = "".join(f" ({name}: {problem})" for name, problem in loaded.mismatches[:1])
        return f"{OTHER_STATE}{which}"
    return f"the log after it cannot be replayed: {loaded.tied[0]}" if loaded.tied else ""


def _apply(
    redo: ReplayDriver,
    restored: Restored,
    chain: Chain,
    log: LogReader,
    alive: Callable[[], None],
) -> None:
    """Apply the steps of a chain while another thread reads and verifies the next ones."""
    found = log.steps(chain, restored.lsn)
    places = iter(chain.steps)
    with (
        # Contexts end in reverse order: the prefetch thread, which runs this generator, is joined
        # first.
        contextlib.closing(found),
        progress("replay", len(chain.steps)) as bar,
        Prefetch(
            verified_steps(found, log.verified),
            count=STEPS_AT_ONCE,
            size_bytes=lambda step: 0 if isinstance(step, EverstepError) else step.read_bytes,
            limit_bytes=redo.limit_bytes,
        ) as steps,
    ):
        for step in steps:
            timeline, at = next(places)
            if isinstance(step, EverstepError):
                restored.skipped.append(Skipped(timeline, at, f"log: {step.message}"))
                break
            alive()
            redo.step(step)
            head = step.mark.head
            restored.replayed += 1
            restored.end = BaseId(head.timeline, head.step)
            restored.lsn = head.lsn
            if not head.exact:
                restored.inexact = NOT_EXACT
            bar.advance(1)
            at_hand = step.read_bytes == 0
            del step, head  # its memory is reused once it was applied
            steps.set_held_bytes(redo.waiting_bytes)
            # Apply waiting updates while the next step is being read from disk. Not if it is only
            # being verified in memory: that is faster than another pass over the state.
            if not at_hand and not steps.ready:
                redo.idle()
                steps.set_held_bytes(0)
