"""An object store as a tier, using obstore: S3 and compatible stores, GCS, Azure.

Credentials come from where the store's clients find them (environment, web identity, container and
instance metadata; profiles through boto3, if it is installed) and are renewed there. They are never
an argument, in a URL, or kept here.

obstore has threads of its own, which a forked child does not inherit: every call there would hang,
so it is refused.

A client's error messages may contain anything: addresses with signatures, replies of the server
that repeat access keys or even session tokens. Therefore only known, harmless facts are passed on:
the status, the code of the reply, the kind of failure. Errors made here are raised outside any
``except`` block, without cause or context.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from everstep.errors import (
    OptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    UnavailableError,
    UnreachableError,
)
from everstep.seams import ReadFile
from everstep.tiers.contract import Item, Traits, check_name, pieces_of, read_whole

# obstore passes on its client's errors as text only. These patterns take out the facts that are
# safe to repeat; none of them matches an address or a signature.
# Deletions are sent in batches, and of each only "(code: ...)" is known: of Azure a status, of S3 a
# code.
_STATUS = re.compile(r"status code: (\d{3})|\bstatus: (\d{3})\b|\(code: (\d{3})\)")
_NAME = "([A-Za-z][A-Za-z0-9]{0,60})"
_CODE = re.compile(rf"<Code>{_NAME}</Code>|\(code: {_NAME}\)")
_KIND = re.compile(r"\bkind: (Connect|Request|Timeout|Interrupted|Decode|Unknown)\b")
_SYSTEM = re.compile(r'message: "([A-Za-z ]{1,60})"')

_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException", "InvalidToken")
_REFUSED = ("AccessDenied",)
_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
_FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull")
_NO_PLACE = ("NoSuchBucket", "ContainerNotFound")
_BUSY = ("ConditionalRequestConflict", "OperationAborted", "SlowDown", "RequestTimeout")
# The instance metadata service is the last source of credentials that a client tries: an error
# about its address means that no other source had any.
_METADATA_SERVICE = ("169.254.", "metadata.google.internal", "/latest/api/token")
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")

_KINDS = {
    "Connect": "no connection",
    "Timeout": "no reply in time",
    "Interrupted": "the connection broke",
    "Decode": "the reply was cut off",
}


def translate_error(error: BaseException, what: str, address: str) -> Exception:
    """Return the error to raise for an error of the client library.

    Args:
        what: the action for the message, e.g. ``"read"``.
        address: address of the object or tier, without credentials.

    Returns:
        ``FileNotFoundError``, or a :class:`StorageError` with tier, path and hint.
    """
    text = str(error)
    status = _status(text)
    code = _first(_CODE, text)
    kind = type(error).__name__
    reason = f"status {status} {code}".rstrip() if status else code or _transport(text)

    def failure(kind_of_error: type[StorageError], problem: str, hint: str) -> StorageError:
        return kind_of_error(f"could not {what}: {problem}", tier="object", path=address, hint=hint)

    # Before FileNotFoundError: a missing bucket must not look like a run without this object.
    if code in _NO_PLACE:
        problem = "the store has no such bucket or container"
        return failure(StorageError, problem, "create it first, or correct the URL")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{address}: there is no such object")
    # With a code the store itself has replied, so there were credentials.
    if any(address in text for address in _METADATA_SERVICE) and not code:
        hint = "set them in the environment as for any client of this store, or use a profile"
        return failure(PermissionDeniedError, "no credentials were found", hint)
    if code in _SKEWED:
        hint = "correct the clock of this machine: requests are signed with the time"
        return failure(PermissionDeniedError, reason, hint)
    if kind in _DENIED or status in (401, 403) or code in (*_EXPIRED, *_REFUSED):
        verdict = "have expired" if code in _EXPIRED else "were refused"
        hint = "check that they are valid, and their permissions for this bucket"
        return failure(PermissionDeniedError, f"the credentials {verdict} ({reason})", hint)
    if status == 507 or code in _FULL:
        return failure(OutOfSpaceError, reason, "free space in the store")
    # The e-tag sent with a read is no longer that of the object. A retry would fail the same way.
    if kind == "PreconditionError":
        problem = "the object was replaced during the operation"
        return failure(StorageError, problem, "another process is writing to the same place")
    busy = status in (408, 425, 429) or (status or 0) >= 500 or code in _BUSY
    # Without a status no complete reply was received: no connection, a timeout, or a reply that was
    # cut off.
    if busy or (status is None and kind == "GenericError"):
        return failure(UnreachableError, reason, "check the store and the network to it")
    return failure(StorageError, reason, "check the store, its URL and its options")


def _status(text: str) -> int | None:
    digits = _first(_STATUS, text)
    return int(digits) if digits else None


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next(filter(None, match.groups()), "") if match else ""


def _transport(text: str) -> str:
    reason = _KINDS.get(_first(_KIND, text), "the request failed")
    system = _first(_SYSTEM, text)
    return f"{reason} ({system})" if system else reason


PART_BYTES = 16 << 20
"""Bytes per part of a multipart upload; more for objects that would exceed the number of parts."""

_PARTS_MAX = 9_000
"""Maximum parts of a multipart upload; S3 allows 10000."""
# Each part in flight is held in memory.
_PARTS_AT_ONCE = 4
_RETRIES = 2
"""Retries of one request by the client; :mod:`everstep.tiers.retry` retries operations."""
_ENDPOINTS = {
    "s3": ("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("base_url", "GOOGLE_BASE_URL"),
    "az": ("endpoint", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Schemes, each with the option and the variables of the environment that name another server."""
