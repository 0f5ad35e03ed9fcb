"""Warm-up, then rounds of all arms."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.errors import DeadlineError, UnavailableError
from everstep.workloads.processes import interruptible
from everstep_bench.persist.machine import Machine, look_at
from everstep_bench.persist.meter import busy_s
from everstep_bench.persist.show import Display
from everstep_bench.persist.workspace import refuse_without_room, workspace
from everstep_bench.stall.arms import TIMEOUT_S, Arm, Pending
from everstep_bench.stall.arms import Ideal as IdealArm
from everstep_bench.stall.cores import Placement, descendants
from everstep_bench.stall.device import PinnedLink
from everstep_bench.stall.figures import Block, Ideal, Interval, Row
from everstep_bench.stall.gauges import (
    cpu_s,
    give_back_free_memory,
    own_peak_bytes,
    own_resident_bytes,
    private_bytes,
    reset_peak,
)
from everstep_bench.stall.loop import Loop, Step, seeded_single_thread
from everstep_bench.stall.neighbour import Neighbour
from everstep_bench.stall.options import IDEAL, NEIGHBOUR, StallOptions
from everstep_bench.stall.ours import ours_arm
from everstep_bench.stall.peers import TorchCheckpointing, TorchSave, TorchSnapshot, installed
from everstep_bench.stall.recording import Curve, Sampler
from everstep_bench.stall.report import StallReport
from everstep_bench.stall.writers import Writers

__all__ = ["run_stall"]

_IDEAL_BLOCKS = 2  # in each round; how much they differ is the noise
_IDEAL_STEPS_MIN = 4
_WARM_UPS = 2  # and a round: from then on files are recycled, and buffers and stagers are warm
_CURVE_SAVES = 3
_COPIES_IN_MEMORY = 2.0  # that an arm holds, at most
_COPIES_ON_DISK = 2  # of one run: a base, and the file of the one before it, or the next
_COPIES_OF_MULTISTEP = 4.0  # besides: gradients of several steps
_TORCH_BYTES = 512 << 20  # of a keeper that replays
_KEEPER_BYTES = 256 << 20
_WRITER_BYTES = 512 << 20
_MEMORY_BESIDES = 512 << 20


@dataclass(slots=True)
class _Opened:
    """An arm that is ready, and what belongs to it."""

    arm: Arm
    error: str | None = None
    held_bytes: int | None = None
    children: set[int] = field(default_factory=set)
    probe_s: float | None = None

    def helpers(self) -> set[int]:
        return self.children | set(self.arm.processes())


def run_stall(options: StallOptions, display: Display) -> StallReport:
    """Measures; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when one of our own arms fails. A peer that fails is reported in its row.
    """
    start_s = time.monotonic()
    report: StallReport | None = None
    try:
        with (
            interruptible() as signals,
            workspace(options.folder) as folder,
            seeded_single_thread(options.seed),
        ):
            machine = look_at(folder)
            placement = Placement(free_core=options.free_core)
            with placement.pinned(), contextlib.ExitStack() as stack:
                display.begin("making a model", 1)
                about = {"batch": options.batch, "layers": options.layers}
                loop = Loop(options, dtype=options.torch_dtype, **about)
                _check_room(options, machine, loop.size_bytes, folder)
                if any(name.startswith("dcp") for name in options.names()):
                    from everstep_bench.stall.dcp import single_rank_group

                    stack.enter_context(single_rank_group(folder))
                writers = Writers(options.writers, loop.size_bytes, folder, placement)
                stack.enter_context(writers)
                bench = _Bench(options, loop, placement, writers, display, signals, start_s)
                arms = bench.open(folder, stack)
                loop.watch_hooks()  # outside of all that the arms have registered
                intervals = [bench.measure(arms, every) for every in options.every]
                curves = bench.curves(arms, options.every[0]) if options.curves else []
                report = StallReport(
                    options=options,
                    machine=machine,
                    size_bytes=loop.size_bytes,
                    tensors=loop.tensors,
                    workload=loop.description,
                    python_part_s=loop.python_part_s,
                    free_core=placement.free,
                    intervals=intervals,
                    curves=curves,
                    load_after=os.getloadavg()[0],
                    start_s=start_s,
                    seconds=time.monotonic() - start_s,
                    folder=str(folder.parent),
                )
                display.begin("closing", 1)  # much pinned memory takes as long as a round
    except KeyboardInterrupt:
        if report is None:
            raise
    assert report is not None
    return report


class _Bench:
    def __init__(
        self,
        options: StallOptions,
        loop: Loop,
        placement: Placement,
        writers: Writers,
        display: Display,
        signals: Sequence[int] = (),
        start_s: float = 0.0,
    ) -> None:
        self._options = options
        self._end_s = math.inf if options.within_s is None else start_s + options.within_s
        self._loop = loop
        self._placement = placement
        self._writers = writers
        self._display = display
        self._signals = signals
        self._random = random.Random(options.seed)
        self._link = PinnedLink() if options.device == "cuda" else None

    def open(self, folder: Path, stack: contextlib.ExitStack) -> list[_Opened]:
        """Opens the arms one after the other, and lets each save until it is warm."""
        names = [name for name in self._options.names() if name != IDEAL]
        self._display.begin("warming up", len(names))
        return [self._open(name, folder, stack) for name in names]

    def measure(self, arms: list[_Opened], every: int) -> Interval:
        """One round that does not count, and then those that do: as many as there is time for."""
        rows = {id(opened): _row(opened) for opened in arms}
        interval = Interval(every, {}, list(rows.values()))
        ideal = _Opened(IdealArm())
        longest_s = 0.0
        for number in range(self._options.repeats + 1):
            begun_s = time.monotonic()
            if number > 1 and begun_s + longest_s > self._end_s:
                break
            order = [opened for opened in arms if opened.error is None]
            order += [ideal] * _IDEAL_BLOCKS
            self._random.shuffle(order)
            what = f"{every} steps, round {number} of {self._options.repeats}"
            self._display.begin(what if number else f"{every} steps, warming up", len(order))
            alone = []
            for opened in order:
                self._display.advance(opened.arm.name)
                with self._peer_may_fail(opened):
                    if opened is ideal:
                        alone.append(self._block(opened, max(every, _IDEAL_STEPS_MIN)))
                        continue
                    block = self._block(opened, every)
                    if number:
                        rows[id(opened)].blocks[number] = block
                rows[id(opened)].error = opened.error
            if number:
                interval.ideals[number] = Ideal(tuple(alone))
                if self._link is not None:
                    interval.pinned_bytes_per_s[number] = self._link.bytes_per_s()
            longest_s = max(longest_s, time.monotonic() - begun_s)
        return interval

    def curves(self, arms: list[_Opened], every: int) -> list[Curve]:
        """Record the activity of link and keepers of our arms over some consecutive saves."""
        ours = [opened for opened in arms if opened.arm.role == "ours" and opened.error is None]
        self._display.begin("curves", len(ours))
        found = []
        for opened in ours:
            self._display.advance(opened.arm.name)
            try:
                found.append(self._curve(opened, every))
            finally:
                opened.arm.clean()
        return found

    def _curve(self, opened: _Opened, every: int) -> Curve:
        arm = opened.arm
        arm.prepare()
        self._placement.spread(one_core=arm.one_core)
        saves_s: list[float] = []
        steps: list[Step] = []
        begin_s = time.monotonic()
        with Sampler(opened.helpers()) as sampler:
            self._placement.spread(one_core=arm.one_core)
            for _ in range(_CURVE_SAVES):
                saves_s.append(time.monotonic())
                pending = arm.save()
                assert pending is not None
                steps += self._steps(arm, every, pending)[0]
                arm.settle(pending)
            end_s = time.monotonic()
        return Curve(
            name=arm.name,
            begin_s=begin_s,
            end_s=end_s,
            saves_s=tuple(saves_s),
            steps=tuple(steps),
            copies=arm.copies(),
            samples=tuple(sampler.samples),
        )

    def _open(self, name: str, folder: Path, stack: contextlib.ExitStack) -> _Opened:
        self._display.advance(name)
        if not installed(name):
            absent = Arm(name, "")
            return _Opened(absent, "not installed")
        give_back_free_memory()
        before_bytes = own_resident_bytes()
        before = descendants()
        try:
            arm = _make(name, self._options, self._loop, folder, self._placement)
        except UnavailableError as error:
            return _Opened(Arm(name, ""), str(error))
        opened = _Opened(arm)
        stack.callback(self._close, opened)
        with self._peer_may_fail(opened):
            arm.open()
            for _ in range(_WARM_UPS):
                self._block(opened, 1)
            opened.probe_s = arm.probe()
        give_back_free_memory()  # here only: between blocks, buffers stay as warm as they are
        opened.held_bytes = max(0, own_resident_bytes() - before_bytes)
        opened.children = descendants() - before
        for child in opened.children:  # a process starts on the core of the one that made it
            self._placement.place(child)
        return opened

    def _close(self, opened: _Opened) -> None:
        with self._peer_may_fail(opened):
            opened.arm.close()

    def _block(self, opened: _Opened, every: int) -> Block:
        arm = opened.arm
        try:
            arm.prepare()
            gc.collect()
            os.sync()  # nothing of the arm before is still on its way to the disk
            self._placement.spread(one_core=arm.one_core)
            return self._timed(opened, every)
        finally:
            self._writers.wait()
            arm.clean()

    def _timed(self, opened: _Opened, every: int) -> Block:
        arm = opened.arm
        saves = opened.arm.role != "ideal"
        stalls, persist_s = (arm.stalls(), arm.persist_s()) if saves else ({}, None)
        helpers = opened.helpers() if saves else set()
        helpers_s = sum(map(cpu_s, helpers))
        resident_bytes = own_resident_bytes() if reset_peak() else None
        if saves:
            self._writers.flush()
        others_s = busy_s()
        cpu_begin_s = time.process_time()
        begin_s = time.monotonic()
        pending = arm.save()
        called_s = time.monotonic()
        self._placement.spread(one_core=arm.one_core)
        steps, after_steps_s, within_s = self._steps(arm, every, pending)
        end_s = time.monotonic()
        trainer_s = time.process_time() - cpu_begin_s
        others_s = busy_s() - others_s - trainer_s
        peak_bytes = None if resident_bytes is None else own_peak_bytes() - resident_bytes
        sync_s = after_s = 0.0
        if pending is not None:
            sync_s = arm.settle(pending)
            assert pending.done_s is not None
            after_s = max(0.0, time.monotonic() - sync_s - max(end_s, pending.done_s))
        written_s = arm.persist_s() if saves else None
        return Block(
            begin_s=begin_s,
            called_s=called_s,
            end_s=end_s,
            steps=tuple(steps),
            calls_s=called_s - begin_s + after_steps_s if saves else 0.0,
            causes={cause: s - stalls[cause] for cause, s in arm.stalls().items()} if saves else {},
            within_s=within_s,
            device_s=_on_device_s(steps) if saves else None,
            staged_s=None if pending is None else pending.staged_s,
            done_s=None if pending is None else pending.done_s,
            sync_s=sync_s,
            after_s=after_s,
            persist_s=None if written_s is None or persist_s is None else written_s - persist_s,
            trainer_cpu_s=trainer_s,
            helper_cpu_s=sum(map(cpu_s, helpers)) - helpers_s,
            peak_bytes=None if peak_bytes is None else max(0, peak_bytes),
            helper_bytes=sum(map(private_bytes, helpers)),
            writers_s=self._writers.wait(),
            others_cores=max(0.0, others_s / (end_s - begin_s)),
            copies=arm.copies(),
        )

    def _steps(
        self, arm: Arm, every: int, pending: Pending | None
    ) -> tuple[list[Step], float, float | None]:
        """Trains for a block, and on until the save is done.

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

    @contextlib.contextmanager
    def _peer_may_fail(self, opened: _Opened) -> Iterator[None]:
        """A library that does not work on this machine is reported in its row."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's own is no Exception
            if opened.arm.role != "peer" or self._signals:
                raise
            opened.error = _in_a_line(error)


def _on_device_s(steps: Sequence[Step]) -> float | None:
    found = [step.device_s for step in steps if step.device_s is not None]
    return sum(found) if found else None


def _in_a_line(error: BaseException) -> str:
    """The error of a library, which may bring the traceback of another process along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{type(error).__name__}: {text}"


def _row(opened: _Opened) -> Row:
    row = Row.of(opened.arm)
    row.error = opened.error
    row.held_bytes = opened.held_bytes
    row.probe_s = opened.probe_s
    return row


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
    return ours_arm(
        name,
        loop,
        folder,
        placement,
        device=options.device,
        link_bytes_per_s=options.link_bytes_per_s,
    )


def _check_room(options: StallOptions, machine: Machine, size_bytes: int, folder: Path) -> None:
    """Looks before anything is written."""
    arms = len(options.names()) - 1
    disk = _COPIES_ON_DISK * (arms + options.writers) * size_bytes
    memory = int(_COPIES_IN_MEMORY * arms * size_bytes) + arms * _KEEPER_BYTES + _MEMORY_BESIDES
    multistep = sum(name.startswith("gockpt") for name in options.names())
    memory += int(multistep * (_COPIES_OF_MULTISTEP * size_bytes + _TORCH_BYTES))
    memory += options.writers * (size_bytes + _WRITER_BYTES)
    refuse_without_room(
        machine,
        folder,
        disk_bytes=disk,
        memory_bytes=memory,
        hint="fewer --params, or fewer --arms",
    )
