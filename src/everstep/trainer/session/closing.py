"""The beginning and the end of a training process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
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
from everstep.seams.messages import say, say_to
from everstep.state.image import State
from everstep.state.survey.survey import Survey
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers, release_keeper
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.calls import Calls
from everstep.trainer.base.saver import Saver
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.log.rooms import LogRooms
from everstep.trainer.schedule.scheduled_saver import ScheduledSaver
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
    """A script that ends without ``close()`` still gets its last base.

    Args:
        calls: of other threads are refused then: one that goes on training, as daemon threads do,
            would take base after base, each of which is waited for.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._job: Callable[[], None] | None = None

    def watch(
        self, parts: Components, keeper: Keeper, leave: Callable[[], None], *, stay: bool
    ) -> None:
        """From now on ``keeper`` is finished at the end of this process.

        Args:
            leave: called before.
            stay: it is not finished, but holds what it has, as if this process had died.
        """
        self.forget()

        def last() -> None:
            self._calls.last()
            leave()

        about = parts.saver, keeper, last, os.getpid(), sys.stderr
        # Without a replica nobody but the keeper has what is in its log.
        rooms = parts.recorder.rooms if parts.recorder and not parts.replica_bases else None
        self._job = lambda: finish_at_exit(*about, rooms, stay=stay)
        atexit.register(self._job)

    def forget(self) -> None:
        """Nothing is left to be done at exit."""
        if self._job is not None:
            atexit.unregister(self._job)
        self._job = None


def wait_for_bases(saver: Saver, keeper: Keeper, timeout_s: float | None) -> None:
    """Waits until all bases are durable, and what was taken in the place of a lost one, too."""
    keeper.wait(timeout_s)
    if saver.make_good():
        saver.finish_captures()
        keeper.wait(timeout_s)