_URL_HINT = "use a URL like s3://bucket/prefix"

Credentials = Callable[[], Any]


class ObjectTier:
    """Objects under a URL such as ``s3://bucket/prefix``.

    Args:
        url: URL; its scheme selects the store: ``s3``, ``gs`` or ``az``.
        timeout_s: timeout of one request, including the transfer of a part.
        part_bytes: bytes per part of multipart uploads; S3 requires at least 5 MiB.
        options: further options of the store, as obstore names them (``endpoint``, ``region``; of
            ``gs``: ``base_url``).
        credentials: obstore's ``credential_provider``; None: the usual chain.

    Raises:
        OptionError: the URL is invalid, or contains credentials.
        UnavailableError: obstore is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        part_bytes: int = PART_BYTES,
        options: dict[str, Any] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._url = _checked(url)
        self._obstore = _library()
        self._timeout_s = timeout_s
        self._part_bytes = part_bytes
        self._options = dict(options or {})
        self._credentials = credentials
        self._pid = os.getpid()
        self._store = self._connect()
        self.traits = Traits("object", 3)

    def __repr__(self) -> str:
        return f"ObjectTier({self._url!r})"

    def __reduce__(self) -> Any:
        raise TypeError("an ObjectTier cannot be pickled: it holds credentials")

    @property
    def url(self) -> str:
        return self._url

    def put(self, name: str, source: ReadFile) -> None:
        check_name(name)
        size_bytes = source.size_bytes
        part_bytes = max(self._part_bytes, -(-size_bytes // _PARTS_MAX))
        broken: list[BaseException] = []

        def pieces() -> Iterator[memoryview]:
            try:
                yield from pieces_of(source, name, part_bytes)
            except BaseException as error:
                # Kept: the client would wrap it in an error of its own.
                broken.append(error)
                raise

        # A small object is read before the request begins, so that no incomplete one can be sent.
        data: Any = read_whole(source, name) if size_bytes <= part_bytes else pieces()
        self._call(
            f"write {name}",
            name,
            lambda: self._obstore.put(
                self._here(),
                name,
                data,
                use_multipart=size_bytes > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
            ),
            broken,
        )

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)

        def put() -> bool:
            try:
                # The store decides between concurrent requests (If-None-Match: *).
                self._obstore.put(self._here(), name, data, mode="create", use_multipart=False)
            except Exception as error:
                if type(error).__name__ != "AlreadyExistsError":
                    raise
                return False
            return True

        if self._call(f"create {name}", name, put):
            return True
        # Perhaps written by an earlier request of this process whose reply was lost.
        try:
            file = self.open(name)
        except FileNotFoundError:
            # Deleted since then: a retry may succeed.
            raise UnreachableError(
                f"could not create {name}: it was deleted meanwhile",
                tier=self.traits.kind,
                path=self._address(name),
            ) from None
        # The size is compared first, so that an object of another size is not read.
        return file.size_bytes == len(data) and read_whole(file, name) == data

    def open(self, name: str) -> ReadFile:
        check_name(name)
        meta = self._call(f"open {name}", name, lambda: self._obstore.head(self._here(), name))
        # The e-tag names the version: if the object is replaced, later reads fail and never mix
        # two.
        return _ObjectFile(self, name, int(meta["size"]), meta.get("e_tag"))

    def scan(self, prefix: str = "") -> list[Item]:
        if prefix:
            check_name(prefix)
        found = self._call(
            "list",
            prefix,
            lambda: self._obstore.list_with_delimiter(self._here(), prefix or None),
        )
        folders = [Item(str(name), None) for name in found["common_prefixes"]]
        return _below(prefix, folders + [_item(meta) for meta in found["objects"]])

    def delete(self, name: str) -> None:
        check_name(name)
        with contextlib.suppress(FileNotFoundError):
            # S3 reports success for a missing object; other stores report that it is missing.
            self._call(f"delete {name}", name, lambda: self._obstore.delete(self._here(), name))

    def sweep(self, prefix: str) -> None:
        """Do nothing: the store discards incomplete uploads by a lifecycle rule of the bucket.

        obstore cannot list them.
        """
        check_name(prefix)

    def check(self) -> None:
        """List one page of names, which also detects a missing bucket."""
        # No object of a run has this prefix, so the reply is small however large the run is.
        self._call("read", "", lambda: self._obstore.list_with_delimiter(self._here(), "check"))

    def refresh(self) -> None:
        self._store = self._connect()

    def close(self) -> None:
        """Do nothing: connections end with the process."""

    def read(self, name: str, begin: int, end: int, e_tag: str | None) -> bytes:
        """Return bytes ``[begin, end)`` of an object if it still has this e-tag."""
        options: dict[str, Any] = {"range": (begin, end)}
        if e_tag:
            options["if_match"] = e_tag

        def get() -> bytes:
            result = self._obstore.get(self._here(), name, options=options)
            return bytes(result.bytes())

        try:
            return self._call(f"read {name}", name, get)  # type: ignore[no-any-return]
        except FileNotFoundError:
            # FileNotFoundError would state that there is no such object, but it was opened before.
            raise StorageError(
                f"could not read {name}: it was deleted during the read",
                tier=self.traits.kind,
                path=self._address(name),
                hint="another process is deleting objects in the same place",
            ) from None

    def _here(self) -> Any:
        if os.getpid() != self._pid:
            raise UnavailableError(
                "an object store cannot be used in a forked child of a process that has used it",
                hint='start the process with the method "spawn" or "forkserver"',
            )
        return self._store

    def _call(
        self,
        what: str,
        name: str,
        operation: Callable[[], Any],
        broken: Sequence[BaseException] = (),
    ) -> Any:
        """Call the client library; raise its error translated, or the one in ``broken``."""
        failure: BaseException
        try:
            return operation()
        except Exception as error:
            failure = broken[0] if broken else self._translated(error, what, name)
        # Outside "except": otherwise the client's error, which may contain credentials, would
        # become the context of this one.
        raise failure

    def _translated(self, error: Exception, what: str, name: str) -> Exception:
        if isinstance(error, (StorageError, UnavailableError)):
            return error
        return translate_error(error, what, self._address(name))

    def _address(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _connect(self) -> Any:
        failure = None
        try:
            return _store(self._url, self._timeout_s, self._options, self._credentials)
        except OptionError:
            raise
        except Exception as error:
            # Only the type: the text may repeat options, and credentials may be among them.
            failure = type(error).__name__
        raise OptionError(
            f"could not set up the store for {self._url} ({failure})",
            hint="check the URL, the store's options and its environment variables",
        )


class _ObjectFile:
    """One version of an object, read in ranges."""

    def __init__(self, tier: ObjectTier, name: str, size_bytes: int, e_tag: str | None) -> None:
        self._tier = tier
        self._name = name
        self._e_tag = e_tag
        self.size_bytes = size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        end = min(offset + buffer.nbytes, self.size_bytes)
        if end <= offset:
            return 0
        data = self._tier.read(self._name, offset, end, self._e_tag)
        if len(data) != end - offset:
            # A proxy may cut a reply short without an error.
            raise UnreachableError(
                f"could not read {self._name}: received {len(data)} of {end - offset} bytes",
                tier="object",
                path=f"{self._tier.url}/{self._name}",
                hint="check the network to the store, and proxies in between",
            )
        buffer.cast("B")[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing: nothing is held open."""


