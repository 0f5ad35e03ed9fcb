"""Objects of a class that hold a given object, found through the garbage collector.

``gc.get_objects()`` would find them, too, but refers for a moment to tuples that other threads are
still filling: a ``tuple(generator)`` in such a thread then ends in a SystemError. Only what refers
to the given objects is looked at here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

__all__ = ["find_referrers"]


def find_referrers(values: Iterable[object], *kinds: type, depth: int) -> list[Any]:
    """Return the objects of some classes that refer to one of ``values``, directly or through dicts
    and lists, such as the ``__dict__`` of an instance.

    Each reference takes a look at all objects of the process: tens of milliseconds for 300 000.

    Args:
        values: what is held.
        kinds: classes of the holders, or what they derive from.
        depth: number of references between a holder and a value, at most.
    """
    found: list[Any] = []
    seen: set[int] = set()
    level = list(values)
    while level and depth:
        depth -= 1
        further: list[object] = []
        for one in gc.get_referrers(*level):
            if one is level or id(one) in seen:
                continue
            seen.add(id(one))
            # Not isinstance(): it asks __class__, which may run code of others.
            if any(kind in type(one).__mro__ for kind in kinds):
                found.append(one)
            elif type(one) in (dict, list):
                further.append(one)
        level = further
    return found
