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
from typing import TYPE_CHECKING, Any

from everstep.config import Options
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    KeeperError,
)
from everstep.link import BackgroundChannel, Save
from everstep.seams.progress import print_line, print_line_to
from everstep.state.survey import Survey
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.session.calls import CallGuard
from everstep.trainer.session.components import Components

if TYPE_CHECKING:
    from everstep.trainer.session.session import Session


_log = logging.getLogger("everstep")


class Closing:
    """End of a session, by ``close()`` or at the exit of the process.

    Args:
        session: session to end.
        calls: calls of other threads, which are refused from the exit on. A daemon thread that
            keeps training would take base after base, and each would be waited for.
    """

    def __init__(self, session: Session, calls: CallGuard) -> None:
        self._session = session
        self._calls = calls
        self._at_exit: Callable[[], None] | None = None
        self._last: Save | None = None  # taken by close()

    # --- At the exit of the process -----------------------------------------------------

    def arm(self, keeper: Keeper) -> None:
        """Finish ``keeper`` at the exit of this process, if close() is not called before."""
        self.disarm()
        # Nothing here may refer to the session: one that is dropped must not live until the exit,
        # or its signal handlers would.
        calls = self._calls
        abandon = self._session.watch.abandon

        def end_training() -> None:
            calls.last()
            abandon()

        self._at_exit = partial(
            finish_at_exit,
            self._session.parts,
            keeper,
            end_training,
            os.getpid(),
            sys.stderr,
            stay=self._session.keeper_is_needed,
        )
        atexit.register(self._at_exit)

    def disarm(self) -> None:
        """Do nothing at exit."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = None

    # --- By close() ---------------------------------------------------------------------

    def close(self) -> None:
        """Take a last base if state would be lost otherwise, wait until all is durable, and release
        everything.

        Raises:
            EverstepError: An operation in the background has failed, and the policy is to raise.
        """
        session = self._session
        failed = list[EverstepError]()
        stay = False
        completed = False
        try:
            stay = self._take_last(failed)
            self._wait(failed)
            _report_lost_steps(session, failed)
            completed = True
        finally:
            # Also after an interrupt: the keeper must then keep what is on no disk.
            stay = stay or self._must_stay(completed=completed)
            session.release(stay=stay)
        _raise_first(failed)

    def _take_last(self, failed: list[EverstepError]) -> bool:
        """Take the last base if state would be lost without it.

        A log in memory and captures of every step end with this process.

        Returns:
            True if the keeper must stay, since nothing else has that state.
        """
        session = self._session
        parts = session.parts
        if session.keeper is None:  # no timeline was opened, or an interrupt came while it was
            return session.at.timeline > 0
        session.consensus.flush_errors()
        self._persist_parked(failed)
        # The live state is that of no step, so a base of it would be wrong.
        if session.starter.live_state.is_mixed:
            return False
        survey = session.watch.survey_at_mark
        if parts.saver.last_is_in_memory:
            return self._save_memory_base(survey, failed)
        step = session.at.step
        lacking = [one for one in parts.participants if one.lacks_base_of(step)]
        if not lacking or any(one.refuses_last_base(step) for one in lacking):
            return False
        if survey is None:
            return _stays_for_log(parts.run, step, parts.options, session.keeper)
        self._take(survey, failed)
        return False

    def _persist_parked(self, failed: list[EverstepError]) -> None:
        """Make the newest capture of a schedule durable, as captures end with this process.

        The loss of the keeper is no failure yet if a base can still be taken: the next wait reports
        it and takes one.
        """
        saver = self._session.parts.saver
        if not saver.parks:
            return
        try:
            saver.finish_captures()
            saver.persist_parked()
        except EverstepError as error:
            if not (self._session.watch.is_at_a_step and saver.is_keeper_loss(error)):
                failed.append(error)

    def _save_memory_base(self, survey: Survey | None, failed: list[EverstepError]) -> bool:
        """Write a last base to disk when the newest one is in the memory of keepers only.

        Args:
            survey: state at the last step mark; None if it was changed since.
            failed: list that receives a failure.

        Returns:
            True if the keeper must stay because no base was written. Prints a message then.
        """
        if survey is not None:
            return not self._take(survey, failed) or bool(failed)
        print_line(
            f"everstep: {self._session.parts.run}: no last base is taken: the state was changed "
            "since the last step (close() before the change takes one). The newest base stays in "
            "the keeper's memory for a while: resume within that time"
        )
        return True

    def _take(self, survey: Survey, failed: list[EverstepError]) -> bool:
        """Take the last base; return True if it was started, else add the failure to ``failed``."""
        try:
            self._last = self._session.take(survey, show=True)
        except EverstepError as error:
            failed.append(error)
            return False
        return True

    def _wait(self, failed: list[EverstepError]) -> None:
        """Wait until everything is durable or has failed; add the failures to ``failed``.

        One failed base is no reason to abandon the next ones.
        """
        session = self._session
        while True:
            try:
                session.wait(None)
                if not self._retake_failed_base(failed):
                    return
            except EverstepError as error:
                failed.append(error)
                # Another wait would last as long, for the same storage or keeper.
                if isinstance(error, DeadlineError) or session.parts.keepers.unavailable:
                    return

    def _retake_failed_base(self, failed: list[EverstepError]) -> bool:
        """Capture the last base if the keeper's replica has failed to make it.

        The replica may have stopped, or the base that it was to begin with has failed.

        Returns:
            True if a base was started.
        """
        if not any(one.forget_failed_base() for one in self._session.parts.participants):
            return False
        survey = self._session.watch.survey_at_mark
        return survey is not None and self._take(survey, failed)

    def _must_stay(self, *, completed: bool) -> bool:
        """Return True if the keeper must keep running.

        That is the case if the last base has failed or was interrupted, or was never tried because
        a resume was interrupted. Prints a message if only the keeper has the log.

        Args:
            completed: True if ``close()`` was not interrupted.
        """
        session = self._session
        if session.keeper_is_needed and (not completed or is_lost(self._last)):
            return True
        if not any(one.holds_steps for one in session.parts.participants):
            return False
        return _report_log_holder(session.keeper, f"{session.parts.run}: no last base", sys.stderr)


def wait_for_bases(components: Components, keeper: Keeper, timeout_s: float | None) -> None:
    """Wait until all bases are durable, including those taken in place of lost ones."""
    keeper.wait(timeout_s)
    if any(one.retake_lost_base() for one in components.participants):
        components.saver.finish_captures()
        keeper.wait(timeout_s)


def _raise_first(failed: Sequence[EverstepError]) -> None:
    """Raise the first failure and log the others."""
    for other in failed[1:]:
        _log.error("another background operation failed: %s", other)
    if failed:
        raise failed[0]


def finish_at_exit(
    components: Components,
    keeper: Keeper,
    abandon: Callable[[], None],
    pid: int,
    shown: Any,
    *,
    stay: bool = False,
) -> None:
    """Make the last base durable when a script ends without ``close()``.

    The keeper keeps the log after that base in memory, as if this process had crashed.

    Args:
        abandon: function to call first; gives up operations in progress among several ranks.
        pid: process that made the Checkpointer.
        shown: stream for messages.
        stay: True to leave everything to the keeper, which keeps the log, too. Another rank may
            have died, and all ranks need this one's log to resume.
    """
    if os.getpid() != pid:
        return  # a forked child has inherited the exit handler, but owns nothing
    # First: a daemon thread must not begin another base, and other ranks may never reply.
    abandon()
    saver = components.saver
    if stay:
        # Copies must end before this process does; the keeper knows which captures are incomplete.
        with contextlib.suppress(EverstepError):
            saver.finish_captures()
        _report_lost_keeper(keeper, shown)
        keeper.close(stay=True)
        return
    while True:
        try:
            saver.finish_captures()
            saver.persist_parked()
            wait_for_bases(components, keeper, None)
            break
        except EverstepError as error:
            if not saver.is_keeper_loss(error):
                print_line_to(shown, f"everstep: a base was lost at exit: {error}")
            # Other errors are taken from the queue one by one; after this one the wait would hang
            # again.
            if isinstance(error, DeadlineError):
                break
    _report_lost_keeper(keeper, shown)
    stays = any(one.holds_steps_at_exit for one in components.participants)
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


def _stays_for_log(run: PurePath, step: int, options: Options, keeper: Keeper) -> bool:
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


def _report_lost_steps(session: Session, failed: list[EverstepError]) -> None:
    """Report the steps lost because a lost keeper could not be replaced before training ended.

    A keeper that now serves another process has been reported already.

    Args:
        failed: list that receives the error first, if the policy is to raise.
    """
    step = session.at.step
    options = session.parts.options
    keepers = session.parts.keepers
    channel = session.parts.channel
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
