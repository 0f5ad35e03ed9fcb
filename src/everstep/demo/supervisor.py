"""Runs the plan: two trainings, kills, one comparison."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.demo.evidence import Survey, final_base, survey
from everstep.demo.keepers import end_keeper, held_step
from everstep.demo.plan import AFTER_CAPTURED, DemoPlan, Kill, logs
from everstep.demo.process import CHILD_COMMAND, Child, child_environment
from everstep.demo.report import DemoReport, KillReport
from everstep.demo.show import Display
from everstep.demo.verdict import (
    Difference,
    Verdict,
    compare_entries,
    compare_fingerprints,
    compare_losses,
    read_base,
)
from everstep.demo.workspace import interruptible, private_keepers, workspace
from everstep.errors import EverstepError, KeeperError
from everstep.workloads import stdlib_text

__all__ = ["DemoError", "run_demo"]

LOST_STEPS_MAX = 1  # the one in flight, of those that are logged
_POLL_S = 0.01
_SILENCE_S = 90.0  # a child that says nothing for so long has hung
_STEPS_TIMED = 8


class DemoError(EverstepError):
    """A child, or its keeper, did something else than the plan says."""


def run_demo(
    plan: DemoPlan,
    display: Display,
    *,
    folder: Path | None = None,
    child_command: Sequence[str] = CHILD_COMMAND,
) -> DemoReport:
    """Runs the demo; whatever happens, no child, no keeper and no temporary folder is left.

    Args:
        plan: from :func:`demo_plan`.
        display: where progress is shown.
        folder: kept with all that is in it; must be new or empty (default: temporary).
        child_command: starts a training process; its options are appended.

    Raises:
        DemoError: when a child dies, ends or hangs other than planned.
        OptionError: when ``folder`` holds something already.
        KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, after the children are gone.
    """
    with interruptible(), workspace(folder) as place, private_keepers(place):
        run = _Run(plan, display, place, child_command)
        try:
            return run.execute()
        finally:
            run.end()


class _Run:
    def __init__(
        self, plan: DemoPlan, display: Display, workspace: Path, command: Sequence[str]
    ) -> None:
        self._plan = plan
        self._display = display
        self._workspace = workspace
        self._command = command
        self._children: list[Child] = []
        self._text = workspace / "text.bin"
        self._killed = workspace / "killed"

    def execute(self) -> DemoReport:
        begin_s = time.monotonic()
        self._text.write_bytes(stdlib_text(self._plan.text_bytes))
        # Its one base takes the shortest way to the disk: no keeper process, nothing to recover.
        alone = self._start("uninterrupted", every=0, keeper="thread")
        starts, kills = self._kill_and_restart(alone)
        victim = starts[-1]
        self._follow(alone, victim, until=lambda: _ended(alone) and _ended(victim))
        end_keeper(self._killed)  # after close() it ends by itself; here is no hurry
        self._display.event("both runs are at their last step: comparing")
        verdict = self._compare(alone, starts, kills)
        losses = [float.fromhex(loss) for _, loss in alone.losses]
        seconds = time.monotonic() - begin_s
        return DemoReport(self._plan, tuple(kills), verdict, losses[0], losses[-1], seconds)

    def end(self) -> None:
        """Ends whatever is left of the children and their keeper."""
        try:
            for child in self._children:
                child.kill()
        finally:
            end_keeper(self._killed)

    def _kill_and_restart(self, alone: Child) -> tuple[list[Child], list[KillReport]]:
        """Goes through the planned kills; returns all processes of the run and their reports."""
        kills: list[KillReport] = []
        starts = [self._start_victim(1, self._plan.kills[0], recoverable=0)]
        for number, kill in enumerate(self._plan.kills, 1):
            victim = starts[-1]
            self._die(alone, victim, kill)
            dead_s = time.monotonic()
            left = survey(self._killed, held=self._held(victim, kill))
            reason = left.contradicts(kill)
            if reason is not None:
                raise DemoError(f"{victim.name} died elsewhere than planned: {reason}")
            kill = _as_it_fell(kill, left)
            self._display.event(f"killed {kill.died}: {kill.describe()}; left: {left.describe()}")
            following = self._plan.kills[number] if number < len(self._plan.kills) else None
            starts.append(
                self._start_victim(
                    number + 1, following, recoverable=max(left.complete, left.logged)
                )
            )
            again = starts[-1]
            resumed = functools.partial(_has_resumed, again)
            self._follow(alone, again, until=resumed, kill=following)
            kills.append(_kill_report(kill, left, victim, again, dead_s))
            self._display.event(f"back at step {kills[-1].recovered}, from {kills[-1].source}")
        return starts, kills

    def _held(self, victim: Child, kill: Kill) -> int | None:
        """What a keeper that was spared says that it has in memory."""
        if kill.keeper != "spared":
            return None
        try:
            return held_step(self._killed)
        except KeeperError as error:
            raise DemoError(
                f"{victim.name} was killed and its keeper was to live, but: {error.message}"
            ) from error

    def _die(self, alone: Child, victim: Child, kill: Kill) -> None:
        """Returns when the victim is dead as planned."""
        if kill.is_failpoint:
            self._follow(alone, victim, until=lambda: victim.status is not None, kill=kill)
            return
        self._follow(alone, victim, until=lambda: victim.step >= kill.step)
        times_s = [event["at_s"] for event in victim.events if event["event"] == "step"]
        gaps_s = [b - a for a, b in itertools.pairwise(times_s)][-_STEPS_TIMED:]
        step_s = statistics.median(gaps_s) if gaps_s else 0.0
        reached_s = [event["at_s"] for event in victim.events if event.get("step", 0) >= kill.step]
        moment_s = reached_s[0] + kill.fraction * step_s
        self._follow(alone, victim, until=lambda: time.monotonic() >= moment_s)
        victim.kill()
        victim.poll()
        if victim.status != -signal.SIGKILL:
            raise DemoError(f"{victim.name} was gone before it could be killed")

    def _follow(
        self, alone: Child, victim: Child, *, until: Callable[[], bool], kill: Kill | None = None
    ) -> None:
        """Watches both children until the condition holds.

        Args:
            kill: what the victim may die of meanwhile, if it dies after the condition holds.

        Raises:
            DemoError: when one of them dies, ends or hangs otherwise.
        """
        while True:
            alone.poll()
            victim.poll()
            self._display.progress(alone.position, victim.position)
            self._check(alone, None)
            self._check(victim, kill)
            if until():
                return
            if victim.status:
                assert kill is not None
                raise DemoError(f"{victim.name} died too early of the kill: {kill.describe()}")
            time.sleep(_POLL_S)

    def _check(self, child: Child, kill: Kill | None) -> None:
        """Raises if ``child`` has hung, or ended in a way that was not planned."""
        status = child.status
        planned = kill is not None and kill.is_failpoint
        if status is None:
            if time.monotonic() - child.heard_s <= _SILENCE_S:
                return
            child.kill()
            what = f"said nothing for {_SILENCE_S:g} s and was killed"
        elif status == (-signal.SIGKILL if planned else 0):
            if planned or child.finished is not None:
                return
            what = "ended without a last report"
        elif status == 0:
            assert kill is not None
            what = f"ended by itself, not by the planned kill ({kill.describe()}),"
        else:
            how = f"died by signal {-status}" if status < 0 else f"ended with status {status}"
            what = f"{how}, which nobody planned,"
        tail = child.log_tail() or "(nothing)"
        raise DemoError(f"{child.name} {what} at step {child.step}; its last output:\n{tail}")

    def _compare(
        self, alone: Child, starts: Sequence[Child], kills: Sequence[KillReport]
    ) -> Verdict:
        steps = self._plan.steps
        left = read_base(final_base(self._workspace / "uninterrupted", steps))
        right = read_base(final_base(self._killed, steps))
        described = [_fingerprint(child) for child in (alone, starts[-1])]
        found = [child.losses for child in starts]
        differences = [
            *compare_entries(left, right),
            *compare_fingerprints(*described),
            *compare_losses(steps, alone.losses, found),
            *_broken_promises(kills, self._plan.method),
        ]
        again = sum(map(len, found)) - len({step for losses in found for step, _ in losses})
        size_mb = sum(len(entry.data) for entry in left.values()) / 1e6
        compared = (
            f"{len(left)} entries of the final checkpoints, {size_mb:.1f} MB (model, both moments "
            "and step counters of AdamW, schedule, data order, random generators)",
            f"{len(described[0])} tensors and values of the live states, described by other code",
            f"{steps} losses, and {again} of steps that had to be taken again",
        )
        return Verdict(compared, tuple(differences))

    def _start_victim(self, number: int, kill: Kill | None, *, recoverable: int) -> Child:
        failpoints = ""
        if kill is not None and kill.is_failpoint:
            # The process will go on from the step ``recoverable``; count its saves from there.
            # (After a kill that spares the keeper it may go on from a later one: there the
            # next kill should be none that counts saves.)
            every = self._plan.every
            hit = max(1, kill.step // every - recoverable // every)
            if logs(self._plan.method) and (recoverable + 1) % every:
                hit += 1  # its log begins with a base of its own, at the next step
            failpoints = f"{kill.where}=kill:{hit}"
        # A keeper that dies with its trainer is a thread of it, and so shares its failpoints.
        keeper = "thread" if kill is not None and kill.keeper == "dies" else "process"
        return self._start(
            "killed",
            every=self._plan.every,
            keeper=keeper,
            failpoints=failpoints,
            number=number,
        )

    def _start(
        self, run: str, *, every: int, keeper: str, failpoints: str = "", number: int = 1
    ) -> Child:
        plan = self._plan
        model = self._plan.model
        options = {
            "run": self._workspace / run,
            "text": self._text,
            "method": plan.method,
            "keeper": keeper,
            "steps": plan.steps,
            "seed": plan.seed,
            "every": every,
            "keep": plan.keep,
            "batch": plan.batch,
            "layers": model.layers,
            "width": model.width,
            "heads": model.heads,
            "context": model.context,
        }
        command = [*self._command]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        child = Child(f"{run}-{number}", command, self._workspace, child_environment(failpoints))
        self._children.append(child)
        return child


def _as_it_fell(kill: Kill, left: Survey) -> Kill:
    """The kill with the base that it really hit, as it is on disk or in the keeper's memory."""
    if not kill.is_failpoint:
        return kill
    base = left.held if kill.where == AFTER_CAPTURED else left.unfinished
    return kill if base is None else dataclasses.replace(kill, step=base)


