"""Extension of Griffe: Sphinx's marks in docstrings, in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?P<role>mod|class|func|meth|attr|data):`(?P<short>~?)\.?(?P<name>[\w.]+)`")
BLOCK = re.compile(r"::$", re.M)


class Roles(griffe.Extension):
    """Write ``:class:`~everstep.Save``` as ``Save``, and ``::`` before a block as ``:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was read."""
        if obj.docstring is not None:
            text = ROLE.sub(_code, obj.docstring.value)
            obj.docstring.value = BLOCK.sub(":", text)


def _code(match: re.Match[str]) -> str:
    name = match["name"].rpartition(".")[2] if match["short"] else match["name"]
    return f"`{name}()`" if match["role"] in ("func", "meth") else f"`{name}`"
