"""A real S3 server for tests, and a proxy before it that lets things go wrong."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["KEY", "SECRET", "FaultProxy", "free_ports", "options", "server", "weed"]

KEY, SECRET = "test-access-key", "test-secret-that-nobody-may-see"
_READY_TIMEOUT_S = 60.0
_GRPC = 10_000  # each service listens there, too
_PORTS = range(10_240, 20_240)
_HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")


def weed() -> str | None:
    """The program of the server, if it is installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def server(folder: Path, *, name: str = "tests") -> Iterator[str]:
    """Runs a server with its data in ``folder``; yields its URL.

    It is killed at the end: asked politely it takes half a minute.

    Args:
        name: of the one who may use it; ``"anonymous"``: whoever sends no credentials, too.
    """
    program = weed()
    assert program is not None
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": name,
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = folder / "data"
    data.mkdir()
    master, volume, filer, s3 = free_ports(4)
    command = [
        program,
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",  # else a fixed one, of which a machine has one
        "-s3.port.lance=0",
        f"-s3.config={config}",
        "-volume.max=64",
        "-master.volumeSizeLimitMB=1024",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_until_ready(process, s3, folder / "log")
        yield f"http://127.0.0.1:{s3}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        shutil.rmtree(data, ignore_errors=True)


def options(endpoint: str, **more: Any) -> dict[str, Any]:
    """Of an ``ObjectTier`` on the server."""
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        **more,
    }


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "runs",  # made by the first put
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
        **options(f"http://127.0.0.1:{port}"),
    )
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    never = threading.Event()
    while True:
        try:
            obstore.put(store, "ready", b"ready")
            return
        except obstore.exceptions.BaseError as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                said = log.read_bytes()[-2000:].decode(errors="replace")
                raise AssertionError(f"the server did not come up: {error}\n{said}") from error
        never.wait(0.1)


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to whoever asks for any: until the server is up, it would
    give them to other tests."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = secrets.choice(_PORTS)
            if all(_binds(stack, one) for one in (port, port + _GRPC)):
                found.append(port)
    return found


def _binds(stack: contextlib.ExitStack, port: int) -> bool:
    one = stack.enter_context(socket.socket())
    try:
        one.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


class FaultProxy:
    """Stands before a server and spoils some of what goes through.

    ``faults`` holds ``(method, fault)`` to be used up in order by the requests with that method:

    ``"500"``            the server never sees it
    ``"500 after"``      the server does it, but the answer is another
    ``"cut"``            the answer ends in its middle, and the connection
    ``"hang"``           no answer, until the proxy ends
    ``"secret"``         status 403, with an answer that repeats what nobody may see
    ``"expired"``        status 400, ``ExpiredToken``
    ``"skewed"``         status 403, ``RequestTimeTooSkewed``
    ``"unknown"``        status 401, as of Google's API

    Attributes:
        seen: ``"METHOD path"`` of every request.
    """

    def __init__(self, target: str) -> None:
        self.faults: list[tuple[str, str]] = []
        self.seen: list[str] = []
        self.target = target.removeprefix("http://")
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def next_fault(self, method: str) -> str:
        with self._lock:
            for place, (wanted, fault) in enumerate(self.faults):
                if wanted == method:
                    del self.faults[place]
                    return fault
        return ""

    def refusal(self, headers: Mapping[str, str]) -> str:
        """The fault with which a request is refused for good; ``""``: none."""
        return ""

    def translated(self, path: str, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Path and headers of a request as the server gets them."""
        return path, headers

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None: ...

            def _pass_on(self) -> None:
                try:
                    self._do()
                except ConnectionError:  # the client has given up
                    self.close_connection = True

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                proxy.seen.append(f"{self.command} {self.path}")
                fault = proxy.refusal(self.headers) or proxy.next_fault(self.command)
                if fault == "hang":
                    proxy.ended.wait(60)
                    self.close_connection = True
                    return
                if fault in _ANSWERS:
                    self._answer(*_ANSWERS[fault])
                    return
                answer, data = self._asked(body)
                if fault == "500 after":
                    self._answer(*_ANSWERS["500"])
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in (*_HOP_BY_HOP, "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("content-length") or str(len(data))
                self.send_header("content-length", length)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
                self.close_connection = self.close_connection or fault == "cut"

            def _asked(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
                target = http.client.HTTPConnection(proxy.target, timeout=30)
                with contextlib.closing(target) as connection:
                    path, headers = proxy.translated(self.path, dict(self.headers))
                    connection.request(self.command, path, body, headers)
                    answer = connection.getresponse()
                    return answer, answer.read()

            def _answer(self, status: int, text: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on  # noqa: N815

        return Handler


_ANSWERS = {
    "500": (500, "<Error><Code>InternalError</Code></Error>"),
    "expired": (400, "<Error><Code>ExpiredToken</Code></Error>"),
    "unknown": (401, "<Error><Code>AuthenticationRequired</Code></Error>"),
    "skewed": (403, "<Error><Code>RequestTimeTooSkewed</Code></Error>"),
    "secret": (
        403,
        f"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{KEY}</AWSAccessKeyId>"
        f"<StringToSign>x-amz-security-token:{SECRET}</StringToSign></Error>",
    ),
}
