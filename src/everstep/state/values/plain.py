"""Plain data that can be stored whatever it is, told from the rest without a walk through it.

Most objects of a state are a few numbers in dicts and lists, and they are looked at in the
training thread at each save.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from operator import eq
from typing import Any, Final

__all__ = ["CROWD", "FIXED", "is_crowded", "is_fixed", "is_plain"]

FIXED: Final = frozenset((type(None), bool, int, float))
"""Types whose values can all be stored, and never change."""

CROWD: Final = 256
"""So many keys of a dict, or members of a set, may have one hash; nothing but malice has more."""

_STR = frozenset((str,))
_SECRETLY_HASHED = frozenset((str, bytes))
_LEVELS = 8
_TEXT_BYTES_MAX = 1 << 20


def is_plain(value: object, levels: int = _LEVELS) -> bool:
    """Whether a value is made of nothing but numbers, bools, None and short ASCII texts, in dicts
    with such texts as keys, lists and tuples, at most so many levels deep."""
    kind = type(value)
    if kind is str:
        assert isinstance(value, str)
        return value.isascii() and len(value) <= _TEXT_BYTES_MAX
    if kind is dict and levels > 0:
        assert isinstance(value, dict)
        if not _is_named_plainly(value):
            return False
        parts: Iterable[object] = value.values()
    elif kind in (list, tuple) and levels > 0:
        assert isinstance(value, (list, tuple))
        parts = value
    else:
        return kind in FIXED
    if FIXED.issuperset(map(type, parts)):
        return True
    return all(type(part) in FIXED or is_plain(part, levels - 1) for part in parts)


def is_fixed(value: Mapping[Any, Any]) -> bool:
    """Whether a dict holds nothing but numbers, bools, None, and tuples of them: beside being
    plain, none of it can change."""
    for part in value.values():
        kind = type(part)
        if kind not in FIXED and (kind is not tuple or not FIXED.issuperset(map(type, part))):
            return False
    return _is_named_plainly(value)


def is_crowded(keys: Collection[Any]) -> bool:
    """Whether more than :data:`CROWD` of these keys, or members, have the same hash: each of them
    would be compared with all before it, and a few megabytes would take minutes.

    Raises:
        TypeError: one of them has no hash.
    """
    if len(keys) <= CROWD or _SECRETLY_HASHED.issuperset(kinds := set(map(type, keys))):
        return False
    if kinds == {int} and max(map(abs, keys)) < sys.hash_info.modulus:
        return False  # their own hashes, but for -1
    hashes = sorted(map(hash, keys))
    return any(map(eq, hashes, hashes[CROWD:]))


def _is_named_plainly(value: Mapping[Any, Any]) -> bool:
    return _STR.issuperset(map(type, value)) and is_plain("".join(value), 0)
