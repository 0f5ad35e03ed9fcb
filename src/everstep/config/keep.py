"""Policies for the bases that stay: the newest, one every so many steps, the best by a metric.

Bases that the user has pinned (``everstep pin``) stay, too, whatever the policies are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from everstep.commit.retention import BestRule, KeepRules
from everstep.config.given import checked, is_int, is_sequence, one_of, refuse_unknown
from everstep.errors import OptionError

_BASES_MAX = 1 << 31

_Mode = Literal["min", "max"]


@checked
@dataclass(frozen=True, slots=True)
class KeepNewest:
    """Keep the newest bases.

    Attributes:
        bases: number of bases.
    """

    bases: int

    def __post_init__(self) -> None:
        _check_count("KeepNewest.bases", self.bases)


@checked
@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep one base every so many steps, for ever: the first one at or after each multiple.

    Attributes:
        steps: number of steps.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery.steps", self.steps)


@checked
@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the bases with the best values of a metric.

    Metrics are given to :meth:`~everstep.Checkpointer.step` or
    :meth:`~everstep.Checkpointer.save`. A base without this metric is not among the best.

    Attributes:
        bases: number of bases.
        metric: name of the metric.
        mode: ``"min"``: the smallest values are the best ones; ``"max"``: the largest.
    """

    bases: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        _check_count("KeepBest.bases", self.bases)
        one_of("KeepBest.mode", self.mode, get_args(_Mode))
        if not isinstance(self.metric, str) or not self.metric:
            raise OptionError(f"KeepBest.metric must be the name of a metric, not {self.metric!r}")


KeepPolicy: TypeAlias = KeepNewest | KeepEvery | KeepBest

DEFAULT_NEWEST = 3
"""Number of newest bases that are kept if no policy says otherwise."""


def parse_keep(value: object) -> KeepRules:
    """Parse ``keep=``: a number of newest bases, a policy, or a sequence of policies.

    Raises:
        OptionError: for any other value, or two policies for the newest bases.
    """
    policies: Any = value if is_sequence(value) else (value,)
    if isinstance(value, int) and is_int(value) and value >= 1:
        if value > _BASES_MAX:
            raise OptionError(f"keep={value!r}: at most {_BASES_MAX} bases can be kept")
        policies = (KeepNewest(value),)
    for one in policies:
        if not isinstance(one, KeepPolicy):
            raise OptionError(
                f"keep must be a whole number of bases, from 1, not {value!r}; or policies",
                hint="everstep.options has KeepNewest, KeepEvery and KeepBest",
            )
    newest = [one.bases for one in policies if isinstance(one, KeepNewest)]
    if len(newest) > 1:
        raise OptionError("keep: there can be only one KeepNewest")
    return KeepRules(
        newest[0] if newest else DEFAULT_NEWEST,
        tuple(one.steps for one in policies if isinstance(one, KeepEvery)),
        tuple(
            BestRule(one.metric, one.bases, largest=one.mode == "max")
            for one in policies
            if isinstance(one, KeepBest)
        ),
    )


def policy_of(fields: object) -> object:
    """Return the policy of a mapping in a configuration; anything else is returned unchanged.

    The forms are ``{"newest": 3}``, ``{"every": 1000}`` and ``{"best": 2, "metric": "val_loss",
    "mode": "min"}``.

    Raises:
        OptionError: the mapping has another form.
    """
    if is_sequence(fields):
        return tuple(policy_of(one) for one in fields)  # type: ignore[attr-defined]
    if not isinstance(fields, Mapping):
        return fields
    given = {str(name): value for name, value in fields.items()}
    refuse_unknown("keep", given, ["newest", "every", "best", "metric", "mode"])
    if given.keys() == {"newest"}:
        return KeepNewest(given["newest"])
    if given.keys() == {"every"}:
        return KeepEvery(given["every"])
    if {"best", "metric"} <= given.keys() and "newest" not in given and "every" not in given:
        return KeepBest(given.pop("best"), **given)
    raise OptionError(
        f"keep: {dict(fields)!r} is not one policy",
        hint='{"newest": 3}, {"every": 1000}, or {"best": 2, "metric": "val_loss"}; a list for '
        "several",
    )


def _check_count(name: str, value: object) -> None:
    if not is_int(value) or not 1 <= value <= _BASES_MAX:  # type: ignore[operator]
        raise OptionError(f"{name} must be a whole number from 1 to {_BASES_MAX}, not {value!r}")
