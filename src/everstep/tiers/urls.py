"""URLs of places, and the tiers that they name."""

from __future__ import annotations

import os
import re
from pathlib import PurePath, PurePosixPath

from everstep.errors import OptionError
from everstep.seams import Clock, FileSystem
from everstep.tiers.contract import Tier
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.object import ObjectTier
from everstep.tiers.retry import RetryingTier

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ONE_SLASH = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


class UrlPath(PurePosixPath):
    """A path below a URL. Plain paths would print ``s3://x`` as ``s3:/x``."""

    __slots__ = ()

    def __str__(self) -> str:
        return _ONE_SLASH.sub(r"\1://", super().__str__())


def is_url(text: str) -> bool:
    """Return True if the text is a URL, not a path."""
    return _URL.match(text) is not None


def open_tier(where: str, filesystem: FileSystem, *, clock: Clock | None = None) -> Tier:
    """Return the tier at a URL (``s3://bucket/prefix``, ``gs://``, ``az://``) or in a directory.

    Does not access it; use :meth:`Tier.check` for that.

    Args:
        filesystem: file system of a directory.

    Raises:
        OptionError: it is neither a URL nor an absolute path.
        UnavailableError: the library for the store is not installed.
    """
    if is_url(where):
        return RetryingTier(ObjectTier(where), clock=clock)
    if not where or "\0" in where or not os.path.isabs(where):
        raise OptionError(
            f"{where!r} is not a valid place for copies of a run",
            hint="use a URL like s3://bucket/prefix, or the absolute path of a directory",
        )
    return DiskTier(filesystem, PurePath(os.path.normpath(where)))
