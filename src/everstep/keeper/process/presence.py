"""Registration of the keeper in the runtime folder, renewed if its files are removed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import PurePath
from typing import Protocol

from everstep.errors import KeeperError
from everstep.keeper.log.attached import AttachedTrainer
from everstep.keeper.process.connections import Connections
from everstep.link.wire import error_to_wire
from everstep.seams.clock import Clock

_log = logging.getLogger("everstep.keeper")
_REFRESH_EVERY_S = 3600.0
_LOOK_EVERY_S = 1.0
_TRY_AGAIN_S = 10.0


class Registered(Protocol):
    """Registration of this keeper, through which other processes find it."""

    @property
    def is_current(self) -> bool:
        """True while other processes can find this keeper."""
        ...

    def again(self) -> socket.socket | None:
        """Register again; return the new listener, or None if another keeper has the place."""
        ...

    def release(self) -> None:
        """Release the registration."""
        ...

    def refresh_times(self) -> None:
        """Refresh the files, so that no cleanup of old files removes them."""
        ...


class Presence:
    """Keeps this keeper findable.

    Without its files in the runtime folder no restarted trainer finds this keeper, and all state in
    its memory is lost.

    Args:
        run: the run folder.
    """

    def __init__(
        self, registration: Registered, connections: Connections, run: PurePath, clock: Clock
    ) -> None:
        self._registration = registration
        self._connections = connections
        self._run = run
        self._clock = clock
        self._refresh_s = clock.monotonic_s() + _REFRESH_EVERY_S
        self._look_s = clock.monotonic_s()
        self._hidden = False  # the registration is lost, and that was reported
        self._replaced = False  # another keeper is registered in its place

    def refresh(self) -> None:
        """Refresh the files now and then."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._refresh_s:
            self._refresh_s = now_s + _REFRESH_EVERY_S
            self._registration.refresh_times()

    def look_at_once(self) -> None:
        """Check the registration at the next turn: a restarted trainer will look for it soon."""
        self._look_s = self._clock.monotonic_s()

    def check(self, trainer: AttachedTrainer | None, holds_only_copy: Callable[[], bool]) -> bool:
        """Register again if the files in the runtime folder were removed.

        Args:
            trainer: trainer that is attached, to be warned.
            holds_only_copy: returns True if memory holds state that no disk has.

        Returns:
            False if this keeper has to end: nobody needs it, or another one serves the run.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._look_s:
            return True
        self._look_s = now_s + _LOOK_EVERY_S
        if self._registration.is_current:
            self._hidden = False
            return True
        if trainer is None and (self._replaced or not holds_only_copy()):
            return False
        if self._replaced:
            return True
        try:
            listener = self._registration.again()
        except KeeperError as error:
            self._look_s += _TRY_AGAIN_S - _LOOK_EVERY_S
            self._report_hidden(trainer, error, f"the keeper tries again every {_TRY_AGAIN_S:g} s")
            return True
        if listener is None:
            # For good: even if that keeper ends, the run has continued without this one.
            self._replaced = True
            why = KeeperError("another keeper of this run has its place", path=self._run)
            self._report_hidden(trainer, why, "everstep ps shows it")
            return True
        self._hidden = False
        self._connections.replace_listener(listener)
        _log.warning("the registration files in the runtime folder were removed: written again")
        return True

    def release(self) -> None:
        """Release the registration: from here on other processes find no keeper."""
        self._registration.release()

    def _report_hidden(self, trainer: AttachedTrainer | None, why: KeeperError, then: str) -> None:
        """Warn once that no restarted trainer can find this keeper."""
        if self._hidden:
            return
        self._hidden = True
        notice = KeeperError(
            "no other process can find the keeper of this process any more: its files in the "
            f"runtime folder were removed and cannot be recreated: {why.message}",
            path=why.path,
            hint=f"{then}. Steps since the newest base on disk are lost if this process is killed: "
            "ckpt.save() takes a base now",
        )
        _log.error("%s", notice)
        if trainer is not None:
            trainer.send({"kind": "notice", "error": error_to_wire(notice)})
