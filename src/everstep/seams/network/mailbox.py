"""Messages between ranks: the seam for the network, where few and small messages go.

What implements it promises little, so that nearly anything can: a message arrives once, never,
late, twice, or after a later one. Those who use it repeat what is not answered, and pass over
what they know already. :class:`.peers.PeerMailbox` implements it over TCP; tests and the simulated
network of the crash tests have others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Mailbox"]


class Mailbox(Protocol):
    """One rank's way to the others of its job."""

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """From now on this ``rank`` hears those of ``session``, and speaks to them.

        Args:
            peers: address of each rank's mailbox.
        """
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message, sooner or later or never; does not wait and does not raise for a
        rank that is gone."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, or None when none comes within ``timeout_s``."""
        ...

    def is_gone(self, rank: int) -> bool:
        """Whether ``rank`` has been heard, and will not be heard any more."""
        ...

    def close(self) -> None:
        """Lets go, when what was sent is on its way, or after a moment."""
        ...
