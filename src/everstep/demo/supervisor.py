"""Run the plan: two trainings, several kills, one comparison.

One child process: start it, follow its journal, kill it by its process id.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from everstep.demo.plan import AFTER_CAPTURED, DemoPlan, Kill
from everstep.demo.report import (
    DemoReport,
    KillReport,
    Survey,
    broken_promises,
    compare_entries,
    final_base,
    read_base,
    survey,
)
from everstep.demo.show import Display
from everstep.errors import EverstepError
from everstep.testing.keepers import end_keeper, held_step
from everstep.workloads import stdlib_text
from everstep.workloads.comparison import (
    Difference,
    Event,
    JournalReader,
    compare_fingerprints,
    compare_losses,
)
from everstep.workloads.processes import interruptible, training_environment, workspace

CHILD_COMMAND: tuple[str, ...] = (sys.executable, "-m", "everstep.demo.child")

_TAIL_BYTES = 4000
_REAP_TIMEOUT_S = 10.0


class Child:
    """A training process, started by the constructor.

    Args:
        name: shown to users, and the name of its files in ``folder``.
        command: program and arguments; the paths of order and parent id are appended.
        folder: working directory; receives order, journal and log.
        order: the contents of the order file, see :mod:`everstep.demo.child`.

    Attributes:
        events: journal entries read so far.
        heard_s: monotonic time of the last new entry.
        status: exit status as of the last :meth:`poll`; None while it runs, minus the
            signal's number if a signal ended it.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, order: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self.status: int | None = None
        self.heard_s = time.monotonic()
        self._log = folder / f"{name}.log"
        self._reader = JournalReader(folder / f"{name}.jsonl")
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**order, "journal": str(folder / f"{name}.jsonl")}))
        command = [*command, str(path), str(os.getpid())]
        with self._log.open("wb") as log:
            self._process = self._start(command, folder, training_environment(), log)

    def _start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: BinaryIO
    ) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C reaches the supervisor only, which ends its children.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )

    def report(self, kind: str) -> Event:
        """Return the event ``"resumed"`` or ``"finished"``; an empty one before it."""
        return next((event for event in self.events if event["event"] == kind), {})

    @property
    def steps(self) -> list[Event]:
        """The events of the steps that this process has taken."""
        return [event for event in self.events if event["event"] == "step"]

    @property
    def step(self) -> int:
        """The last step it has reported, taken or resumed; 0 before."""
        return next((event["step"] for event in reversed(self.events) if "step" in event), 0)

    @property
    def position(self) -> tuple[int, float | None]:
        """The last step it has reported, and its loss; None before its first own step."""
        taken = self.steps
        return self.step, float.fromhex(taken[-1]["loss"]) if taken else None

    @property
    def losses(self) -> list[tuple[int, str]]:
        """``(step, loss in hexadecimal)`` of every step it has taken."""
        return [(event["step"], event["loss"]) for event in self.steps]

    def poll(self) -> None:
        """Read new journal entries, and the exit status once there is one."""
        status = self._process.poll()  # before reading: then no entry can come after the read
        new = self._reader.read_new()
        if new:
            self.heard_s = time.monotonic()
            self.events += new
        self.status = status

    def kill(self) -> None:
        """Send SIGKILL to this process and wait for its end; do nothing if it has ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=_REAP_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return the end of its standard output and error."""
        return self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()


_POLL_S = 0.01
_SILENCE_S = 90.0  # a child without a new journal entry for so long has hung


class DemoError(EverstepError):
    """A child, or its keeper, deviated from the plan."""


def run_demo(
    plan: DemoPlan,
    display: Display,
    *,
    folder: Path | None = None,
    child_command: Sequence[str] = CHILD_COMMAND,
) -> DemoReport:
    """Run the demo; always end its children and keepers, and remove its temporary folder.

    Args:
        plan: from :func:`demo_plan`.
        display: receives progress.
        folder: kept with everything in it; must be new or empty (default: temporary).
        child_command: starts a training process; its arguments are appended.

    Raises:
        DemoError: when a child dies, ends or hangs against the plan.
        OptionError: when ``folder`` is not empty.
        KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, after the children have ended.
    """
    with interruptible(), workspace(folder, "demo") as place:
        run = _Run(plan, display, place, child_command)
        try:
            return run.execute()
        finally:
            run.end()


