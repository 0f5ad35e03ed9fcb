"""Which parameters are trained at all: ``requires_grad`` is in no ``state_dict()``, and so in no
base; whoever goes back behind a change of it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["Frozen"]

_NAMED_MAX = 3


class Frozen:
    """The parameters that are frozen when a process begins, and when it goes back.

    Args:
        values: of the state, by key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._at_begin: frozenset[str] | None = None
        self._step = 0

    def began(self, step: int) -> None:
        """Training goes on from ``step``."""
        self._at_begin = self._now()
        self._step = step

    def changed(self) -> str | None:
        """What has changed since training began here, in words for who goes back."""
        if self._at_begin is None or not (changed := self._at_begin ^ self._now()):
            return None
        names = sorted(changed)
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        return (
            f"requires_grad of {', '.join(names[:_NAMED_MAX])}{more} was changed since step "
            f"{self._step}: it is no part of the state; set it as it was at the step you go back to"
        )

    def _now(self) -> frozenset[str]:
        return frozenset(
            f"{key}.{name}"
            for key, value in self._values.items()
            if isinstance(value, nn.Module)
            for name, parameter in value.named_parameters()
            if not parameter.requires_grad
        )
