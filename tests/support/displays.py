"""Displays of benches and of the drill that show nothing."""

from __future__ import annotations


class Silent:
    def __init__(self) -> None:
        self.total = self.done = 0

    def begin(self, what: str, total: int) -> None:
        self.total = total

    def advance(self, what: str) -> None:
        self.done += 1


class SilentDrill:
    """A display that shows nothing."""

    def event(self, text: str) -> None:
        pass

    def progress(self, name: str, step: int) -> None:
        pass
