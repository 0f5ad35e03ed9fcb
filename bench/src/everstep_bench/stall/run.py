"""Warm-up, then rounds of all arms."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from everstep.errors import DeadlineError
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.display import Display
from everstep_bench.harness.loop import Loop, PinnedLink, Step
from everstep_bench.harness.machine import busy_s, cpu_s
from everstep_bench.harness.placement import Placement, descendants
from everstep_bench.harness.session import Session, session
from everstep_bench.options import IDEAL, NEIGHBOUR, StallOptions
from everstep_bench.stall.arms import Arm, Pending
from everstep_bench.stall.arms import Ideal as IdealArm
from everstep_bench.stall.figures import Block, Ideal, Interval, Row
from everstep_bench.stall.neighbour import Neighbour
from everstep_bench.stall.ours import Ours
from everstep_bench.stall.peers import TorchCheckpointing, TorchSave, TorchSnapshot, installed
from everstep_bench.stall.report import StallReport

_IDEAL_BLOCKS = 2  # in each round; how much they differ is the noise
_IDEAL_STEPS_MIN = 4
_WARM_UPS = 2  # and a round: from then on files are recycled, and buffers and stagers are warm
_COPIES_IN_MEMORY = 2.0  # that an arm holds, at most
_COPIES_ON_DISK = 2  # of one run: a base, and the file of the one before it, or the next
_COPIES_OF_MULTISTEP = 4.0  # besides: gradients of several steps
_TORCH_BYTES = 512 << 20  # of a keeper that replays
_KEEPER_BYTES = 256 << 20
_MEMORY_BESIDES = 512 << 20


@dataclass(slots=True)
class Opened:
    """An arm that is ready, its figures, and the processes that it has started."""

    arm: Arm
    row: Row
    children: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, arm: Arm, error: str | None = None) -> Opened:
        """Return an arm without figures."""
        return cls(arm, Row(arm.name, arm.role, arm.detail, error=error))

    def helpers(self) -> set[int]:
        """Return the processes beside this one."""
        return self.children | set(self.arm.processes())


def run_stall(options: StallOptions, display: Display) -> StallReport:
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when one of our own arms fails. A peer that fails is reported in its row.
    """
    report: StallReport | None = None
    try:
        with (
            session(options, display) as run,
            run.alone(),
            contextlib.ExitStack() as stack,
        ):
            display.begin("making a model", 1)
            loop = Loop(options)
            check_room(run, loop.size_bytes)
            if any(name.startswith("dcp") for name in options.names()):
                from everstep_bench.stall.dcp import single_rank_group

                stack.enter_context(single_rank_group(run.folder))
            bench = Bench(run, loop)
            arms = bench.open(stack)
            loop.watch_hooks()  # outside of all that the arms have registered
            intervals = [bench.measure(arms, every) for every in options.every]
            facts = run.facts(loop.size_bytes, loop.tensors, loop.description)
            report = StallReport(options, facts, intervals)
            display.begin("closing", 1)  # much pinned memory takes as long as a round
    except KeyboardInterrupt:
        if report is None:
            raise
    assert report is not None
    return report


