"""Progress reports of a child process: one JSON object per line, append-only.

Each line is one ``write`` to a file opened for appending: when the call returns, the line is in the
kernel, and a SIGKILL cannot take it back. A reader skips an incomplete last line.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""One line: ``event`` names its kind, ``at_s`` is the machine's monotonic clock."""


class JournalWriter:
    """Append events to the new file ``path``."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; it survives a SIGKILL of this process once the call has returned."""
        line = json.dumps({"event": event, "at_s": time.monotonic(), **fields})
        data = memoryview(line.encode() + b"\n")
        # A signal or a full disk may cut a write short; the reader waits for the end of the line.
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class JournalReader:
    """Follow a journal that may not exist yet and is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Event]:
        """Return the complete lines appended since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
