"""Options that users choose: the public names of :mod:`everstep.config.options`."""

from __future__ import annotations

from everstep.config import Every, FailurePolicy, History, KeeperOptions, Options, presets
from everstep.config.keep import KeepBest, KeepEvery, KeepNewest
from everstep.config.method import Method
from everstep.config.options import ANNOUNCING, Budget, LogOptions, Preemption, validate_options

__all__ = [
    "ANNOUNCING",
    "Budget",
    "Every",
    "FailurePolicy",
    "History",
    "KeepBest",
    "KeepEvery",
    "KeepNewest",
    "KeeperOptions",
    "LogOptions",
    "Method",
    "Options",
    "Preemption",
    "presets",
    "validate_options",
]
