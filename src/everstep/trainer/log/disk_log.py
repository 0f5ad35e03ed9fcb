"""The log on disk, seen from the training process: which records go there, and how far training may
run ahead of it."""

from __future__ import annotations

from collections import deque

from everstep.config import Options
from everstep.errors import DeadlineError
from everstep.link import BackgroundChannel, Save
from everstep.link.messages import ENDED
from everstep.link.recordable import LogKeeper
from everstep.seams.filesystem import StallTimer
from everstep.seams.processes import Condition, wait_done


class DiskLog:
    """Log that the keeper writes to disk while training goes on.

    Attributes:
        on: True if records made now go to disk.
        steps_in_memory: number of steps that should have gone to disk and did not, because of the
            write budget or after a write failure.
    """

    def __init__(self, options: Options, channel: BackgroundChannel) -> None:
        self._wanted = self.on = options.log_on_disk
        self._lag = options.log.lag_steps
        self._timeout_s = options.progress_timeout_s
        self._channel = channel
        self._keeper: LogKeeper | None = None
        self._changed = Condition()
        self._reached = 0
        self._marks: deque[int] = deque()  # numbers of the newest, at most lag_steps
        self._written = 0  # number of the newest record on disk
        self._unwritten_marks: deque[tuple[int, int]] = (
            deque()
        )  # (number, step) of marks not on disk yet
        self._step: int | None = None
        self._first_base: Save | None = None  # that the log on disk starts from
        self._pending_bases: deque[Save] = (
            deque()
        )  # that the log starts from, perhaps not durable yet
        self._restart_at_base = False
        self._failed = False  # writing has ended in an error
        self.steps_in_memory = 0

    def start(self, keeper: LogKeeper | None) -> None:
        """Send records to ``keeper`` from now on; it writes none of the earlier ones."""
        self._keeper = keeper
        with self._changed:
            self._reached = 0
            self._written = 0
            self._failed = False
            self._marks.clear()
        self._unwritten_marks.clear()
        self._pending_bases.clear()
        if keeper is not None and self._wanted and not self.on:
            # A new keeper begins with a log on disk; this one continues a log in memory.
            keeper.log_to_disk(False)

    def reached(self, number: int) -> None:
        """Note that records up to ``number`` are on disk; in any thread.

        Args:
            number: number of the newest record on disk; 0 if the keeper was lost; :data:`ENDED` if
                no further record will be written.
        """
        with self._changed:
            # ENDED exceeds every number, so has() is True from then on. 0 only wakes the waiting
            # threads.
            self._reached = max(self._reached, number)
            self._written = number if number not in (0, ENDED) else self._written
            self._failed = self._failed or number == ENDED
            self._changed.notify_all()

    def has(self, number: int) -> bool:
        """Return True if a record is on disk or never will be."""
        return number <= self._reached

    @property
    def step(self) -> int | None:
        """Return the newest step that a durable base and the log on disk lead to; None if
        unknown."""
        self._update_step()
        return self._step if self._first_base is None or self._first_base.is_durable else None

    def restored(self, *, on_disk: bool) -> None:
        """Continue from a restored state.

        Args:
            on_disk: the base it was restored from is on disk.
        """
        self._step = None
        self._first_base = None if on_disk else Save(0, 0)
        self._unwritten_marks.clear()

    def _update_step(self) -> None:
        with self._changed:  # stats() may run in another thread
            while self._unwritten_marks and self._unwritten_marks[0][0] <= self._written:
                _, self._step = self._unwritten_marks.popleft()

    def marked(self, number: int, step: int) -> None:
        """Note a step mark; block until the log on disk lags by at most ``lag_steps``.

        Args:
            number: number of the mark's record.
            step: step of the mark.
        """
        if self._failed and self.on:
            # Segments after a hole are useless; a base has no hole after it. By then the cause of
            # the failure (a full disk, say) may be gone.
            self.on = False
            self._restart_at_base = True
            self._marks.clear()
        if self._wanted and not self.on:
            self.steps_in_memory += 1
        if not self.on:
            return
        self._update_step()
        self._unwritten_marks.append((number, step))
        if self._lag is None:
            return
        self._marks.append(number)
        if len(self._marks) <= self._lag:
            return
        wanted = self._marks.popleft()
        if not self._wait_for_record(wanted):
            self._report_hang(
                f"step {step}: no record of the log was written to disk within "
                f"{self._timeout_s:g} s: the storage has hung",
                step,
            )

    def _wait_for_record(self, wanted: int) -> bool:
        """Wait until a record is on disk.

        Returns:
            False if the storage has hung. True also if the keeper is lost: the next step replaces
            it.
        """
        with self._changed:
            standstill: StallTimer | None = None
            while self._reached < wanted:
                keeper = self._keeper
                if keeper is None or keeper.lost:
                    break
                standstill = standstill or StallTimer(self._timeout_s)
                if standstill.is_over(keeper.log_moves):
                    return False
                self._changed.wait(standstill.poll_s)
        return True

    def over(self, step: int) -> None:
        """Wait, at the end of a step, for durable bases that the log on disk begins at.

        These bases must lag no more than the log itself.

        Args:
            step: step that has ended; its own base, if any, is being captured.
        """
        if self._lag is None or not self.on:
            self._pending_bases.clear()
        while self._pending_bases and self._pending_bases[0].step <= step - (self._lag or 0):
            base = self._pending_bases.popleft()
            if not self._wait_until_durable(base):
                self._report_hang(
                    f"the base of step {base.step}, which the log on disk starts from, is not "
                    f"durable, and nothing was written for {self._timeout_s:g} s: the storage "
                    "or the keeper of another rank has hung",
                    step,
                )

    def _report_hang(self, message: str, step: int) -> None:
        hint = "check the disk or the network file system (dmesg, df, iostat)"
        self._channel.post(DeadlineError(message, step=step, hint=hint))

    def _wait_until_durable(self, base: Save) -> bool:
        """Wait until a base is durable.

        Returns:
            False if the storage has hung. True also if the base has failed or the keeper is lost,
            which the code that writes it reports: then another base is due.
        """
        standstill = StallTimer(self._timeout_s)
        while self._keeper is not None and not base.durable.done():
            if standstill.is_over((self._keeper.moves, self._keeper.log_moves)):
                return False
            wait_done(base.durable, standstill.poll_s)
        return True

    def stop(self) -> None:
        """Stop writing records to disk, at the end of a step; earlier records are still written."""
        self.on = self._restart_at_base = False
        self._marks.clear()
        if self._keeper is not None:
            self._keeper.log_to_disk(False)

    def again(self) -> bool:
        """Resume writing records to disk at the next base.

        Returns:
            False if that was requested before.
        """
        requested = self._restart_at_base
        self._restart_at_base = not self.on
        return self._restart_at_base and not requested

    def base_taken(self, save: Save, number: int, *, leads: bool) -> None:
        """Continue the log on disk from a base of the step that has just ended.

        Args:
            save: the base.
            number: number of the newest record; one that is not on disk by now never will be.
            leads: the log in memory leads to this step.
        """
        if self._restart_at_base and self._keeper is not None:
            self._restart_at_base = False
            self.on = True
            leads = False
            with self._changed:
                self._reached = number
                self._failed = False
            self._keeper.log_to_disk(True)
        if not leads:
            self._step = None
            self._first_base = save
            self._unwritten_marks.clear()
        elif self._first_base is not None and not self._first_base.is_durable:
            self._first_base = save
        # Records before it end in a hole or never reached the disk: only this base can serve.
        if not leads and self.on and self._lag is not None:
            self._pending_bases.append(save)
