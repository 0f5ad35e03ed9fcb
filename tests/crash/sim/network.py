"""A simulated network between the ranks of simulated jobs: it delays, loses, doubles, parts.

Every process that has the number of a rank hears what is sent to that rank, those of earlier
starts of the job too: nobody is spared a stranger's message.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["NetworkFaults", "SimNetwork"]


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Fault rates of the network.

    Attributes:
        loss, doubling, delay: how likely a message is lost, comes twice, or is very late.
        delay_s: how late at most.
    """

    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.0
    delay_s: float = 5.0


@dataclass(slots=True)
class SimNetwork:
    """Carries bytes between nodes, by chance.

    Attributes:
        later: schedules a call in so many seconds.
        parted: pairs of nodes that hear nothing of each other; the smaller number first.
    """

    rng: random.Random
    later: Callable[[float, Callable[[], None]], None]
    faults: NetworkFaults = field(default_factory=NetworkFaults)
    parted: set[tuple[int, int]] = field(default_factory=set)
    sent: int = 0

    def carry(self, source: int, target: int, deliver: Callable[[], None]) -> None:
        """Sends a message from node ``source`` to ``target``; ``deliver`` is what arriving is."""
        self.sent += 1
        faults = self.faults
        if source != target and self.rng.random() < faults.loss:
            return
        for _ in range(1 + (self.rng.random() < faults.doubling)):
            delay_s = self.rng.uniform(0.001, 0.2)
            if self.rng.random() < faults.delay:
                delay_s += self.rng.uniform(0, faults.delay_s)
            self.later(delay_s, lambda: self._arrive(source, target, deliver))

    def _arrive(self, source: int, target: int, deliver: Callable[[], None]) -> None:
        if (min(source, target), max(source, target)) not in self.parted:
            deliver()
