"""Standard output and standard error of the command where they are full, closed, or read by nobody.

A reader that has gone (``everstep ls run | head``) has what it wanted: the rest is dropped, and the
exit status stays the verb's. Any other failure is said in one line. What standard error cannot
take is dropped: there is nobody to be told.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["OutputLostError", "guarded_output"]


class OutputLostError(Exception):
    """Standard output could not be written.

    Not an ``OSError``: verbs take those for what the file system says of the run.
    """


class _Stream(io.RawIOBase):
    """Writes to a descriptor until that fails, and from then on nothing.

    Args:
        descriptor: of the other; None if it was closed when the command began.
        tells: whether the failure is an error.
    """

    def __init__(self, descriptor: int | None, *, tells: bool) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._tells = tells
        self._lost = False

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._descriptor is not None and os.isatty(self._descriptor)

    def fileno(self) -> int:
        if self._descriptor is None:
            raise io.UnsupportedOperation("it is closed")
        return self._descriptor

    def write(self, data: ReadableBuffer, /) -> int:
        # Once it has failed all is taken, or whoever closes a buffer would fail once more.
        if not self._lost:
            try:
                if self._descriptor is None:
                    raise OSError(errno.EBADF, "it is closed")
                return os.write(self._descriptor, data)
            except OSError as error:
                self._lost = True
                if self._tells and not isinstance(error, BrokenPipeError):
                    raise OutputLostError(
                        f"could not write standard output: {error.strerror or error}; what was "
                        "printed is not whole, and what was to be done may be done all the same"
                    ) from error
        return memoryview(data).nbytes


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Lets ``sys.stdout`` and ``sys.stderr`` be written as the module says.

    What cannot be written raises :class:`OutputLostError`, wherever that is noticed; whoever ends
    the block flushes first.
    """
    before = sys.stdout, sys.stderr
    if any(stream is None for stream in before):
        _occupy()
    sys.stdout = _guarded(before[0], tells=True)
    sys.stderr = _guarded(before[1], tells=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _guarded(stream: TextIO | None, *, tells: bool) -> TextIO:
    descriptor = None
    encoding = "utf-8"
    if stream is not None:
        try:
            stream.flush()
            descriptor = stream.fileno()
            encoding = stream.encoding
        except (OSError, ValueError):  # no file, but something of whoever called
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            return stream
    buffer = io.BufferedWriter(_Stream(descriptor, tells=tells))
    # What the terminal's encoding has no character for is spelled out, never an error.
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True)


def _occupy() -> None:
    """Puts nothing where a standard stream is closed: the next file that is opened, of a run
    perhaps, would get its number, and all that a library prints."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
