"""What an object store or its client says, in our words.

A client's own texts may hold anything: the addresses it asked (with signatures in them), the
answers of the server (which repeat access keys, even session tokens). So nothing of them is
passed on but what is known to be harmless: the status, the code of the answer, the kind of the
failure. The errors made here are raised outside of any ``except``, without a cause or context.
"""

from __future__ import annotations

import re
from typing import Any

from everstep.errors import (
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    UnreachableError,
)

__all__ = ["in_our_words"]

_STATUS = re.compile(r"status code: (\d{3})|\bstatus: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z][A-Za-z0-9]{0,60})</Code>")
_KIND = re.compile(r"\bkind: (Connect|Request|Timeout|Interrupted|Decode|Unknown)\b")
_SYSTEM = re.compile(r'message: "([A-Za-z ]{1,60})"')

_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException", "InvalidToken")
_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
_FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull")
_NO_PLACE = ("NoSuchBucket", "ContainerNotFound")
_BUSY = ("ConditionalRequestConflict", "OperationAborted", "SlowDown", "RequestTimeout")
_METADATA_SERVICE = ("169.254.", "metadata.google.internal", "/latest/api/token")
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")

_KINDS = {
    "Connect": "no connection",
    "Timeout": "no answer in time",
    "Interrupted": "the connection broke",
    "Decode": "the answer broke off",
}


def in_our_words(error: BaseException, what: str, address: str) -> Exception:
    """The error to raise for one of the client library's.

    Args:
        what: what was being done, e.g. ``"read"``.
        address: of the object or tier, without credentials.

    Returns:
        ``FileNotFoundError``, or a :class:`StorageError` with tier, path and hint.
    """
    text = str(error)
    status = _status(text)
    code = _first(_CODE, text)
    kind = type(error).__name__
    said = f"status {status} {code}".rstrip() if status else code or _transport(text)
    where: dict[str, Any] = {"tier": "object", "path": address}
    if code in _NO_PLACE:
        return StorageError(
            f"could not {what}: the store has no such bucket or container",
            hint="make it first, or correct the URL",
            **where,
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{address}: there is no such object")
    if any(mark in text for mark in _METADATA_SERVICE) and not code:
        return PermissionDeniedError(
            f"could not {what}: no credentials were found",
            hint="set them in the environment as for any client of this store, or a profile",
            **where,
        )
    if code in _SKEWED:
        return PermissionDeniedError(
            f"could not {what}: {said}",
            hint="the clock of this machine is wrong: requests are signed with the time",
            **where,
        )
    if kind in _DENIED or status in (401, 403) or code in _EXPIRED:
        expired = code in _EXPIRED
        return PermissionDeniedError(
            f"could not {what}: the credentials {'have expired' if expired else 'do not do'} "
            f"({said})",
            hint="look whether they are still valid, and what they allow for this bucket",
            **where,
        )
    if status == 507 or code in _FULL:
        return OutOfSpaceError(
            f"could not {what}: {said}", hint="free some room in the store", **where
        )
    if kind == "PreconditionError":
        return StorageError(
            f"could not {what}: the object was replaced meanwhile",
            hint="another process writes to the same place",
            **where,
        )
    busy = status in (408, 425, 429) or (status or 0) >= 500 or code in _BUSY
    if busy or (status is None and kind == "GenericError"):
        return UnreachableError(
            f"could not {what}: {said}",
            hint="look at the store and at the network to it",
            **where,
        )
    return StorageError(
        f"could not {what}: {said}",
        hint="look at the store, its URL and its options",
        **where,
    )


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match[1] or match[2]) if match else None


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _transport(text: str) -> str:
    said = _KINDS.get(_first(_KIND, text), "the request failed")
    system = _first(_SYSTEM, text)
    return f"{said} ({system})" if system else said
