"""Load a base and replay the log on it.

A failing update leaves the state in a mixture of steps. Then the base is loaded again, and the
log is replayed up to the step before. A resume always ends in the state of one step, or raises.
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
from everstep.restore.redo.updates import UnknownClassError
from everstep.run.candidates import Skipped
from everstep.run.chain import Chain
from everstep.run.open_base import OpenBase
from everstep.run.prefetch import Prefetch
from everstep.run.scan import BaseFound, Inventory
from everstep.seams import Seams
from everstep.seams.progress import progress
from everstep.seams.stderr import print_line
from everstep.state.training_state import State

__all__ = ["Loader", "replay", "replayable", "roll_forward"]


@dataclass(slots=True)
class Loader:
    """Loads a base into the live state, from memory if possible.

    Attributes:
        seams: file system and clock.
        held: base in the memory of the keeper.
        strict: refuse bases that do not match the live state completely.
        on_touch: called before live state is overwritten.
        source: source of the base loaded last.
        inexact: why that one is not exact, apart from its lineage; "" if it is.
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
        """Load ``base``.

        Args:
            strict: refuse any mismatch of this base, regardless of :attr:`strict`.

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
        """Load a base that several ranks saved, in a job of one rank."""
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
                    # Imported here since most bases have no redo file.
                    from everstep.restore.offline.complete import complete_live_base

                    loaded, self.inexact = complete_live_base(
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
    """Load ``base`` and replay ``chain`` on it, as far as possible.

    Args:
        whole: accept only the end of the chain.

    Raises:
        DamageError, FormatError, MismatchError, RecoveryError, OSError: of the base.
        MismatchError: in strict mode, the class of an optimizer is unknown here.
        ReplayError: with ``whole``, a step cannot be replayed. If the reason is another composition
            of the state, nothing was modified.
    """
    clock = loader.seams.clock
    skipped: list[Skipped] = []
    doubt = ""
    # First all steps in few passes. If that fails, step by step to find the failing step, then the
    # steps before it again in few passes.
    for together in (True, False, True):
        try:
            restored = _load(inventory, base, loader, strict=whole and bool(chain.steps))
        except MismatchError as error:
            if loader.strict:
                raise
            first, problem = error.mismatches[0]
            raise ReplayError(f"{OTHER_STATE} ({first}: {problem})", step=base.id.step) from error
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
                why = f"the log after it cannot be replayed: {error.message}"
                raise ReplayError(why, step=error.step, hint=error.hint) from error
            if together and len(chain.steps) > 1 and not skipped:
                continue  # replay step by step to find the failing step
            if isinstance(
                error, AuditError
            ):  # samples do not show at which earlier step it went wrong
                doubt = f"step {error.step} differs from training, and perhaps steps before it"
            timeline, at = chain.steps[min(restored.replayed, len(chain.steps) - 1)]
            why = f"the log cannot be replayed: {error.message}"
            skipped.append(Skipped(timeline, at, why))
            print_line(f"everstep: {inventory.path}: step {at}: {why}")
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
    """Return the beginning of a chain that needs no function that this program has not registered
    (I8).

    Raises:
        MismatchError: in strict mode, if that is not the entire chain.
    """
    assert base.manifest is not None
    functions = loader.state.ownership_rules.updates
    beyond = log.index.first_unregistered(chain, base.manifest.markers[0].lsn, functions)
    if beyond is None:
        return chain
    place, pattern = beyond
    cut = replace(chain, steps=chain.steps[:place])
    timeline, step = chain.steps[place]
    why = f"the log needs a function that updates {pattern!r}, but none is registered"
    if loader.strict:
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
    loader: Loader,
    log: LogFound,
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
    # Imported here since most runs have no log.
    from everstep.restore.redo.conditions import fingerprint_difference
    from everstep.restore.redo.driver import STEPS_AT_ONCE, ReplayDriver, verified_steps
    from everstep.restore.redo.live import LiveMemory

    loaded = restored.loaded
    assert loaded is not None
    shape = log.index.marks[chain.steps[0]].shape
    if loaded.shape != shape or loaded.mismatches:
        timeline, at = chain.steps[0]
        which = "".join(f" ({name}: {problem})" for name, problem in loaded.mismatches[:1])
        restored.skipped.append(Skipped(timeline, at, f"{OTHER_STATE}{which}"))
        return
    if loaded.tied:
        why = f"the log after it cannot be replayed: {loaded.tied[0]}"
        restored.skipped.append(Skipped(*chain.steps[0], why))
        return
    redo = ReplayDriver(
        LiveMemory(loader.state, loaded.restrided, loaded.aliases, loaded.names),
        compares=not fingerprint_difference(timelines.get(number) for number, _ in chain.steps),
        together=together,
    )
    before = restored.replayed  # steps of earlier calls
    files = loader.seams.filesystem
    wait_s = loader.timeout_s
    found = log.steps(chain, restored.lsn, files, loader.ring, wait_s)
    sound = partial(log.verified, filesystem=files, ring=loader.ring, timeout_s=wait_s)
    with (
        contextlib.closing(found),
        progress("replay", len(chain.steps), "items") as bar,
        Prefetch(
            verified_steps(found, sound),
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
            del step, head  # its memory is reused once it was applied
            steps.set_held_bytes(redo.waiting_bytes)
            # Apply waiting updates while the next step is being read from disk. Not if it is only
            # being verified in memory: that is faster than another pass over the state.
            if not at_hand and not steps.ready:
                redo.idle()
                steps.set_held_bytes(0)
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
