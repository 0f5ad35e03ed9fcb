"""This rank's part of what DDP's ranks consume alike (``docs/design/ranks.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.link.recordable import Grouping
from everstep.state.layout.names import GRADIENT, PART_OBJECT, UPDATE_OBJECT
from everstep.state.providers.zero import ZeroProvider
from everstep.state.ranks.log_shares import LogShare, log_shares, names_digest
from everstep.state.training_state import State
from everstep.trainer.log.consumed import Consumed, Consumption

__all__ = ["LogPart"]


class LogPart:
    """Looks at what an optimizer is going to consume, as far as this rank records it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._groupings: Mapping[str, Grouping] | None = None
        self._apart = frozenset[int]()  # what each rank trains by itself, though DDP is around it
        self._parts: Mapping[str, Mapping[str, LogShare]] = {}
        self._own: dict[str, frozenset[str]] = {}
        self._last: dict[str, tuple[list[str], list[Any]]] = {}

    def look(self, consumption: Consumption, key: str) -> tuple[Consumed, str, Mapping[str, Any]]:
        """What the optimizer ``key`` consumes now, and the object of its record: name and value.

        Raises:
            UnsupportedStateError: no record can hold it.
        """
        apart = self._apart if self._state.ranks.world == 1 else self._state.rank_local.own()
        if self._groupings is not consumption.groupings or apart != self._apart:
            self._apart = apart
            self._regroup(consumption.groupings)
        own = self._own.get(key)
        consumed = consumption.look(key, own)
        if own is None:
            return consumed, UPDATE_OBJECT, consumed.about
        about = {**consumed.about, "shared": self._shared(consumption, key)}
        if resting := [n for n, p in consumption.members(key, own) if p.grad is None]:
            about["resting"] = [name.removeprefix(GRADIENT) for name in resting]
        if isinstance(self._state.providers[key], ZeroProvider):
            about["spread"] = True
        return consumed, PART_OBJECT, about

    def _regroup(self, groupings: Mapping[str, Grouping]) -> None:
        self._groupings, self._parts = groupings, log_shares(self._state)
        self._own = {}
        self._last = {}
        me = self._state.ranks.rank
        for key, parts in self._parts.items():
            names = groupings[key].names
            mine = [n for n in names if (part := parts.get(n)) is None or part.owner == me]
            self._own[key] = frozenset(mine)

    def _shared(self, consumption: Consumption, key: str) -> list[Any]:
        """Of what ranks consume alike, for each choice of ranks: these, a digest of the names of
        all of its gradients, and the names of those in this rank's record."""
        parts = self._parts[key]
        members = [(n.removeprefix(GRADIENT), p) for n, p in consumption.members(key)]
        names = [n for n, p in members if n in parts and p.grad is not None]
        last = self._last.get(key)
        if last is not None and last[0] == names:  # mostly
            return last[1]
        me = self._state.ranks.rank
        alike = dict[tuple[int, ...], list[str]]()
        for part in parts.values():
            alike.setdefault(part.ranks, [])
        for name in names:
            alike[parts[name].ranks].append(name)
        shared: list[Any] = [
            [list(ranks), names_digest(found), [n for n in found if parts[n].owner == me]]
            for ranks, found in sorted(alike.items())
        ]
        self._last[key] = names, shared
        return shared
