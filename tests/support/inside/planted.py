"""Mistakes planted in the project's own code, for tests that must find them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest


def replace(
    patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], object]
) -> None:
    """Replaces a function by what ``make`` makes of the real one.

    Only to plant a mistake: it may be private, and then its name is all that a test knows of it.

    Args:
        patch: undoes it.
        owner: a module or class.
        name: of the function, or ``"class.method"``.
        make: given the real function, returns the one with the mistake.
    """
    *path, last = name.split(".")
    owner = attrgetter(".".join(path))(owner) if path else owner
    patch.setattr(owner, last, make(getattr(owner, last)))
