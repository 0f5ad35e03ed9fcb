"""Standard output and standard error that are full, closed, or have no reader.

If the reader of a pipe has ended (``everstep ls run | head``), the rest is dropped and the exit
status stays the verb's. Any other failure of standard output is reported in one line. Output that
standard error cannot take is dropped.
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

    Not an ``OSError``: verbs interpret those as errors of the run's file system.
    """


class _Stream(io.RawIOBase):
    """Write to a descriptor until that fails, and drop everything afterwards.

    Args:
        descriptor: descriptor to write to; None if it was closed when the command began.
        raises: raise an error at the first failure.
    """

    def __init__(self, descriptor: int | None, *, raises: bool) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._raises = raises
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
        # After a failure accept everything: closing the buffer would fail a second time.
        if not self._lost:
            try:
                if self._descriptor is None:
                    raise OSError(errno.EBADF, "it is closed")
                return os.write(self._descriptor, data)
            except OSError as error:
                self._lost = True
                if self._raises and not isinstance(error, BrokenPipeError):
                    raise OutputLostError(
                        f"could not write standard output: {error.strerror or error}; the "
                        "printed text is incomplete, although the command itself may have succeeded"
                    ) from error
        return memoryview(data).nbytes


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that behave as the module describes.

    A failed write raises :class:`OutputLostError` at the next flush; flush before the block ends.
    """
    before = sys.stdout, sys.stderr
    if any(stream is None for stream in before):
        _occupy()
    sys.stdout = _guarded(before[0], raises=True)
    sys.stderr = _guarded(before[1], raises=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _guarded(stream: TextIO | None, *, raises: bool) -> TextIO:
    descriptor = None
    encoding = "utf-8"
    if stream is not None:
        try:
            stream.flush()
            descriptor = stream.fileno()
            encoding = stream.encoding
        except (OSError, ValueError):  # an object of the caller, without a descriptor
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            return stream
    buffer = io.BufferedWriter(_Stream(descriptor, raises=raises))
    # Characters missing in the terminal's encoding are escaped, never an error.
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True)


def _occupy() -> None:
    """Open /dev/null on closed standard descriptors. Otherwise the next opened file, perhaps of a
    run, would get such a number and receive everything that a library prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
