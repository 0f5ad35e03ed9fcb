"""Options that users choose: the public names of :mod:`everstep.config.options`."""

from __future__ import annotations

from everstep.config.intervals import Every, History
from everstep.config.method import Method, presets
from everstep.config.options import (
    ANNOUNCING,
    Budget,
    FailurePolicy,
    KeeperOptions,
    LogOptions,
    Options,
    Preemption,
    validate_options,
)

__all__ = [
    "ANNOUNCING",
    "Budget",
    "Every",
    "FailurePolicy",
    "History",
    "KeeperOptions",
    "LogOptions",
    "Method",
    "Options",
    "Preemption",
    "presets",
    "validate_options",
]
