"""The end of a training process: last bases, lost steps, and the keeper that stays or goes.

A run ends in one of three ways. ``close()`` takes a last base if state would be lost otherwise,
waits until everything is durable, and reports every failure. A script that ends without ``close()``
gets the same from :func:`finish_at_exit`, except for a last base of the log. After an error, the
keeper may have to stay: its memory may hold the only copy of some steps.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from everstep.config.options import Options
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    KeeperError,
)
from everstep.link.channel import BackgroundChannel
from everstep.link.save import Save
from everstep.restore.load.nonfinite import nonfinite_parameter
from everstep.seams.stderr import print_line, print_line_to
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.base.saver import Saver
from everstep.trainer.log.log_memory import LogMemory
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.schedule.saver import ScheduledSaver
from everstep.trainer.session.calls import CallGuard
from everstep.trainer.session.components import Components
from everstep.trainer.session.replica_bases import ReplicaBases
from everstep.trainer.session.state_watch import StateWatch

__all__ = [
    "AtExit",
    "finish_at_exit",
    "is_lost",
    "must_stay",
    "needs_last_base",
    "persist_parked",
    "raise_first",
    "report_lost_bases",
    "report_lost_steps",
    "retake_failed_base",
    "save_memory_base",
    "skips_last_base",
    "stays_for_log",
    "take_last_base",
    "wait_and_collect",
    "wait_for_bases",
]

_log = logging.getLogger("everstep")


class AtExit:
    """Finish the last base of a script that ends without ``close()``.

    Args:
        calls: calls of other threads, which are refused from then on. A daemon thread that keeps
            training would take base after base, and each would be waited for.
    """

    def __init__(self, calls: CallGuard) -> None:
        self._calls = calls
        self._job: Callable[[], None] | None = None

    def arm(
        self,
        components: Components,
        keeper: Keeper,
        abandon: Callable[[], None],
        *,
        stay: bool,
    ) -> None:
        """Finish ``keeper`` at the exit of this process.

        Args:
            abandon: function to call first.
            stay: True to leave the keeper with its memory, as if this process had crashed.
        """
        self.disarm()

        def end_training() -> None:
            self._calls.last()
            abandon()

        # With a replica, the records are in its state, too.
        has_log = components.recorder is not None and not components.replica_bases
        rooms = components.recorder.memory if has_log and components.recorder else None
        self._job = partial(
            finish_at_exit,
            components.saver,
            keeper,
            end_training,
            os.getpid(),
            sys.stderr,
            rooms,
            stay=stay,
        )
        atexit.register(self._job)

    def disarm(self) -> None:
        """Do nothing at exit."""
        if self._job is not None:
            atexit.unregister(self._job)
        self._job = None


def wait_for_bases(saver: Saver, keeper: Keeper, timeout_s: float | None) -> None:
    """Wait until all bases are durable, including those taken in place of lost ones."""
    keeper.wait(timeout_s)
    if saver.retake_lost_base():
        saver.finish_captures()
        keeper.wait(timeout_s)


def wait_and_collect(
    wait: Callable[[], None], unavailable: Callable[[], bool], again: Callable[[], bool]
) -> list[EverstepError]:
    """Wait until everything is durable or has failed; return the failures.

    Args:
        wait: function that raises one failure at a time. One failed base is no reason to abandon
            the next ones.
        unavailable: function that returns True if there is no keeper left to wait for.
        again: function that takes a failed base once more if that may succeed, and returns True if
            it did so.
    """
    failed: list[EverstepError] = []
    while True:
        try:
            wait()
            if not again():
                return failed
        except EverstepError as error:
            failed.append(error)
            if isinstance(error, DeadlineError) or unavailable():
                return failed


def raise_first(failed: Sequence[EverstepError]) -> None:
    """Raise the first failure and log the others."""
    for other in failed[1:]:
        _log.error("another background operation failed: %s", other)
    if failed:
        raise failed[0]


def finish_at_exit(
    saver: Saver,
    keeper: Keeper,
    abandon: Callable[[], None],
    pid: int,
    shown: Any,
    rooms: LogMemory | None = None,
    *,
    stay: bool = False,
) -> None:
    """Make the last base durable when a script ends without ``close()``.

    The keeper keeps the log after that base in memory, as if this process had crashed.

    Args:
        abandon: function to call first; gives up operations in progress among several ranks.
        pid: process that made the Checkpointer.
        shown: stream for messages.
        rooms: memory of the log; None without a log, or with a replica.
        stay: True to leave everything to the keeper, which keeps the log, too. Another rank may
            have died, and all ranks need this one's log to resume.
    """
    if os.getpid() != pid:
        return  # a forked child has inherited the exit handler, but owns nothing
    abandon()
    if stay:
        with contextlib.suppress(EverstepError):
            saver.finish_captures()
        _report_lost_keeper(keeper, shown)
        keeper.close(stay=True)
        return
    while True:
        try:
            saver.finish_captures()
            if isinstance(saver, ScheduledSaver):
                saver.persist_parked()
            wait_for_bases(saver, keeper, None)
            break
        except EverstepError as error:
            if not saver.is_keeper_loss(error):
                print_line_to(shown, f"everstep: a base was lost at exit: {error}")
            if isinstance(error, DeadlineError):
                break
    _report_lost_keeper(keeper, shown)
    stays = rooms is not None and rooms.is_ahead
    if stays:
        _report_log_holder(keeper, "this script ended without close()", shown)
    keeper.close(stay=stays)


def _report_log_holder(keeper: Keeper | None, why: str, shown: Any) -> bool:
    """Print which process holds the log after the newest base; return False if none does."""
    if keeper is None or keeper.pid is None or keeper.lost is not None:
        return False
    print_line_to(
        shown,
        f"everstep: {why}: the steps after the newest base are in the memory of the keeper "
        f"(process {keeper.pid}) for a while; a resume() within that time restores them",
    )
    return True


def _report_lost_keeper(keeper: Keeper, shown: Any) -> None:
    """Print the loss of a keeper that will not be replaced."""
    if keeper.lost is not None:
        steps = ", ".join(map(str, sorted(keeper.lost_steps)))
        bases = f" (bases of steps {steps})" if steps else ""
        why = f"{keeper.lost.message}; resume() continues from the newest durable base"
        print_line_to(shown, f"everstep: data that was not durable{bases} was lost at exit: {why}")


def skips_last_base(run: PurePath, step: int, recorder: Recorder | None, state: State) -> bool:
    """Return True if no last base is taken because the parameters are not finite.

    Prints a message in that case.
    """
    bad = None if recorder is None else recorder.nonfinite.first
    if recorder is None or bad is None or not nonfinite_parameter(state):
        return False
    recorder.nonfinite.given_up = True
    before = (
        ""
        if bad.step is None
        else f"; to keep the state before, call ckpt.rewind({bad.step - 1}) first"
    )
    print_line(
        f"everstep: {run}: no last base of step {step} is taken, as its parameters are not finite "
        f"({bad.message}); to take one, call ckpt.save() before close(){before}"
    )
    return True


def needs_last_base(run: PurePath, step: int, recorder: Recorder | None, state: State) -> bool:
    """Return True if a last base is needed because the log in memory ends with this process."""
    if recorder is None or step <= recorder.base_step:
        return False
    return not skips_last_base(run, step, recorder, state)


def stays_for_log(run: PurePath, step: int, options: Options, keeper: Keeper) -> bool:
    """Return True if the keeper must stay, because no last base can be taken of the last step.

    The state was changed since the last step mark, so only the log in the keeper's memory has that
    step. Prints a message.
    """
    if options.log is None or options.log.to != "memory":
        return False
    stays = keeper.pid is not None and keeper.lost is None
    if keeper.lost is not None and keeper.replaced:
        print_line(
            f"everstep: {run}: no last base of step {step} is taken: another process has taken "
            f"over the run, and continues without the steps trained here ({keeper.lost.message})"
        )
        return False
    where = f"is in the keeper's memory for {options.keeper.linger_s:g} s: resume within that time"
    if not stays:
        whose = "this process only" if keeper.pid is None else "a keeper that was lost"
        where = f"was in the memory of {whose}, and is lost with it"
    print_line(
        f"everstep: {run}: no last base of step {step} is taken: the state was changed since "
        f"(close() before the change takes one). The log since the newest base {where}"
    )
    return stays


def must_stay(
    run: PurePath,
    recorder: Recorder | None,
    keeper: Keeper | None,
    last: Save | None,
    *,
    completed: bool,
    needed: bool,
) -> bool:
    """Return True if ``close()`` must leave the keeper running.

    That is the case if the last base has failed or was interrupted, or was never tried because a
    resume was interrupted. Prints a message if only the keeper has the log.

    Args:
        last: the last base; None if none was taken.
        completed: True if ``close()`` was not interrupted.
        needed: True if other ranks need this rank's log, or only the keeper has bases.
    """
    if needed and (not completed or is_lost(last)):
        return True
    if recorder is None or recorder.nonfinite.given_up or not recorder.memory.is_ahead:
        return False
    return _report_log_holder(keeper, f"{run}: no last base", sys.stderr)


def persist_parked(saver: Saver, failed: list[EverstepError], *, again: bool) -> None:
    """Make the newest capture of a schedule durable, as captures end with this process.

    Args:
        failed: list that receives a failure.
        again: True to ignore the loss of the keeper: the next wait reports it and takes another
            base.
    """
    if not isinstance(saver, ScheduledSaver):
        return
    try:
        saver.finish_captures()
        saver.persist_parked()
    except EverstepError as error:
        if not (again and saver.is_keeper_loss(error)):
            failed.append(error)


def take_last_base(
    survey: Survey, take: Callable[[Survey], None], failed: list[EverstepError]
) -> bool:
    """Take the last base; return True if it was started.

    Args:
        take: function that takes a base of a survey.
        failed: list that receives a failure.
    """
    try:
        take(survey)
    except EverstepError as error:
        failed.append(error)
        return False
    return True


def retake_failed_base(
    replica_bases: ReplicaBases | None,
    state_watch: StateWatch,
    take: Callable[[Survey], None],
    failed: list[EverstepError],
) -> bool:
    """Capture the last base if the keeper's replica has failed to make it.

    The replica may have stopped, or the base that it was to begin with has failed.

    Args:
        take: function that takes a base of a survey.
        failed: list that receives a failure.

    Returns:
        True if a base was started.
    """
    if replica_bases is None or not replica_bases.has_failed():
        return False
    survey = state_watch.survey_at_mark
    return survey is not None and take_last_base(survey, take, failed)


def save_memory_base(
    run: PurePath,
    survey: Survey | None,
    take: Callable[[Survey], None],
    failed: list[EverstepError],
) -> bool:
    """Write a last base to disk when the newest one is in the memory of keepers only.

    Args:
        survey: state at the last step mark; None if it was changed since.
        take: function that takes a base of a survey.
        failed: list that receives a failure.

    Returns:
        True if the keeper must stay because no base was written. Prints a message then.
    """
    if survey is not None:
        return not take_last_base(survey, take, failed) or bool(failed)
    print_line(
        f"everstep: {run}: no last base is taken: the state was changed since the last step "
        "(close() before the change takes one). The newest base stays in the keeper's memory for a "
        "while: resume within that time"
    )
    return True


def is_lost(save: Save | None) -> bool:
    """Return True if a base is not durable, so that the log's records are in no base.

    Another rank may have no such base, and its keeper stays with its log. A resume of all ranks
    needs this rank's log, too.
    """
    return save is not None and not (save.durable.done() and save.durable.exception() is None)


def report_lost_bases(
    save: Save | None, before: Keeper, keepers: Keepers, channel: BackgroundChannel, *, alone: bool
) -> None:
    """Report bases that were lost with a keeper, after it was replaced.

    Args:
        save: base taken in place of the lost ones, if any.
        before: the lost keeper.
        alone: True with a single rank. Other ranks are notified by their keepers.
    """
    _report_second_loss(save, keepers.lost, channel)
    if not alone:
        _report_base_lost_on_all_ranks(before, channel)


def report_lost_steps(
    step: int,
    keepers: Keepers,
    options: Options,
    channel: BackgroundChannel,
    failed: list[EverstepError],
) -> None:
    """Report the steps lost because a lost keeper could not be replaced before training ended.

    A keeper that now serves another process has been reported already.

    Args:
        step: the last step.
        failed: list that receives the error first, if the policy is to raise.
    """
    why = keepers.attempts.why_not
    durable_step = keepers.stats.durable_step
    if why is None or isinstance(why, FencedError) or step == (durable_step or 0):
        return
    base = (
        "there is no base" if durable_step is None else f"the newest base is of step {durable_step}"
    )
    but = ", except for those in the log on disk" if options.logs and options.log.on_disk else ""
    error = KeeperError(
        f"training has ended at step {step} without a keeper, because the lost one could not be "
        f"replaced: as far as is known, {base}, and later steps are lost{but}. {why.message}",
        step=step,
        path=why.path,
        hint=why.hint,
    )
    channel.post(error, first=True)
    try:
        channel.check()
    except EverstepError as raised:
        failed.insert(0, raised)


def _report_second_loss(
    save: Save | None, lost: EverstepError | None, channel: BackgroundChannel
) -> None:
    """Report that the base taken in place of a lost one was lost with the next keeper."""
    if save is None or lost is None or not is_lost(save):
        return
    channel.post(
        KeeperError(
            f"two keepers in a row were lost: no base of step {save.step} is durable. The second: "
            f"{lost.message}",
            step=save.step,
            hint="check with dmesg whether they were killed for memory; each call of save() or "
            "wait() tries again",
        )
    )


def _report_base_lost_on_all_ranks(keeper: Keeper, channel: BackgroundChannel) -> None:
    """Report a base that no rank has because it was lost with this rank's keeper.

    The other ranks learn it from their keepers.
    """
    if keeper.lost is None or not keeper.lost_steps:
        return
    steps = sorted(keeper.lost_steps)
    bases = f"the base{'s'[: len(steps) > 1]} of step {', '.join(map(str, steps))}"
    channel.post(
        KeeperError(
            f"no rank has {bases}: {keeper.lost.message}",
            step=steps[-1],
            hint="training goes on; the next base is taken as usual",
        )
    )
