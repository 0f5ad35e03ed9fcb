"""Brings the live state to the end of a base's log: loads the base, and redoes what follows.

An update that cannot be redone leaves a mixture of steps behind. Then the base is loaded anew, and
the log is followed up to the step before; a resume always ends in the state of one step, or in an
error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from everstep.commit.lineage import BaseId
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    FormatError,
    MismatchError,
    ReplayError,
)
from everstep.format.log import NOT_EXACT
from everstep.format.records import TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.restore.fetch.held import HeldBase
from everstep.restore.load.load import LoadedBase, load_base, load_ranks
from everstep.restore.load.restored import OTHER_STATE, Restored
from everstep.restore.log.log_found import LogFound
from everstep.restore.redo.unknown import UnknownClassError
from everstep.run.candidates import Skipped
from everstep.run.chain import Chain
from everstep.run.open_base import OpenBase
from everstep.run.prefetch import Prefetch
from everstep.run.scan import BaseFound, Inventory
from everstep.seams import Seams
from everstep.seams.messages import say
from everstep.seams.progress import progress
from everstep.state.training_state import State

__all__ = ["Loader", "replay", "replayable", "roll_forward"]


@dataclass(slots=True)
class Loader:
    """Restores a base into the live state, from memory if it is there.

    Attributes:
        source: where the last one came from.
        inexact: why it is not bit for bit what training had, besides its lineage; "" if it is.
    """

    seams: Seams
    state: State
    ring: ChunkRing
    held: HeldBase | None
    strict: bool
    timeout_s: float
    on_touch: Callable[[], None]
    source: str = "disk"
    inexact: str = ""

    def load(self, inventory: Inventory, base: BaseFound, *, strict: bool = False) -> LoadedBase:
        """Restores ``base``.

        Args:
            strict: nothing of this one may be left out, whatever else may.

        Raises:
            DamageError, FormatError, MismatchError, RecoveryError, OSError
        """
        assert base.manifest is not None
        marker = base.manifest.markers[0]
        if marker.run != inventory.run:
            raise FormatError(f"{base.path} belongs to another run", path=base.path)
        strict = self.strict or strict
        if marker.world != 1:
            return self._load_ranks(base, strict)
        held = self.held
        trained = inventory.timelines.get(marker.timeline)
        if held is not None and held.marker == marker:
            self.source = "memory"
            try:
                return self._load(base, held.open(), trained, strict)
            except (DamageError, FormatError):
                if not held.durable:
                    raise
        self.source = "disk"
        opened = OpenBase.open(self.seams.filesystem, base, rank=0)
        return self._load(base, opened, trained, strict)

    def _load_ranks(self, base: BaseFound, strict: bool) -> LoadedBase:
        """A base that several ranks have saved, for a job of one."""
        assert base.manifest is not None
        self.source = "disk"
        self.inexact = ""
        with contextlib.ExitStack() as stack:
            ranks: list[OpenBase] = []
            for marker in base.manifest.markers:
                ranks.append(OpenBase.open(self.seams.filesystem, base, marker.rank))
                stack.callback(ranks[-1].close)
            size_bytes = sum(one.size_bytes for one in ranks)
            bar = stack.enter_context(progress(f"resume from step {base.id.step}", size_bytes))
            return load_ranks(
                ranks,
                self.state,
                self.ring,
                strict=strict,
                timeout_s=self.timeout_s,
                progress=bar,
                on_touch=self.on_touch,
            )

    def _load(
        self, base: BaseFound, opened: OpenBase, trained: TimelineRecord | None, strict: bool
    ) -> LoadedBase:
        self.inexact = ""
        try:
            label = f"resume from step {base.id.step} ({self.source})"
            with progress(label, opened.size_bytes) as bar:
                loaded = load_base(
                    opened,
                    self.state,
                    self.ring,
                    strict=strict,
                    timeout_s=self.timeout_s,
                    progress=bar,
                    on_touch=self.on_touch,
                )
                if opened.redo is not None:
                    # Only now: most bases are whole.
                    from everstep.restore.offline.whole import make_live_whole

                    loaded, self.inexact = make_live_whole(
                        opened,
                        loaded,
                        self.state,
                        self.ring,
                        trained,
                        timeout_s=self.timeout_s,
                        progress=bar,
                    )
                return loaded
        finally:
            opened.close()


def roll_forward(
    inventory: Inventory,
    base: BaseFound,
    chain: Chain,
    loader: Loader,
    log: LogFound,
    *,
    whole: bool,
) -> Restored:
    """Restores ``base`` and redoes the steps of ``chain``, as far as that goes.

    Args:
        whole: nothing but the end of the chain is of use.

    Raises:
        DamageError, FormatError, MismatchError, RecoveryError, OSError: of the base.
        MismatchError: nothing may be left out, and nobody here knows the class of an optimizer.
        ReplayError: with ``whole``, a step cannot be redone. Where that is since the live state
            consists of something else, it is not touched.
    """
    clock = loader.seams.clock
    skipped: list[Skipped] = []
    doubt = ""
    for together in (True, False, True):
        try:
            restored = _load(inventory, base, loader, strict=whole and bool(chain.steps))
        except MismatchError as error:
            if loader.strict:
                raise
            first, what = error.mismatches[0]
            raise ReplayError(f"{OTHER_STATE} ({first}: {what})", step=base.id.step) from error
        restored.skipped += skipped
        start_s = clock.monotonic_s()
        try:
            if chain.steps:
                replay(restored, chain, loader, log, inventory.timelines, together)
            restored.replay_s = clock.monotonic_s() - start_s
            restored.inexact = restored.inexact or (doubt if restored.replayed else "")
            return restored
        except EverstepError as error:
            if isinstance(error, UnknownClassError) and loader.strict:
                assert restored.end is not None
                raise error.refused(restored.end.step, base.path) from error
            if whole:
                why = f"the log behind it cannot be replayed: {error.message}"
                raise ReplayError(why, step=error.step, hint=error.hint) from error
            if together and len(chain.steps) > 1 and not skipped:
                continue  # which step it is shows when they are redone one by one
            if isinstance(error, AuditError):  # how long before, samples cannot tell
                doubt = f"step {error.step} is not what training had, perhaps others before it"
            timeline, at = chain.steps[min(restored.replayed, len(chain.steps) - 1)]
            why = f"log: it cannot be replayed: {error.message}"
            skipped.append(Skipped(timeline, at, why))
            say(f"everstep: {inventory.path}: step {at} of the {why}")
            steps = () if together else chain.steps[: restored.replayed]
            chain = replace(chain, steps=steps)
    restored = _load(inventory, base, loader)
    restored.skipped += skipped
    return restored


def _load(
    inventory: Inventory, base: BaseFound, loader: Loader, *, strict: bool = False
) -> Restored:
    start_s = loader.seams.clock.monotonic_s()
    loaded = loader.load(inventory, base, strict=strict)
    load_s = loader.seams.clock.monotonic_s() - start_s
    lsn = loaded.marker.lsn
    inexact = loader.inexact
    return Restored(base, loaded, base.id, lsn, inexact=inexact, load_s=load_s)


def replayable(
    base: BaseFound, chain: Chain, loader: Loader, log: LogFound, skipped: list[Skipped]
) -> Chain:
    """As much of a chain as needs no function that this program has not registered (I8).

    Raises:
        MismatchError: that is not all of it, and nothing may be left out.
    """
    assert base.manifest is not None
    functions = loader.state.ownership_rules.updates
    beyond = log.index.first_unregistered(chain, base.manifest.markers[0].lsn, functions)
    if beyond is None:
        return chain
    place, pattern = beyond
    cut = replace(chain, steps=chain.steps[:place])
    timeline, step = chain.steps[place]
    why = f"the log needs the function that updates {pattern!r}, and none is registered here"
    if loader.strict:
        raise MismatchError(
            f"from step {step} on {why}",
            mismatches=((pattern, "a declared update without a function"),),
            step=step,
            path=base.path,
            hint=f"Checkpointer(..., declared={{{pattern!r}: function}}), or "
            f"resume(strict=False) to go on from step {cut.end[1]}",
        )
    skipped.append(Skipped(timeline, step, why))
    return cut


def replay(
    restored: Restored,
    chain: Chain,
    loader: Loader,
    log: LogFound,
    timelines: Mapping[int, TimelineRecord | None],
    together: bool,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Redoes the steps of a chain, as far as its records are whole.

    Args:
        restored: what has been restored; gets what is redone.
        together: several steps in one pass; otherwise an error is of step ``restored.replayed``.
        alive: called at each step.

    Raises:
        EverstepError: a step cannot be redone; the state is a mixture of steps.
    """
    # Only now: most runs have no log.
    from everstep.restore.redo.redo import STEPS_AT_ONCE, Redo, checked, other_conditions

    loaded = restored.loaded
    assert loaded is not None
    shape = log.index.marks[chain.steps[0]].shape
    if loaded.shape != shape or loaded.mismatches:
        timeline, at = chain.steps[0]
        which = "".join(f" ({name}: {what})" for name, what in loaded.mismatches[:1])
        restored.skipped.append(Skipped(timeline, at, f"{OTHER_STATE}{which}"))
        return
    if loaded.tied:
        why = f"the log behind it cannot be replayed: {loaded.tied[0]}"
        restored.skipped.append(Skipped(*chain.steps[0], why))
        return
    redo = Redo(loader.state, loaded.restrided, loaded.aliases, loaded.names)
    if not together:
        redo.limit_bytes = 0
    redo.compares = not other_conditions(timelines.get(timeline) for timeline, _ in chain.steps)
    before = restored.replayed  # of other parts of the chain
    files = loader.seams.filesystem
    wait_s = loader.timeout_s
    found = log.steps(chain, restored.lsn, files, loader.ring, wait_s)
    sound = partial(log.sound, filesystem=files, ring=loader.ring, timeout_s=wait_s)
    with (
        contextlib.closing(found),
        progress("replay", len(chain.steps), "items") as bar,
        Prefetch(
            checked(found, sound),
            count=STEPS_AT_ONCE,
            size_bytes=lambda step: 0 if isinstance(step, EverstepError) else step.read_bytes,
            limit_bytes=redo.limit_bytes,
        ) as steps,
    ):
        for step in steps:
            if isinstance(step, EverstepError):
                timeline, at = chain.steps[restored.replayed - before]
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
            del step, head  # what was read for it is used again once it is applied
            steps.set_held_bytes(redo.waiting_bytes)
            # While the next one is being read; not while it is only being verified, in memory,
            # which takes less than to pass over the state once more.
            if not at_hand and not steps.ready:
                redo.idle()
                steps.set_held_bytes(0)
    restored.skipped += log.take_repaired()
    try:
        notes = redo.finish()
    except EverstepError:
        restored.replayed -= 1  # it is the last mark that does not fit
        raise
    trained = [timelines.get(timeline) for timeline, _ in chain.steps[: restored.replayed - before]]
    restored.inexact = restored.inexact or other_conditions(trained)
    if not redo.exactness.exact:
        restored.inexact = restored.inexact or redo.exactness.why
    if notes:
        restored.loaded = replace(loaded, notes=(*loaded.notes, *notes))
