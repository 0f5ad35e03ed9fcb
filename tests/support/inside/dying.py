"""The end of a process that leaves nothing time to clean up."""

from __future__ import annotations

import os
from typing import NoReturn


def die(status: int = 0) -> NoReturn:
    """Ends this process at once: no ``finally``, no ``atexit``, nothing flushed."""
    os._exit(status)