def _item(meta: Any) -> Item:
    return Item(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())


def _below(prefix: str, items: list[Item]) -> list[Item]:
    """Return the items below the prefix, sorted; some stores list an emptied folder within
    itself.
    """
    return sorted(item for item in items if not prefix or item.name.startswith(f"{prefix}/"))


def _checked(url: str) -> str:
    """Return the URL without a trailing slash."""
    scheme, separator, rest = url.partition("://")
    if scheme not in _ENDPOINTS or not separator:
        # Only the scheme is repeated: the rest may contain credentials.
        named = f"{scheme + separator!r}: " if separator else ""
        stores = ", ".join(f"{one}://" for one in _ENDPOINTS)
        raise OptionError(f"{named}not an object store; supported: {stores}", hint=_URL_HINT)
    bucket, _, prefix = rest.partition("/")
    # Credentials would be before an "@", or in the query of a signed URL; so nothing of it is
    # repeated.
    if "@" in bucket or "?" in rest or "#" in rest:
        raise OptionError(
            f"a URL {scheme}://... may contain only a bucket and a prefix",
            hint="credentials come from the environment or a profile, never from a URL",
        )
    prefix = prefix.strip("/")
    if not bucket:
        raise OptionError(f"{url!r} does not name a bucket", hint=_URL_HINT)
    if prefix:
        try:
            check_name(prefix)
        except OptionError as error:
            raise OptionError(f"{url!r}: {error.message}", hint=_URL_HINT) from None
    return f"{scheme}://{bucket}/{prefix}" if prefix else f"{scheme}://{bucket}"


