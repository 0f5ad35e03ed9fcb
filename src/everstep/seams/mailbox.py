"""Messages between ranks: the seam for the network, where few and small messages go.

What implements it promises little, so that nearly anything can: a message arrives once, never,
late, twice, or after a later one. Those who use it repeat what is not answered, and pass over
what they know already. The store of a job, or gloo, implements it; so does the simulated network
in :mod:`everstep.testing`.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Mailbox"]


class Mailbox(Protocol):
    """One rank's way to the others of its job."""

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message, sooner or later or never; does not wait and does not raise for a
        rank that is gone."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, or None when none comes within ``timeout_s``."""
        ...
