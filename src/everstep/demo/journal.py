"""What a child tells the supervisor while it runs: one JSON object per line, append-only.

Each line is one ``write`` to a file opened for appending, so it is in the kernel's hands
when the call returns and a SIGKILL right after cannot take it back. A line without an end
is one that a kill cut short; a reader leaves it alone.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Event", "JournalReader", "JournalWriter"]

Event = dict[str, Any]
"""One line: ``event`` names its kind, ``at_s`` is the machine's monotonic clock."""


class JournalWriter:
    """Appends events to the file ``path``, which must not exist yet."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event; it survives this process from here on."""
        line = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
        data = memoryview(line.encode() + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


class JournalReader:
    """Follows a journal that may not exist yet and is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Event]:
        """The whole lines that were appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
