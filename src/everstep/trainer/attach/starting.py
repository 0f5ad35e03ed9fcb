"""A keeper process that is being started beside other work of the process that will use it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from everstep.seams.processes.conditions import Outcome
from everstep.trainer.attach.remote import RemoteKeeper

__all__ = ["StartingKeeper"]


class StartingKeeper:
    """Attaches to a keeper in a thread of its own.

    Where there was none, a start of the job waits for the new one only when a timeline is to be
    opened: nothing that is restored is in its memory.

    Args:
        attach: starts it, and waits for it.
    """

    def __init__(self, attach: Callable[[], RemoteKeeper]) -> None:
        self._attach = attach
        self._found = Outcome[RemoteKeeper]()
        self._thread = threading.Thread(
            target=self._start, name="everstep-keeper-start", daemon=True
        )
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it is there, or has failed."""
        return self._found.done()

    def wait(self) -> RemoteKeeper:
        """The keeper, once it is there; what attaching to it has raised, if it failed."""
        return self._found.result()

    def _start(self) -> None:
        try:
            self._found.set_result(self._attach())
        except BaseException as error:  # raised where it is waited for
            self._found.set_exception(error)
