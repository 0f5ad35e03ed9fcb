"""Which records of the log go to disk, and how far they have come."""

from __future__ import annotations

from collections import deque

from everstep.config.options import Options
from everstep.errors import DeadlineError
from everstep.keeper.log.batch import ENDED
from everstep.link.channel import BackgroundChannel
from everstep.link.recordable import LogKeeper
from everstep.link.save import Save
from everstep.seams.files.moving import Standstill
from everstep.seams.processes.conditions import Condition, is_over

__all__ = ["DiskLog"]


class DiskLog:
    """The trainer's view of a log that is written to disk behind it.

    Attributes:
        on: records that are made now go to disk.
        steps_in_memory: steps that should have gone to disk, and did not: for the write budget, or
            since it could not be written.
    """

    def __init__(self, options: Options, channel: BackgroundChannel) -> None:
        self._wanted = self.on = options.log_on_disk
        self._lag = options.log.lag_steps
        self._timeout_s = options.progress_timeout_s
        self._channel = channel
        self._keeper: LogKeeper | None = None
        self._changed = Condition()
        self._reached = 0
        self._marks: deque[int] = deque()  # the last ones
        self._written = 0  # of records; they are on disk up to this number
        self._coming: deque[tuple[int, int]] = deque()  # marks, and their steps, not on disk yet
        self._step: int | None = None
        self._begins: Save | None = None  # the base that the log on disk goes on from
        self._bases: deque[Save] = deque()  # that the log begins at, and that may not be durable
        self._again = False
        self._ended = False  # by a failure
        self.steps_in_memory = 0

    def start(self, keeper: LogKeeper | None) -> None:
        """From now on records go to ``keeper``, which writes nothing of what was made before."""
        self._keeper = keeper
        with self._changed:
            self._reached = 0
            self._written = 0
            self._ended = False
            self._marks.clear()
        self._coming.clear()
        self._bases.clear()
        if keeper is not None and self._wanted and not self.on:
            keeper.log_to_disk(False)

    def reached(self, number: int) -> None:
        """Records up to ``number`` are on disk, or (0) the keeper is gone, or (:data:`ENDED`) none
        will be; in any thread."""
        with self._changed:
            self._reached = max(self._reached, number)
            self._written = number if number not in (0, ENDED) else self._written
            self._ended = self._ended or number == ENDED
            self._changed.notify_all()

    def has(self, number: int) -> bool:
        """Whether a record is on disk, or never will be."""
        return number <= self._reached

    @property
    def step(self) -> int | None:
        """The newest step that a durable base and the log on disk lead to; None: none is known."""
        self._look()
        return self._step if self._begins is None or _is_durable(self._begins) else None

    def restored(self, *, on_disk: bool) -> None:
        """The state was restored; whether the base that it was restored from is on disk."""
        self._step = None
        self._begins = None if on_disk else Save(0, 0)
        self._coming.clear()

    def _look(self) -> None:
        with self._changed:  # stats() may be called in another thread
            while self._coming and self._coming[0][0] <= self._written:
                _, self._step = self._coming.popleft()

    def marked(self, number: int, step: int) -> None:
        """A step is over: waits until the log on disk is no further behind than it may be.

        Args:
            number: of its mark.
        """
        if self._ended and self.on:
            # Behind a hole segments would be of no use, and behind a base there is none. What kept
            # it from being written (a full disk, say) may be over by then.
            self.on = False
            self._again = True
            self._marks.clear()
        if self._wanted and not self.on:
            self.steps_in_memory += 1
        if not self.on:
            return
        self._look()
        self._coming.append((number, step))
        if self._lag is None:
            return
        self._marks.append(number)
        if len(self._marks) <= self._lag:
            return
        wanted = self._marks.popleft()
        if not self._comes(wanted):
            self._channel.post(
                DeadlineError(
                    f"the log was not written within {self._timeout_s:g} s: the storage hangs",
                    step=step,
                    hint="look at the disk or the network file system (dmesg, df, iostat)",
                )
            )

    def _comes(self, wanted: int) -> bool:
        """Waits until a record is on disk, as long as the log gets anywhere; also whether there is
        nobody to wait for: at the next step another takes the place of one that is gone."""
        with self._changed:
            still: Standstill | None = None
            while self._reached < wanted:
                keeper = self._keeper
                if keeper is None or keeper.lost:
                    break
                still = still or Standstill(self._timeout_s)
                if still.is_over(keeper.log_moves):
                    return False
                self._changed.wait(still.poll_s)
        return True

    def over(self, step: int) -> None:
        """A step is over, and its base is being captured, if it takes one: waits for bases that
        the log begins at, which are to be no further behind than the log itself."""
        if self._lag is None or not self.on:
            self._bases.clear()
        while self._bases and self._bases[0].step <= step - (self._lag or 0):
            base = self._bases.popleft()
            if not self._is_durable(base):
                self._channel.post(
                    DeadlineError(
                        f"the base of step {base.step}, at which the log on disk begins, is not "
                        f"durable, and nothing was written for {self._timeout_s:g} s: the storage "
                        "hangs, or the keeper of another rank",
                        step=step,
                        hint="look at the disk or the network file system (dmesg, df, iostat)",
                    )
                )

    def _is_durable(self, base: Save) -> bool:
        """Waits for that, as long as something is being written; also whether it has failed, of
        which whoever writes it tells, as of a keeper that is gone: then another base is due."""
        still = Standstill(self._timeout_s)
        while self._keeper is not None and not base.durable.done():
            if still.is_over((self._keeper.moves, self._keeper.log_moves)):
                return False
            is_over(base.durable, still.poll_s)
        return True

    def stop(self) -> None:
        """No more records go to disk; at the end of a step. What was made before, does."""
        self.on = self._again = False
        self._marks.clear()
        if self._keeper is not None:
            self._keeper.log_to_disk(False)

    def again(self) -> bool:
        """From the next base on records go to disk; False if that was asked for already."""
        asked = self._again
        self._again = not self.on
        return self._again and not asked

    def base_taken(self, save: Save, number: int, *, leads: bool) -> None:
        """A base of the step that is just over: behind it the log has no hole.

        Args:
            number: of the newest record. What is not on disk by now never will be.
            leads: the log in memory leads to this step.
        """
        if self._again and self._keeper is not None:
            self._again = False
            self.on = True
            leads = False
            with self._changed:
                self._reached = number
                self._ended = False
            self._keeper.log_to_disk(True)
        if not leads:
            self._step = None
            self._begins = save
            self._coming.clear()
        elif self._begins is not None and not _is_durable(self._begins):
            self._begins = save
        # What was recorded before it ends in a hole, or went to no disk.
        if not leads and self.on and self._lag is not None:
            self._bases.append(save)


def _is_durable(save: Save) -> bool:
    return save.durable.done() and not save.is_lost
