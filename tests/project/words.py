"""Words that no text of the repository has; ``test_tidy.py`` runs the rule on all of them."""

from __future__ import annotations

import re

__all__ = ["check_words"]

_MACHINE = ("work", "root", "farm", "tmp/lab")
_WORDS = (
    # Put together here, so that this file has none of them.
    re.compile(r"(?<![\w.$}/-])/(?:" + "|".join(_MACHINE) + r")/"),
    re.compile(r"\bissue[ ]#?[0-9]+", re.IGNORECASE),
)


def check_words(path: str, text: str) -> list[str]:
    """No text names a path of the machine that it was written on, or a number of an issue."""
    return [
        f"{path}:{number}: {match.group()!r}"
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in _WORDS
        for match in pattern.finditer(line)
    ]
