"""Version tags of dicts: whether anything in one can have changed, at a glance.

A dict of CPython before 3.12 has a tag, which is another one after each change, and which no other
dict has ever had. Compilers guard by it what they have specialised, and torch has a function that
reads it. That is no public interface, so it is tried out when it is loaded: where it is missing, or
does not notice what it should, there is none, and one looks at all members oneself.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["dict_tags", "keep_order"]

Tag = Callable[[Any], int]


def dict_tags(dicts: Iterable[Mapping[Any, Any]]) -> list[int] | None:
    """The tags of some dicts: equal ones at another time say that all of them have had the same
    keys and values all the while, in the same order if they :func:`keep_order`; None where there
    are no tags."""
    return None if _tag is None else list(map(_tag, dicts))


def keep_order(dicts: Iterable[Mapping[Any, Any]]) -> bool:
    """Whether none changes the order of its keys without another tag, as an ``OrderedDict`` does,
    and whatever brings methods of its own."""
    return {dict, defaultdict}.issuperset(map(type, dicts))


class _Plain:
    a: object


_CHANGES: tuple[Callable[[dict[str, object]], object], ...] = (
    lambda d: d.update(new=1),
    lambda d: d.__setitem__("a", 2.5),
    lambda d: d.__delitem__("a"),
    lambda d: d.pop("b"),
    lambda d: d.setdefault("other"),
    lambda d: d.popitem(),
    lambda d: d.clear(),
)


def _load() -> Tag | None:
    """The function that reads a tag, if dicts have one.

    From Python 3.12 on torch counts changes instead, for which training would pay at each.
    """
    if sys.version_info >= (3, 12) or sys.implementation.name != "cpython":
        return None
    try:
        from torch._C._dynamo.guards import dict_version
    except ImportError:
        return None
    tag: Tag = dict_version
    return tag if _notices(tag) else None


def _notices(tag: Tag) -> bool:
    """Whether a dict's tag moves with each change, those of an object's attributes too, and
    otherwise does not."""
    made = _Plain()
    members: dict[str, object] = {"a": object(), "b": object(), "c": object()}

    def set_attribute(_: object) -> None:
        made.a = object()

    try:
        for held in (members.copy(), defaultdict(object, members), made.__dict__):
            held.update(members)
            changes = [*_CHANGES, set_attribute] if held is made.__dict__ else _CHANGES
            for change in changes:
                before = tag(held)
                again = tag(held)
                change(held)
                if again != before or tag(held) == before:
                    return False
    except (RuntimeError, TypeError):
        return False
    return True


_tag = _load()
