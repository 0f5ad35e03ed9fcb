"""What changes a state between two step marks, and who is told of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from everstep.capture.updates import UpdateHooks
from everstep.config.options import Options
from everstep.errors import EverstepError, StateError, UnsupportedStateError
from everstep.state.layout.names import RNG_SECTION
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.base.last_mark import FreshStart, LastMark
from everstep.trainer.checks.schedules import Schedules
from everstep.trainer.checks.strangers import Strangers
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.log.untold import Owned
from everstep.trainer.multistep.multistep_ranks import RankMultistep
from everstep.trainer.session.accumulated import Accumulated
from everstep.trainer.session.midstep import where_in_a_step
from everstep.trainer.session.parts import Parts
from everstep.trainer.session.scalers import Scalers

__all__ = ["Watched"]

_log = logging.getLogger("everstep")

_RANDOM = f"{RNG_SECTION}/"


class Watched:
    """The updates of a state, as a log, or a base that is taken over several steps, hears of them.

    Attributes:
        lsn_at_mark: of the last update of the last step that is over.
        at_mark: the state at the end of that step, where one is surveyed at each; else None.
        surveys: whether one is: there is a log, or bases that live in memory, and so a last base.
        left: training has left with an error, perhaps in the middle of a step.
        changing: ``before_update()`` was called, and not yet ``after_update()``.
    """

    def __init__(self, state: State, parts: Parts, options: Options) -> None:
        self._state = state
        self._untold = None if parts.recorder is None else parts.recorder.untold
        self.surveys = options.method.in_memory or self._untold is not None
        self._updates: UpdateHooks = parts.updates
        self._watcher = parts.recorder or parts.multistep
        self._multistep = parts.multistep
        self._channel = parts.channel
        self.lsn_at_mark = 0
        self.at_mark: LastMark | None = None
        self.left = self.changing = False
        self._entries: object = None
        self._names: tuple[str, ...] = ()
        self._random: tuple[str, ...] = ()
        self._tensors: object = None
        self._fresh: FreshStart | None = None
        self._handled = id(None)  # an error that a loop goes on in spite of
        self._accumulated = Accumulated(state, parts.updates, parts.channel.post_notice)
        self._scalers = Scalers(state.values, parts.channel.post_notice)
        self._all: Owned | None = None  # without a log, which looks at what optimizers own
        lost = None if self._watcher is None else self._watcher.skipped
        tell = parts.channel.post_notice
        self._strangers = Strangers(state, parts.updates, parts.saver.gate, lost, tell)
        self._schedules = Schedules(state, lost, tell)

    def leave(self) -> None:
        """Training has left, and not by ``close()``: other ranks are not asked for anything."""
        self.left = True
        if isinstance(self._multistep, RankMultistep):
            self._multistep.leave()

    @property
    def is_between_steps(self) -> bool:
        """Whether nothing was updated since the last step mark, nor is now."""
        updates = self._updates
        idle = updates.outermost is None and not updates.failed and not self.changing
        return idle and updates.lsn == self.lsn_at_mark

    def refuse_between(self, step: int) -> None:
        """A base is asked for of the last step mark.

        Raises:
            StateError: the state is no longer what it was then.
        """
        updates = self._updates
        if updates.outermost is not None:
            raise StateError(
                f"save() while {updates.key} is updating: this state belongs to no step",
                step=step,
                hint="call it from the training loop, behind ckpt.step()",
            )
        if self.changing:
            raise StateError(
                "save() between before_update() and after_update(): this state belongs to no step",
                step=step,
                hint="call after_update() first, when what is stored is as it should be",
            )
        if not self.is_between_steps:
            raise StateError(
                "save() after optimizer.step() and before ckpt.step(): this state belongs to a "
                "step that is not over",
                step=step,
                hint="call ckpt.step() first, then ckpt.save()",
            )

    def asked_for(self, step: int) -> tuple[Survey | None, bool]:
        """What a base is to be of that ``save()`` asks for.

        Returns:
            The state at the last step mark, where it is known; None: as it is now, and it may be
            called exact, or not: where a forward, say, has drawn random numbers since.

        Raises:
            StateError: the state is no longer what it was at the last step mark.
        """
        self.refuse_between(step)
        where = where_in_a_step(self._handled)
        if not where:
            return None, True
        if (survey := self.whole_at_mark) is not None:
            return survey, True
        what = f"save() {where}: random numbers, batches counted or data fetched may be those of "
        how = "in a signal handler, set a flag, and call save() behind ckpt.step(); or use preempt="
        if isinstance(self._watcher, Recorder):  # a base that is not exact would be less than that
            whose = f"{what}the step after this one, which the log has already"
            raise StateError(whose, step=step, hint=how)
        _log.warning(
            "everstep: %sthe step after %d; what resume() gives back is not called exact (%s)",
            what,
            step,
            how,
        )
        return None, False

    @property
    def is_of_a_step(self) -> bool:
        """Whether the state is that of the last step, as far as anybody knows, or it is still
        there. A forward that has failed has drawn random numbers, and counted batches; and whoever
        goes on with other weights has put them there."""
        known = self.whole_at_mark is not None or (self.at_mark is None and not self.left)
        return self.is_between_steps and known

    @property
    def whole_at_mark(self) -> Survey | None:
        """The state at the last step mark, whatever has begun since; None where that is gone:
        weights were loaded to be evaluated, perhaps."""
        mark = self.at_mark
        if mark is None or not self.is_between_steps or not mark.is_intact:
            return None
        if self._untold is not None and not self._untold.is_as_marked:
            return None
        if self._all is not None and self._all.written() is not None:
            return None
        return mark.survey

    def survey(self) -> Survey | None:
        """The state at the end of a step; None where it is none that can be stored, which the
        policy has dealt with: the log goes on behind a base of one that can.

        Raises:
            EverstepError: why it cannot, by the policy.
        """
        try:
            survey = self._state.survey()
            if isinstance(self._watcher, Recorder):
                self._refuse_encoded()
            return survey
        except EverstepError as error:
            if isinstance(self._watcher, Recorder):
                self._watcher.skipped("the state could not be stored")
            self._channel.post(error)
            self._channel.check()
            return None

    def _refuse_encoded(self) -> None:
        if encoded := self._state.coverage.encoded:
            keys = ", ".join(map(repr, encoded))
            raise UnsupportedStateError(
                f"the state_dict() of {keys} gives state in another form than the optimizer has it "
                "(a hook, or a class of one's own): a log of its updates cannot be replayed on "
                "that, wherever the optimizer itself is not there to read it",
                leaves=tuple((key, "state in another form") for key in encoded),
                hint='method="lazy" needs no log',
            )

    def started(self, survey: Survey | None, *, fresh: bool) -> None:
        """The state is that of a start, which was surveyed, perhaps.

        Args:
            fresh: nothing was restored: it is as the program has made it.
        """
        self.marked(survey)
        self._strangers.started()
        self._schedules.started()
        if fresh:
            there = survey or self._state.survey()
            names = [name for name in there.tensors if name.startswith(_RANDOM)]
            self._fresh = FreshStart(there, names)

    def has_moved(self, step: int) -> bool:
        """Whether the state may be another than that of a fresh start: there was a step, or one
        that failed, of which its first forward may have drawn random numbers or counted batches."""
        updates = self._updates
        updates.settle()
        if step > 0 or updates.lsn > 0 or updates.failed or self.changing:
            return True
        return self._fresh is not None and not self._fresh.is_that_of(self._state.survey())

    def ended(self, step: int) -> None:
        """Step ``step`` is over: :meth:`marked`, and a look whether its gradients are spent."""
        if self._updates.lsn == self.lsn_at_mark:
            self._accumulated.marked(step)
        self._scalers.marked(step)
        self._schedules.marked()
        self.marked()

    def marked(self, survey: Survey | None = None) -> None:
        """The state is that of a step that is over.

        Args:
            survey: of it, where one is made at each step.
        """
        self.lsn_at_mark = self._updates.lsn
        self._fresh = None
        self._handled = id(sys.exc_info()[1])
        self._updates.failed = self.changing = False
        self.at_mark = None
        if survey is None:
            return
        shape = survey.shape
        if shape.entries is not self._entries:  # once for each shape, not at each step
            self._names = tuple(e.name for e in shape.entries if shape.owners[e.name].in_marks)
            self._random = tuple(name for name in self._names if name.startswith(_RANDOM))
            self._entries = shape.entries  # last: what an interrupt leaves half done is done again
        self.at_mark = LastMark.of(survey, self._names, self._random)
        if self._untold is None:
            self._look_at_all(survey)

    def _look_at_all(self, survey: Survey) -> None:
        if survey.tensors is not self._tensors or self._all is None:
            named = survey.tensors.items()
            self._all = Owned({name: one for name, one in named if not name.startswith(_RANDOM)})
            self._tensors = survey.tensors
        self._all.settle(self.lsn_at_mark)

    def consumed(self, key: str, step: int) -> None:
        """An optimizer's gradients are what its update is going to consume.

        Args:
            step: that is under way.
        """
        if self._watcher is not None:
            updates = self._updates
            self._watcher.consumed(key, updates.lsn + 1, step, over=not updates.told)

    def changed(self, declared: Sequence[str], step: int) -> None:
        """Something other than an optimizer has changed the state: the functions registered for
        ``declared``; with none, whatever it was.

        Args:
            step: that is under way.

        Raises:
            OptionError: no function is registered for one of them.
        """
        self._state.ownership_rules.check_updates(declared)
        self.changing = False
        for pattern in declared:
            self._updates.updated()
            if self._watcher is not None:
                self._watcher.declared(pattern, self._updates.lsn, step)
        if not declared:
            self._updates.updated()
            if self._watcher is not None:
                self._watcher.skipped("a change that no optimizer made")

    def _unseen(self) -> None:
        """The state of this mark is not what its updates have made of the last one's: it has a
        number of its own, as behind ``after_update()``, or two bases with no update between them
        would differ. Ranks have their numbers in common, and what one of them sees others may not.
        """
        if self._state.ranks.world == 1:
            self._updates.updated()
            self.lsn_at_mark = self._updates.lsn

    def watch(
        self, consumed: Callable[[str], None], wait_for_others: Callable[[str], None]
    ) -> None:
        """From now on the optimizers' updates are counted, held at the gate, and told.

        Args:
            consumed: called with an optimizer's key; calls :meth:`consumed`.
            wait_for_others: called before an update, which waits for a base of another thread.
        """
        updates = self._updates
        updates.wait_for_others = wait_for_others
        updates.counts_failed = self._state.ranks.world == 1
        if self._watcher is not None:
            updates.consumed = consumed
            updates.applied = self._watcher.applied
            updates.lost = self._watcher.skipped
        if isinstance(self._watcher, Recorder):
            self._watcher.unseen = self._unseen
        for key, optimizer in self._state.optimizers.items():
            updates.watch(key, optimizer)
        self._strangers.watch()

    def check_changing(self) -> None:
        """Raises:
        StateError: it is replay that changes the state now.
        """
        if self._state.replaying:
            raise StateError(
                "a registered function calls before_update() or after_update() itself",
                hint="register only what is done between the two calls",
            )