def wait_and_collect(
    wait: Callable[[], None], unavailable: Callable[[], bool], again: Callable[[], bool]
) -> list[EverstepError]:
    """Waits until everything is durable or has failed; returns what failed.

    Args:
        wait: raises one failure at a time: one failed base is no reason to abandon those
            behind it.
        unavailable: whether nobody is left to wait for.
        again: takes what has failed again, where it may come right; whether it has.
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
    """Raises what failed first; says what else did."""
    for other in failed[1:]:
        _log.error("another background task failed: %s", other)
    if failed:
        raise failed[0]


def finish_at_exit(
    saver: Saver,
    keeper: Keeper,
    leave: Callable[[], None],
    pid: int,
    shown: Any,
    rooms: LogRooms | None = None,
    *,
    stay: bool = False,
) -> None:
    """For a script that ends without ``close()``: its last base becomes durable all the same. What
    the log has behind that the keeper goes on holding, as if this process had died.

    Args:
        leave: called before: what is under way among several ranks is given up.
        stay: the keeper sees to that, and holds the log: another rank may have died, and this
            one's log is needed for all of them to come back.
    """
    if os.getpid() != pid:
        return  # a forked child owns nothing here
    leave()
    if stay:
        with contextlib.suppress(EverstepError):
            saver.finish_captures()
        _tell_if_gone(keeper, shown)
        release_keeper(keeper, stay=True)
        return
    while True:
        try:
            saver.finish_captures()
            if isinstance(saver, ScheduledSaver):
                saver.persist_parked()
            wait_for_bases(saver, keeper, None)
            break
        except EverstepError as error:
            if not saver.is_loss(error):
                say_to(shown, f"everstep: a base was lost at exit: {error}")
            if isinstance(error, DeadlineError):
                break
    _tell_if_gone(keeper, shown)
    stays = rooms is not None and rooms.is_ahead
    if stays:
        _tell_who_has_the_log(keeper, "this script ended without close()", shown)
    release_keeper(keeper, stay=stays)


def _tell_who_has_the_log(keeper: Keeper | None, why: str, shown: Any) -> bool:
    """Says who has what the log in memory has behind the newest base; whether anyone has it."""
    if not isinstance(keeper, RemoteKeeper) or keeper.lost is not None:
        return False
    say_to(
        shown,
        f"everstep: {why}: the steps behind its newest base are in the memory of the keeper "
        f"(process {keeper.pid}) for a while; resume() has them",
    )
    return True


def _tell_if_gone(keeper: Keeper, shown: Any) -> None:
    """Nobody is left to put another in its place."""
    if isinstance(keeper, RemoteKeeper) and keeper.lost is not None:
        steps = ", ".join(map(str, sorted(keeper.lost_steps)))
        bases = f" (bases of steps {steps})" if steps else ""
        why = f"{keeper.lost.message}; resume() goes on from the newest base that is durable"
        say_to(shown, f"everstep: what was not durable{bases} was lost at exit: {why}")


def skips_last_base(run: PurePath, step: int, recorder: Recorder | None, state: State) -> bool:
    """Whether the end of training takes no base, since nobody would want to go on from it: its
    parameters are not finite. Says so."""
    bad = None if recorder is None else recorder.nonfinite.first
    if recorder is None or bad is None or not nonfinite_parameter(state):
        return False
    recorder.nonfinite.given_up = True
    before = "" if bad.step is None else f"; ckpt.rewind({bad.step - 1}) before it keeps what was"
    say(
        f"everstep: {run}: no last base is taken of step {step}, whose parameters are not finite "
        f"({bad.message}); ckpt.save() before it would{before}"
    )
    return True


def needs_last_base(run: PurePath, step: int, recorder: Recorder | None, state: State) -> bool:
    """Whether what the log in memory has is to be in a base, as that log ends with us."""
    if recorder is None or step <= recorder.base_step:
        return False
    return not skips_last_base(run, step, recorder, state)


def stays_for_log(run: PurePath, step: int, options: Options, keeper: Keeper) -> bool:
    """Whether the keeper is to stay with a log whose last step is in no base, since the state is
    no longer that of the step. Says so."""
    if options.log is None or options.log.to != "memory":
        return False
    remote = keeper if isinstance(keeper, RemoteKeeper) else None
    stays = remote is not None and remote.lost is None
    if remote is not None and remote.lost is not None and remote.replaced:
        say(
            f"everstep: {run}: no last base is taken of step {step}: another process has taken the "
            f"run over, and goes on without what was done here since ({remote.lost.message})"
        )
        return False
    where = f"is in the keeper's memory for {options.keeper.linger_s:g} s: resume within that time"
    if not stays:
        whose = "this process only" if remote is None else "a keeper that is gone"
        where = f"was in the memory of {whose}, and is lost with it"
    say(
        f"everstep: {run}: no last base is taken of step {step}: the state has been changed "
        f"since (close() before that takes one). What the log has since the newest base {where}"
    )
    return stays


def must_stay(
    run: PurePath,
    recorder: Recorder | None,
    keeper: Keeper | None,
    last: Save | None,
    *,
    over: bool,
    needed: bool,
) -> bool:
    """Whether the keeper is to stay behind a ``close()``: what was to make it superfluous failed,
    now or before, whoever has heard of it, or was interrupted, or was not even tried, as behind a
    resume that was. Says so, where nobody else has the log.

    Args:
        last: the base that was to hold what the log has, if one was taken.
        over: it was not interrupted.
        needed: other ranks need what it has, or it alone has bases.
    """
    if needed and (not over or is_lost(last)):
        return True
    if recorder is None or recorder.nonfinite.given_up or not recorder.rooms.is_ahead:
        return False
    return _tell_who_has_the_log(keeper, f"{run}: no last base", sys.stderr)


def persist_parked(saver: Saver, failed: list[EverstepError], *, again: bool) -> None:
    """The newest of captures of every step becomes durable, as they end with us.

    Args:
        failed: gets what fails.
        again: if its keeper is gone, whoever waits next says so, and takes a base anew.
    """
    if not isinstance(saver, ScheduledSaver):
        return
    try:
        saver.finish_captures()
        saver.persist_parked()
    except EverstepError as error:
        if not (again and saver.is_loss(error)):
            failed.append(error)


def take_last_base(
    survey: Survey, take: Callable[[Survey], None], failed: list[EverstepError]
) -> bool:
    """Takes the last base; returns whether that was begun.

    Args:
        failed: gets what fails.
    """
    try:
        take(survey)
    except EverstepError as error:
        failed.append(error)
        return False
    return True


def retake_failed_base(
    replica_bases: ReplicaBases | None,
    watched: StateWatch,
    take: Callable[[Survey], None],
    failed: list[EverstepError],
) -> bool:
    """Takes the last base here, if the keeper's replica was asked for it and has not made it: it
    has stopped, say, or what it was to begin with has failed. Returns whether that was begun.

    Args:
        failed: gets what fails.
    """
    if replica_bases is None or not replica_bases.has_failed():
        return False
    survey = watched.whole_at_mark
    return survey is not None and take_last_base(survey, take, failed)


def save_memory_base(
    run: PurePath,
    survey: Survey | None,
    take: Callable[[Survey], None],
    failed: list[EverstepError],
) -> bool:
    """The newest base is in the memory of keepers only: a last one goes to disk. Returns whether
    the keeper must stay, since there is none; and says so.

    Args:
        survey: at the last step mark; None: that state is gone.
        take: takes a base of it.
        failed: gets what fails.
    """
    if survey is not None:
        return not take_last_base(survey, take, failed) or bool(failed)
    say(
        f"everstep: {run}: no last base is taken: the state has been changed since the last step "
        "(close() before that takes one). The newest one stays in the keeper's memory for a while: "
        "resume within that time"
    )
    return True


def is_lost(save: Save | None) -> bool:
    """Whether a base that was to hold what the log has is not durable: another rank may have taken
    none, whose keeper stays with its log; without this one's that would be of no use."""
    return save is not None and not (save.durable.done() and save.durable.exception() is None)


