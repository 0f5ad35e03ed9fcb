"""Arguments of a Checkpointer from a configuration: a dict, YAML, OmegaConf or Hydra."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everstep.config import Every, KeeperOptions
from everstep.config.given import is_sequence, refuse_unknown
from everstep.config.method import Method
from everstep.config.options import Budget, LogOptions, Preemption
from everstep.errors import OptionError
from everstep.tiers import PeerOptions, TierOptions

_KINDS: Mapping[str, Any] = {
    "budget": Budget,
    "every": Every,
    "keeper": KeeperOptions,
    "log": LogOptions,
    "method": Method,
    "preempt": Preemption,
}
"""Arguments that may be mappings, with the class of their fields."""

_PLAIN = ("declared", "keep", "on_failure", "path", "progress_timeout_s", "static", "tiers")
_PEER = "peer"

_VARIABLES = {
    "EVERSTEP_DIR": "path",
    "EVERSTEP_EVERY": "every",
    "EVERSTEP_KEEP": "keep",
    "EVERSTEP_METHOD": "method",
}
"""Variables of the environment, each with the argument that it sets."""


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Checkpointer, but for its state.

    Args:
        config: arguments by name. Those that are options of their own may be mappings of their
            fields; of ``tiers`` each item may be one, ``{"where": ...}`` or ``{"peer": {...}}``.

    Raises:
        OptionError: an unknown or invalid option, or no path.
    """
    if not isinstance(config, Mapping):
        raise OptionError(f"a configuration must be a mapping, not a {type(config).__name__}")
    given = {str(name): value for name, value in config.items()}
    given |= _from_environment()
    refuse_unknown("a configuration", given, sorted([*_KINDS, *_PLAIN]))
    if not given.get("path"):
        raise OptionError(
            "the configuration has no path", hint="set path, or EVERSTEP_DIR in the environment"
        )
    for name, kind in _KINDS.items():
        if isinstance(given.get(name), Mapping):
            given[name] = kind(**given[name])
    if is_sequence(given.get("tiers")):
        given["tiers"] = [_tier(one) for one in given["tiers"]]
    return given


def _from_environment() -> dict[str, Any]:
    found = {}
    for variable, name in _VARIABLES.items():
        if text := os.environ.get(variable):
            found[name] = int(text) if text.isdecimal() and name != "path" else text
    return found


def _tier(one: Any) -> Any:
    if not isinstance(one, Mapping):
        return one
    if _PEER in one:
        refuse_unknown("an item of tiers", one, [_PEER])
        return PeerOptions(**(one[_PEER] or {}))
    return TierOptions(**one)
