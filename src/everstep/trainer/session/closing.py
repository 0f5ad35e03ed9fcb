"""The beginning and the end of a training process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn, Protocol

from everstep.config.given import is_int, is_number
from everstep.config.options import Options
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    KeeperError,
    OptionError,
    StateError,
    UnavailableError,
)
from everstep.link.channel import BackgroundChannel
from everstep.link.save import Save
from everstep.restore.load.nonfinite import nonfinite_parameter
from everstep.seams.messages import say, say_to
from everstep.state.image import State
from everstep.state.survey.survey import Survey
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers, let_go
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.calls import Calls
from everstep.trainer.base.saver import Saver
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.log.rooms import LogRooms
from everstep.trainer.schedule.scheduled_saver import ScheduledSaver
from everstep.trainer.session.components import Parts
from everstep.trainer.session.replica_bases import Standby
from everstep.trainer.session.state_watch import Watched

__all__ = [
    "AtExit",
    "Closing",
    "check_platform",
    "check_resume",
    "check_timeout",
    "check_usable",
    "close_earlier",
    "finish_at_exit",
    "is_lost",
    "must_stay",
    "needs_last_base",
    "no_last_base",
    "persist_parked",
    "raise_first",
    "refuse_pickling",
    "stays_for_the_log",
    "stays_with_bases",
    "take_at_end",
    "take_failed",
    "tell_if_bases_are_lost",
    "tell_if_steps_are_lost",
    "wait_for_bases",
    "wait_through",
]

_log = logging.getLogger("everstep")

_MANY = 4  # Checkpointers that nobody has closed: so many are rarely meant


class Closing(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


def check_platform() -> None:
    """Refuses where this version does not run.

    Raises:
        UnavailableError: with the reason.
    """
    if sys.platform == "win32":
        raise UnavailableError(
            "everstep does not run on Windows", hint="Linux, WSL 2, or macOS on the CPU"
        )


def check_usable(is_open: bool, pid: int, run: PurePath, replaced: bool) -> None:
    """Refuses calls of a Checkpointer that is closed, or of another process.

    Args:
        pid: of the process that made it.
        replaced: another one of this process has the run.

    Raises:
        StateError: with the reason.
    """
    if not is_open and replaced:
        raise StateError(
            "this Checkpointer is closed: a later one of this process has replaced it",
            path=run,
            hint="use the later one; two that live side by side need a run folder each",
        )
    if not is_open:
        raise StateError(
            "this Checkpointer is closed",
            path=run,
            hint="make a new one on the same run, and call its resume(), to go on",
        )
    if os.getpid() != pid:
        raise StateError(
            "this Checkpointer belongs to the process that this one was forked from",
            path=run,
            hint="make a Checkpointer (on a run folder of its own) in this process",
        )


def refuse_pickling(checkpointer: object) -> NoReturn:
    """What is pickled for another process (``spawn``), or copied, would be of no use there.

    Raises:
        StateError
    """
    raise StateError(
        "a Checkpointer cannot be pickled or copied: it belongs to the process that made it",
        hint="leave it out of what is handed to the other process; make a Checkpointer (on a run "
        "folder of its own) there if that one trains, too",
    )


def check_resume(step: int | None) -> None:
    """Refuses what :meth:`Checkpointer.resume` cannot mean.

    Raises:
        OptionError
    """
    if step is not None and (not is_int(step) or step < 0):
        raise OptionError(f"resume(step={step!r}): steps are whole numbers from 0")


def check_timeout(timeout_s: float | None) -> None:
    """Refuses what :meth:`Checkpointer.wait` cannot mean.

    Raises:
        OptionError
    """
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s >= 0):
        raise OptionError(f"wait(timeout_s={timeout_s!r}): seconds from 0, or None")


class AtExit:
    """A script that ends without ``close()`` still gets its last base.

    Args:
        calls: of other threads are refused then: one that goes on training, as daemon threads do,
            would take base after base, each of which is waited for.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._job: Callable[[], None] | None = None

    def watch(self, parts: Parts, keeper: Keeper, leave: Callable[[], None], *, stay: bool) -> None:
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
        rooms = parts.recorder.rooms if parts.recorder and not parts.standby else None
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


def wait_through(
    wait: Callable[[], None], gave_up: Callable[[], bool], again: Callable[[], bool]
) -> list[EverstepError]:
    """Waits until everything is durable or has failed; returns what failed.

    Args:
        wait: raises one failure at a time: one failed base is no reason to abandon those
            behind it.
        gave_up: whether nobody is left to wait for.
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
            if isinstance(error, DeadlineError) or gave_up():
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
        let_go(keeper, stay=True)
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
    let_go(keeper, stay=stays)


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


def no_last_base(run: PurePath, step: int, recorder: Recorder | None, state: State) -> bool:
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
    return not no_last_base(run, step, recorder, state)


def stays_for_the_log(run: PurePath, step: int, options: Options, keeper: Keeper) -> bool:
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


def take_at_end(
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


def take_failed(
    standby: Standby | None,
    watched: Watched,
    take: Callable[[Survey], None],
    failed: list[EverstepError],
) -> bool:
    """Takes the last base here, if the keeper's replica was asked for it and has not made it: it
    has stopped, say, or what it was to begin with has failed. Returns whether that was begun.

    Args:
        failed: gets what fails.
    """
    if standby is None or not standby.has_failed():
        return False
    survey = watched.whole_at_mark
    return survey is not None and take_at_end(survey, take, failed)


def stays_with_bases(
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
        return not take_at_end(survey, take, failed) or bool(failed)
    say(
        f"everstep: {run}: no last base is taken: the state has been changed since the last step "
        "(close() before that takes one). The newest one stays in the keeper's memory for a while: "
        "resume within that time"
    )
    return True


def close_earlier(live: Mapping[tuple[PurePath, int], Closing], key: tuple[PurePath, int]) -> None:
    """A notebook cell that is run again replaces the Checkpointer of its first run.

    Of other runs as many as liked may be open. None that is merely dropped is ever closed (it still
    has a last base to take), and whoever trains again and again in a process hears what that keeps.

    Args:
        live: the Checkpointers of this process that are open, by run and rank.
        key: of the one that is being made.
    """
    earlier = live.get(key)
    run = key[0]
    if earlier is not None:
        try:
            earlier.close()
        except EverstepError as error:
            say(f"everstep: the earlier Checkpointer of {run}: {error}")
    others = sorted({str(other) for other, _ in list(live)} - {str(run)})
    if len(others) >= _MANY and len(others).bit_count() == 1:  # 4, 8, 16: not at each
        say(
            f"everstep: {len(others)} Checkpointers of other runs are open in this process, the "
            f"first of {others[0]}: each keeps its state, a keeper and the keeper's memory until "
            "its close(); use `with everstep.Checkpointer(...) as ckpt:` where trainings end"
        )


def is_lost(save: Save | None) -> bool:
    """Whether a base that was to hold what the log has is not durable: another rank may have taken
    none, whose keeper stays with its log; without this one's that would be of no use."""
    return save is not None and not (save.durable.done() and save.durable.exception() is None)


def tell_if_bases_are_lost(
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


def tell_if_steps_are_lost(
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