def report_lost_bases(
    save: Save | None, before: Keeper, keepers: Keepers, channel: BackgroundChannel, *, alone: bool
) -> None:
    """Whoever waits for bases hears which ones are not there, behind a keeper that was replaced.

    Args:
        save: of the base that was to make up for what was lost with that keeper, if there is one.
        before: that keeper.
        alone: there are no other ranks, which would hear of it from their keepers.
    """
    _tell_if_lost_again(save, keepers.lost, channel)
    if not alone:
        _tell_if_lost_for_all(before, channel)


def report_lost_steps(
    step: int,
    keepers: Keepers,
    options: Options,
    channel: BackgroundChannel,
    failed: list[EverstepError],
) -> None:
    """Training has ended, and no keeper could be put in the place of one that is gone: says up to
    which step there is a base. One that serves another process has said so itself.

    Args:
        step: the last one.
        failed: gets it first, if the policy is to raise.
    """
    why = keepers.attempts.why_not
    durable_step = keepers.stats.durable_step
    if why is None or isinstance(why, FencedError) or step == (durable_step or 0):
        return
    base = (
        "there is no base" if durable_step is None else f"the newest base is of step {durable_step}"
    )
    but = (
        ", except for those that its log has on disk"
        if options.logs and options.log.on_disk
        else ""
    )
    error = KeeperError(
        f"training has ended at step {step} without a keeper, which could not be replaced: {base}, "
        f"as far as is known here, and steps behind that are lost{but}. {why.message}",
        step=step,
        path=why.path,
        hint=why.hint,
    )
    channel.post(error, first=True)
    try:
        channel.check()
    except EverstepError as raised:
        failed.insert(0, raised)


def _tell_if_lost_again(
    save: Save | None, lost: EverstepError | None, channel: BackgroundChannel
) -> None:
    """Two keepers in a row are gone, the second with the base that was to make up for the first:
    whoever waits for it must hear that it is not there."""
    if save is None or lost is None or not is_lost(save):
        return
    channel.post(
        KeeperError(
            f"two keepers in a row are gone: nothing is durable of step {save.step}. The second: "
            f"{lost.message}",
            step=save.step,
            hint="dmesg tells whether they were killed for memory; each call of save() or wait() "
            "tries again",
        )
    )


def _tell_if_lost_for_all(keeper: Keeper, channel: BackgroundChannel) -> None:
    """Other ranks hear from their keepers that no rank has a base which was lost with this one's
    keeper; whoever waits for it here must hear of it, too."""
    if not isinstance(keeper, RemoteKeeper) or keeper.lost is None or not keeper.lost_steps:
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
