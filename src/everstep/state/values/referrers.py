"""Find objects that refer to given objects, through the garbage collector.

``gc.get_objects()`` is not used: for a moment it holds references to tuples that other threads are
still filling, and a ``tuple(generator)`` in such a thread then fails with a SystemError.
``gc.get_referrers()`` touches only objects that refer to the given ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any


def find_referrers(values: Iterable[object], *kinds: type, depth: int) -> list[Any]:
    """Return the objects of some classes that refer to one of ``values``, directly or through dicts
    and lists, such as the ``__dict__`` of an instance.

    Each level takes a pass over all objects of the process: tens of milliseconds for 300 000.

    Args:
        values: objects to find the holders of.
        kinds: classes of the holders, or their bases.
        depth: maximum number of references between a holder and a value.
    """
    found: list[Any] = []
    seen: set[int] = set()
    level = list(values)
    while level and depth:
        depth -= 1
        further: list[object] = []
        for one in gc.get_referrers(*level):
            # The list `level` refers to all of them as well.
            if one is level or id(one) in seen:
                continue
            seen.add(id(one))
            # Not isinstance(): it reads __class__, which may run foreign code.
            if any(kind in type(one).__mro__ for kind in kinds):
                found.append(one)
            elif type(one) in (dict, list):
                further.append(one)
        level = further
    return found