class Bench:
    """Opens arms, and lets them save while training goes on."""

    def __init__(self, run: Session, loop: Loop) -> None:
        options: StallOptions = run.options
        self._options = options
        self._run = run
        self._end_s = math.inf if options.within_s is None else run.begin_s + options.within_s
        self._loop = loop
        self._placement = run.placement
        self._turns = run.turns()
        self._link = PinnedLink() if options.device == "cuda" else None

    def open(self, stack: contextlib.ExitStack) -> list[Opened]:
        """Open the arms one after the other, and let each save until it is warm."""
        names = [name for name in self._options.names() if name != IDEAL]
        self._run.display.begin("warming up", len(names))
        return [self._open(name, stack) for name in names]

    def measure(self, arms: Sequence[Opened], every: int) -> Interval:
        """Let arms take turns: one round that does not count, and then as many as there is time
        for."""
        for opened in arms:
            row = opened.row
            opened.row = Row(row.name, row.role, row.detail, {}, row.error)
        ideal = Opened.of(IdealArm())
        opened_of = {id(opened.row): opened for opened in (*arms, ideal)}
        rows = [opened.row for opened in arms]
        interval = Interval(every, {}, rows)
        longest_s = 0.0
        for number, turn in self._turns.rounds(
            f"{every} steps",
            [*rows, ideal.row],
            self._options.repeats,
            times=lambda row: _IDEAL_BLOCKS if row is ideal.row else 1,
        ):
            begun_s = time.monotonic()
            if number > 1 and begun_s + longest_s > self._end_s:
                break
            alone = []
            for row in turn:
                with self._turns.may_fail(row):
                    if row is ideal.row:
                        alone.append(self._block(ideal, max(every, _IDEAL_STEPS_MIN)))
                        continue
                    block = self._block(opened_of[id(row)], every)
                    if number:
                        row.blocks[number] = block
            if number:
                interval.ideals[number] = Ideal(tuple(alone))
                if self._link is not None:
                    interval.pinned_bytes_per_s[number] = self._link.bytes_per_s()
            longest_s = max(longest_s, time.monotonic() - begun_s)
        return interval

    def close(self, opened: Opened) -> None:
        """Close an arm."""
        with self._turns.may_fail(opened.row):
            opened.arm.close()

    def _open(self, name: str, stack: contextlib.ExitStack) -> Opened:
        self._run.display.advance(name)
        if not installed(name):
            return Opened.of(Arm(name, ""), "not installed")
        before = descendants()
        arm = _make(name, self._options, self._loop, self._run.folder, self._placement)
        opened = Opened.of(arm)
        stack.callback(self.close, opened)
        with self._turns.may_fail(opened.row):
            arm.open()
            opened.row.detail = arm.detail
            for _ in range(_WARM_UPS):
                self._block(opened, 1)
        opened.children = descendants() - before
        for child in opened.children:  # a process starts on the core of the one that made it
            self._placement.place(child)
        return opened

    def _block(self, opened: Opened, every: int) -> Block:
        arm = opened.arm
        try:
            arm.prepare()
            gc.collect()
            os.sync()  # nothing of the arm before is still on its way to the disk
            self._placement.spread()
            return self._timed(opened, every)
        finally:
            arm.clean()

    def _timed(self, opened: Opened, every: int) -> Block:
        arm = opened.arm
        saves = arm.role != "ideal"
        stalls = arm.stalls() if saves else {}
        persist_s = arm.persist_s() if saves else None
        helpers = opened.helpers() if saves else set()
        helpers_s = sum(map(cpu_s, helpers))
        others_s = busy_s()
        cpu_begin_s = time.process_time()
        begin_s = time.monotonic()
        pending = arm.save()
        called_s = time.monotonic()
        self._placement.spread()
        steps, after_steps_s, within_s = self.steps(arm, every, pending)
        end_s = time.monotonic()
        trainer_s = time.process_time() - cpu_begin_s
        others_s = busy_s() - others_s - trainer_s
        block = Block(
            begin_s=begin_s,
            called_s=called_s,
            end_s=end_s,
            steps=tuple(steps),
            trainer_cpu_s=trainer_s,
            others_cores=max(0.0, others_s / (end_s - begin_s)),
        )
        if not saves:
            return block
        sync_s = after_s = 0.0
        if pending is not None:
            sync_s = arm.settle(pending)
            assert pending.done_s is not None
            after_s = max(0.0, time.monotonic() - sync_s - max(end_s, pending.done_s))
        written_s = arm.persist_s()
        return replace(
            block,
            calls_s=called_s - begin_s + after_steps_s,
            causes={cause: s - stalls[cause] for cause, s in arm.stalls().items()},
            within_s=within_s,
            device_s=_on_device_s(steps),
            staged_s=None if pending is None else pending.staged_s,
            done_s=None if pending is None else pending.done_s,
            sync_s=sync_s,
            after_s=after_s,
            persist_s=None if written_s is None or persist_s is None else written_s - persist_s,
            helper_cpu_s=sum(map(cpu_s, helpers)) - helpers_s,
            copies=arm.copies(),
        )

    def steps(
        self, arm: Arm, every: int, pending: Pending | None
    ) -> tuple[list[Step], float, float | None]:
        """Train for a block, and on until the save is done.

        Returns:
            The steps, the seconds that the arm took between them, and those within them, if it
            tells these apart.
        """
        steps: list[Step] = []
        looks = pending is not None and arm.captures_in_steps
        after_s = 0.0
        within_s = 0.0
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(steps) < every or not (pending is None or pending.over):
            if looks:
                within_s -= sum(arm.stalls().values())
            step = self._loop.step()
            over_s = time.monotonic()
            if looks:
                within_s += sum(arm.stalls().values())
                over_s = time.monotonic()
            arm.after_step()
            steps.append(step)
            now_s = time.monotonic()
            after_s += now_s - over_s
            if now_s > deadline_s and not (pending is None or pending.over):
                raise DeadlineError(f"{arm.name}: a save is not done after {TIMEOUT_S:g} s")
        return steps, after_s, within_s if looks else None


def _on_device_s(steps: Sequence[Step]) -> float | None:
    found = [step.device_s for step in steps if step.device_s is not None]
    return sum(found) if found else None


def _make(name: str, options: StallOptions, loop: Loop, folder: Path, placement: Placement) -> Arm:
    peers: dict[str, Callable[[Loop, Path], Arm]] = {
        "torch.save": TorchSave,
        "torchsnapshot": TorchSnapshot,
        "torch_checkpointing": TorchCheckpointing,
    }
    if name == NEIGHBOUR:
        return Neighbour(loop.size_bytes, placement)
    if name in peers:
        return peers[name](loop, folder)
    if name.startswith("dcp"):
        from everstep_bench.stall.dcp import Dcp  # takes a second to import

        return Dcp(name, loop, folder)
    return Ours(name, loop, folder, placement, options)


def check_room(run: Session, size_bytes: int) -> None:
    """Look before anything is written.

    Raises:
        OutOfSpaceError: disk or memory would not do.
    """
    names = run.options.names()
    arms = len(names) - 1
    multistep = sum(name.startswith("gockpt") for name in names)
    memory = arms * (_COPIES_IN_MEMORY * size_bytes + _KEEPER_BYTES) + _MEMORY_BESIDES
    memory += multistep * (_COPIES_OF_MULTISTEP * size_bytes + _TORCH_BYTES)
    run.refuse_without_room(
        disk_bytes=_COPIES_ON_DISK * arms * size_bytes,
        memory_bytes=memory,
        hint="fewer --params, or fewer --arms",
    )
