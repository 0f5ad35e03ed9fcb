"""Parts of a state: those of a framework's training, and those that the user adds."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any

from everstep.errors import OptionError


def with_added(
    own: Mapping[str, Any], added: MutableMapping[str, Any] | None, owner: str
) -> MutableMapping[str, Any]:
    """Return a state of the parts of a framework's training and those that the user adds.

    Plain data is read from the user's mapping at each save, and put back there at a resume.

    Args:
        own: parts of the training, by name.
        added: the user's mapping.
        owner: owner of the training, in words.

    Raises:
        OptionError: both have a part of the same name.
    """
    added = {} if added is None else added
    if taken := sorted(own.keys() & added.keys()):
        raise OptionError(f"the part {taken[0]!r} of the state is {owner}'s own")
    # The first mapping takes what is written.
    return ChainMap(added, dict(own))
