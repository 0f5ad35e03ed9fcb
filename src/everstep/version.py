"""The version of everstep, and what it needs of torch."""

from __future__ import annotations

import re

__version__ = "0.1.0"

TORCH_MIN = (2, 6)


def is_too_old(torch_version: str) -> bool:
    """Return True if this version of torch is older than :data:`TORCH_MIN`, or cannot be parsed.

    Pre-releases of that version (2.6.0a0, as vendors build them) are accepted.
    """
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    return numbers is None or (int(numbers[1]), int(numbers[2])) < TORCH_MIN
