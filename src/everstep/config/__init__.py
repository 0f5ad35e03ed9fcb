"""Options: everything that a user can choose, validated once.

Read ``options`` first; users import its names from ``everstep.options``. ``method`` has the
presets, ``given`` checks names, types and numbers.
"""

from everstep.config.given import is_int, is_number, named, nearest
from everstep.config.method import AUTO, Method, presets
from everstep.config.options import (
    EventListeners,
    Every,
    FailurePolicy,
    History,
    KeeperOptions,
    Options,
)

__all__ = [
    "AUTO",
    "EventListeners",
    "Every",
    "FailurePolicy",
    "History",
    "KeeperOptions",
    "Method",
    "Options",
    "is_int",
    "is_number",
    "named",
    "nearest",
    "presets",
]