def _kill_report(
    kill: Kill, left: Survey, victim: Child, again: Child, dead_s: float
) -> KillReport:
    resumed = again.resumed
    assert resumed is not None
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


def _broken_promises(kills: Sequence[KillReport], method: str) -> list[Difference]:
    """What was committed, or captured whole with a keeper that lives, comes back; and it comes
    from where it can be."""
    details = [(number, _broken_promise(report, method)) for number, report in enumerate(kills, 1)]
    return [
        Difference("recovery", f"kill {number}", detail)
        for number, detail in details
        if detail is not None
    ]


def _broken_promise(report: KillReport, method: str) -> str | None:
    kill = report.kill
    left = report.left
    back = f"step {report.recovered} came back, from {report.source}"
    if left.held is None and report.source == "memory":
        return f"{back}, but nobody was left who had it in memory"
    if logs(method):
        if report.lost > LOST_STEPS_MAX:
            return f"every step was logged and step {report.reached} was reached, but {back}"
    elif kill.where == AFTER_CAPTURED and (report.recovered, report.source) != (
        kill.step,
        "memory",
    ):
        return f"base {kill.step} was in the memory of a keeper that lived, but {back}"
    if left.held is not None and report.recovered < left.held:
        return f"base {left.held} was in the memory of a keeper that lived, but {back}"
    if report.recovered < left.committed:
        return f"base {left.committed} was committed, but {back}"
    if report.recovered > report.reached:
        return f"step {report.reached} was the last, but {back}"
    return None


def _has_resumed(child: Child) -> bool:
    return child.resumed is not None


def _ended(child: Child) -> bool:
    return child.status == 0


def _fingerprint(child: Child) -> dict[str, str]:
    finished = child.finished
    assert finished is not None
    described: dict[str, str] = finished["fingerprint"]
    return described
