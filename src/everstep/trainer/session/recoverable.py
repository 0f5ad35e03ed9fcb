"""Knows which step a run would come back to, as far as the training process can tell."""

from __future__ import annotations

from collections import deque

from everstep.link.save import Save
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.saver import Saver
from everstep.trainer.log.recorder import Recorder
from everstep.trainer.schedule.scheduled_saver import ScheduledSaver

__all__ = ["Recoverable"]

_RECENT = 4  # one is being copied; those before it are whole, or have failed


class Recoverable:
    """Answers what the death of the training process, or of its machine, would cost now."""

    def __init__(self, keepers: Keepers, saver: Saver, recorder: Recorder | None) -> None:
        self._keepers = keepers
        self._saver = saver
        self._recorder = recorder
        self._recent: deque[tuple[Keeper | None, Save]] = deque(maxlen=_RECENT)
        self._restored_from: int | None = None

    def restored(self, durable_step: int | None) -> None:
        """The state was restored; what was captured of the timeline before is another history.

        Args:
            durable_step: of the base that it was restored from; None: it is on no disk, or there
                was none.
        """
        self._restored_from = durable_step
        self._recent.clear()

    def taken(self, save: Save) -> None:
        """A base was captured, or the keeper was asked for one."""
        self._recent.append((self._keepers.current, save))

    @property
    def durable_step(self) -> int | None:
        """The newest step that is on disk; None: none is known."""
        on_disk = None if self._recorder is None else self._recorder.disk.step
        return _newest(self._restored_from, self._keepers.stats.durable_step, on_disk)

    @property
    def step(self) -> int | None:
        """The newest step that is left if this process alone dies now: on disk, or in the memory of
        its keeper; None: none is known."""
        keeper = self._keepers.current
        durable_step = self.durable_step
        if not isinstance(keeper, RemoteKeeper) or keeper.lost is not None:
            return durable_step  # a keeper that is a thread of this process dies with it
        led = None if self._recorder is None else self._recorder.led_step
        parked = self._saver.parked_step if isinstance(self._saver, ScheduledSaver) else None
        whole = [
            save.step for held_by, save in self._recent if held_by is keeper and _is_whole(save)
        ]
        return _newest(durable_step, led, parked, *whole)


def _is_whole(save: Save) -> bool:
    staged = save.staged
    return staged.done() and not staged.cancelled() and not staged.exception() and not save.is_lost


def _newest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)
