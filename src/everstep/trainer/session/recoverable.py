"""Steps that survive the loss of this process, of its machine, or of everything but one place."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.link import Save
from everstep.tiers.options import PEER
from everstep.trainer.attach.keeper import Keeper, Service
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.log import Recorder
from everstep.trainer.participant import Participant, RestoredState

# Bases to examine: one may be in flight, and the earlier ones are complete or have failed.
_RECENT = 4
_ON_THEIR_WAY = 64  # bases that may not have arrived in every place yet
_PEERS = -1  # number of the place that the memory of other nodes is


class RecoverableSteps(Participant):
    """Track the steps that can be restored after a crash of this process, or of the machine.

    Args:
        participants: all participants; some know of steps on disk or in the keeper's memory.
        recorder: records the log; None without one.
        places: names of the places for copies, in the order of their numbers.
        exact: names of those that get the exact log; from the others only bases count.
    """

    def __init__(
        self,
        keepers: Keepers,
        participants: Sequence[Participant],
        recorder: Recorder | None,
        places: Sequence[str],
        exact: Collection[str],
    ) -> None:
        self._exact = exact
        self._keepers = keepers
        self._participants = participants
        self._recorder = recorder
        self._names = {_PEERS: PEER, **dict(enumerate(places))}
        self._recent: deque[tuple[Keeper | None, Save]] = deque(maxlen=_RECENT)
        self._restored_from: int | None = None
        self._places: dict[int, _Place] = {}
        # Of the newest bases: number of updates before each that the log does not have.
        self._holes_before: deque[tuple[int, int]] = deque(maxlen=_ON_THEIR_WAY)

    def start(self, service: Service) -> None:
        """Begin with a keeper, which has sent nothing yet."""
        self._places = {}

    def restored(self, restored: RestoredState) -> None:
        """Begin a new history: earlier captures belong to the previous one."""
        self._restored_from = restored.on_disk
        self._recent.clear()

    def base_taken(self, save: Save) -> None:
        """Add a base that was captured, or requested from the keeper's replica."""
        self._recent.append((self._keepers.current, save))
        self._holes_before.append((save.step, self._holes))

    def base_everywhere(self, step: int) -> None:
        """Note that the base of ``step`` is in the memory of other nodes. Any thread."""
        self.copied(_PEERS, step, None)

    def copied(self, place: int, base: int | None, step: int | None) -> None:
        """Note a base, or the log up to ``step``, that is in a place. Any thread."""
        self._places.setdefault(place, _Place()).arrived(base, step)

    def figures(self) -> Mapping[str, Any]:
        """Return the newest steps that survive the machine, this process, and all but a place."""
        return {
            "durable_step": self.durable_step,
            "recoverable_step": self.step,
            "recoverable_from": self.by_place,
        }

    @property
    def durable_step(self) -> int | None:
        """Newest step on disk; None if unknown."""
        others = [one.durable_step for one in self._participants if one is not self]
        return _newest(self._restored_from, self._keepers.stats.durable_step, *others)

    @property
    def step(self) -> int | None:
        """Newest step on disk or in the keeper's memory; None if unknown."""
        keeper = self._keepers.current
        durable_step = self.durable_step
        if keeper is None or keeper.pid is None or keeper.lost is not None:
            return durable_step  # a keeper thread dies with this process
        reachable = [one.reachable_step for one in self._participants]
        taken = (save for owner, save in self._recent if owner is keeper)
        complete = [save.step for save in taken if save.is_staged and not save.is_lost]
        return _newest(durable_step, *reachable, *complete)

    @property
    def by_place(self) -> dict[str, int]:
        """Newest step that a base and the log lead to in each place for copies, by its name.

        An exact log leads there from a base that is there, and over no update that it lacks.
        """
        found: dict[str, int] = {}
        for number, place in list(self._places.items()):
            if place.base is None:
                continue
            name = self._names[number]
            log = self._keepers.peer_log_step if number == _PEERS else place.log
            leads = name in self._exact and (place.base, self._holes) in self._holes_before
            found[name] = max(place.base, log if leads and log is not None else 0)
        return found

    def name_of(self, place: int) -> str:
        """Return the name of a place by its number."""
        return self._names[place]

    def step_in(self, names: Collection[str]) -> int | None:
        """Return the newest step in any of these places for copies; None if there is none."""
        return max((step for name, step in self.by_place.items() if name in names), default=None)

    @property
    def _holes(self) -> int:
        return 0 if self._recorder is None else self._recorder.stats.holes


def _newest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


@dataclass(slots=True)
class _Place:
    """Newest base, and newest step of the log, that one place has; None without one."""

    base: int | None = None
    log: int | None = None

    def arrived(self, base: int | None, log: int | None) -> None:
        """Note what has arrived."""
        self.base = self.base if base is None else base
        self.log = self.log if log is None else log
