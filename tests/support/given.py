"""Validated options of a Checkpointer."""

from __future__ import annotations

from typing import Any

from everstep.options import Options, validate_options


def options(**changes: Any) -> Options:
    given: dict[str, Any] = {
        "method": "async",
        "every": 100,
        "keep": 3,
        "budget": None,
        "on_failure": "raise",
        "progress_timeout_s": 120.0,
    }
    return validate_options(**{**given, **changes})