class _Run:
    def __init__(
        self, plan: DemoPlan, display: Display, place: Path, command: Sequence[str]
    ) -> None:
        self._plan = plan
        self._display = display
        self._place = place
        self._command = command
        self._children: list[Child] = []
        self._killed = place / "killed"
        self._kills = [*plan.kills, None]  # by process: no kill ends the last one

    def execute(self) -> DemoReport:
        begin_s = time.monotonic()
        (self._place / "text.bin").write_bytes(stdlib_text(self._plan.text_bytes))
        # Its one base takes the shortest way to the disk: no keeper process.
        alone = self._start("uninterrupted-1", every=None, keeper="thread")
        starts = [self._start_victim(0)]
        kills = [self._kill(alone, starts, kill) for kill in self._plan.kills]
        self._follow(alone, starts[-1], until=lambda: alone.status == starts[-1].status == 0)
        end_keeper(self._killed)  # it would end by itself, but later
        self._display.event("both runs are at their last step: comparing")
        compared, differences = self._compare(alone, starts, kills)
        losses = [float.fromhex(loss) for _, loss in alone.losses]
        return DemoReport(
            plan=self._plan,
            kills=tuple(kills),
            compared=compared,
            differences=differences,
            loss_first=losses[0],
            loss_last=losses[-1],
            seconds=time.monotonic() - begin_s,
        )

    def end(self) -> None:
        """End all children and their keeper."""
        try:
            for child in self._children:
                child.kill()
        finally:
            end_keeper(self._killed)

    def _kill(self, alone: Child, starts: list[Child], kill: Kill) -> KillReport:
        """Carry out one planned kill, start the process that follows, and wait for its resume."""
        victim = starts[-1]
        self._die(alone, victim, kill)
        dead_s = time.monotonic()
        left = survey(self._killed, held_step(self._killed) if kill.keeper == "spared" else None)
        if kill.is_failpoint:
            kill = dataclasses.replace(kill, step=self._interrupted(victim, kill, left))
        self._display.event(f"killed {kill.died}: {kill.describe()}; left: {left.describe()}")
        following = self._kills[len(starts)]
        again = self._start_victim(len(starts))
        starts.append(again)
        self._follow(alone, again, until=lambda: bool(again.report("resumed")), kill=following)
        resumed = again.report("resumed")
        self._display.event(f"back at step {resumed['step']}, from {resumed['source']}")
        return KillReport(
            kill=kill,
            left=left,
            reached=victim.step,
            recovered=resumed["step"],
            resume_s=resumed["seconds"],
            back_s=resumed["at_s"] - dead_s,
            exact=resumed["exact"],
            evidence=resumed["evidence"],
            source=resumed["source"],
        )

    def _die(self, alone: Child, victim: Child, kill: Kill) -> None:
        """Wait until the victim has died as planned; kill it if the plan names a moment."""
        if kill.is_failpoint:
            self._follow(alone, victim, until=lambda: victim.status is not None, kill=kill)
            return
        self._follow(alone, victim, until=lambda: victim.step >= kill.step)
        # A fraction of a step after the end of that step, by the duration of the one before.
        times_s = [event["at_s"] for event in victim.steps] or [time.monotonic()]
        moment_s = times_s[-1] + kill.fraction * (times_s[-1] - times_s[-2:][0])
        self._follow(alone, victim, until=lambda: time.monotonic() >= moment_s)
        victim.kill()
        victim.poll()
        if victim.status != -signal.SIGKILL:
            raise DemoError(f"{victim.name} ended before it could be killed")

    def _interrupted(self, victim: Child, kill: Kill, left: Survey) -> int:
        """Return the step of the base that a kill inside a save has interrupted.

        Raises:
            DemoError: the process died at another step than planned, or in no such base.
        """
        base = left.held if kill.where == AFTER_CAPTURED else left.unfinished
        # Armed at the planned step, the failpoint may be reached by a base that is still being
        # written then: the one before.
        first = kill.step - self._plan.every
        if victim.step < kill.step or base is None or not first <= base <= kill.step:
            raise DemoError(
                f"{victim.name} died at step {victim.step}, against the plan ({kill.describe()}); "
                f"left: {left.describe()}"
            )
        return base

    def _follow(
        self, alone: Child, victim: Child, *, until: Callable[[], bool], kill: Kill | None = None
    ) -> None:
        """Poll both children until the condition holds.

        Args:
            kill: a kill that the victim may die of, once the condition holds.

        Raises:
            DemoError: when a child dies, ends or hangs against the plan.
        """
        while True:
            alone.poll()
            victim.poll()
            self._display.progress(alone.position, victim.position)
            _check(alone, None)
            _check(victim, kill)
            if until():
                return
            if victim.status:
                raise DemoError(f"{victim.name} died of its planned kill, but too early")
            time.sleep(_POLL_S)

    def _compare(
        self, alone: Child, starts: Sequence[Child], kills: Sequence[KillReport]
    ) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
        """Return the things that were compared, in words, and everything that differs."""
        steps = self._plan.training.steps
        left = read_base(final_base(self._place / "uninterrupted", steps))
        right = read_base(final_base(self._killed, steps))
        described = [child.report("finished")["fingerprint"] for child in (alone, starts[-1])]
        found = [child.losses for child in starts]
        differences = [
            *compare_entries(left, right),
            *compare_fingerprints(*described),
            *compare_losses(steps, alone.losses, found),
            *broken_promises(kills, self._plan.method),
        ]
        again = sum(map(len, found)) - len({step for losses in found for step, _ in losses})
        size_mb = sum(len(entry.data) for entry in left.values()) / 1e6
        compared = (
            f"{len(left)} entries of the final checkpoints, {size_mb:.1f} MB (model, both moments "
            "and step counters of AdamW, schedule, data order, random generators)",
            f"{len(described[0])} tensors and values of the live states, described by other code",
            f"{steps} losses, and {again} of steps that had to be taken again",
        )
        return compared, tuple(differences)

    def _start_victim(self, number: int) -> Child:
        """Start the process that kill ``number`` ends."""
        kill = self._kills[number]
        # A keeper that dies with its trainer is a thread of it, and so shares its failpoints.
        keeper = "thread" if kill is not None and kill.keeper == "dies" else "process"
        return self._start(f"killed-{number + 1}", self._plan.every, keeper, kill)

    def _start(self, name: str, every: int | None, keeper: str, kill: Kill | None = None) -> Child:
        plan = self._plan
        order = {
            "run": str(self._place / name.rpartition("-")[0]),
            "text": str(self._place / "text.bin"),
            "model": dataclasses.asdict(plan.model),
            "training": dataclasses.asdict(plan.training),
            "every": every,
            "keeper": keeper,
            "failpoint": kill.where if kill is not None and kill.is_failpoint else None,
            "fails_at": kill.step if kill is not None and kill.is_failpoint else None,
            "method": plan.method,
        }
        child = Child(name, self._command, self._place, order)
        self._children.append(child)
        return child


def _check(child: Child, kill: Kill | None) -> None:
    """Raise if ``child`` has hung, or ended against the plan."""
    status = child.status
    dies = kill is not None and kill.is_failpoint
    if status is None and time.monotonic() - child.heard_s <= _SILENCE_S:
        return
    if status == (-signal.SIGKILL if dies else 0) and (dies or child.report("finished")):
        return
    child.kill()
    fault = f"reported nothing for {_SILENCE_S:g} s and was killed"
    if status is not None:
        fault = f"ended with status {status}, against the plan,"
    tail = child.log_tail() or "(nothing)"
    raise DemoError(f"{child.name} {fault} at step {child.step}; its last output:\n{tail}")