def _library() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise UnavailableError(
            "object stores need obstore, which is not installed",
            hint="pip install 'everstep[cloud]'",
        ) from None


def _store(
    url: str, timeout_s: float, options: dict[str, Any], credentials: Credentials | None
) -> Any:
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
        "timeout": timedelta(seconds=timeout_s),
    }
    scheme = url.partition("://")[0]
    # Unencrypted only if the configured endpoint says so.
    if _endpoint(scheme, options).startswith("http://"):
        client["allow_http"] = True
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2)}
    retries: dict[str, Any] = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": pauses,
    }
    if credentials is None and scheme == "s3":
        credentials = _profile()
    if credentials is not None:
        options = {**options, "credential_provider": credentials}
    store: Any = importlib.import_module("obstore.store")
    return store.from_url(url, client_options=client, retry_config=retries, **options)


def _endpoint(scheme: str, options: dict[str, Any]) -> str:
    option, *names = _ENDPOINTS[scheme]
    found = options.get(option) or next((os.environ[n] for n in names if n in os.environ), "")
    return str(found)


def _profile() -> Credentials | None:
    """Return a provider for ``AWS_PROFILE``, if it is set: obstore does not read profiles."""
    if "AWS_PROFILE" not in os.environ or not os.environ["AWS_PROFILE"]:
        return None
    try:
        boto3: Any = importlib.import_module("obstore.auth.boto3")
    except ImportError:
        raise OptionError(
            "AWS_PROFILE is set, but reading profiles needs boto3, which is not installed",
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
        ) from None
    return boto3.Boto3CredentialProvider()  # type: ignore[no-any-return]
