"""What lies between the hosts of a drill: network namespaces, or nothing but loopback.

With namespaces every host has one, and one more holds a bridge as their switch; a veth pair leads
from each to it, with a token bucket (tc tbf) at both ends. Nothing is added to the network of this
machine itself, and with the namespaces all is gone. It takes root and iproute2. Without them hosts
are process groups which share the loopback device, and no rate is limited.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

from everstep.drill.plan import Links
from everstep.drill.processes import DrillError
from everstep.errors import UnavailableError

__all__ = ["Groups", "Namespaces", "Network", "choose_network", "why_no_namespaces"]

_TIMEOUT_S = 15.0
_SUBNET = "10.231.7"
_DEVICE = "eth0"
_BURST = "512kb"
_FIRST_PORT = 29500

Command = Callable[[Sequence[str]], str | None]
"""Runs a program; None if all went well, else what it said."""


class Network(Protocol):
    """Between the hosts, which are numbered from 0."""

    name: str

    def describe(self) -> str:
        """What it is, and what it is not, for people."""
        ...

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """What runs ``command`` on a host."""
        ...

    def address(self, host: int) -> str:
        """At which the others reach it."""
        ...

    def environment(self) -> dict[str, str]:
        """What programs on any host have to know of it."""
        ...

    def port(self) -> int:
        """Of host 0, free; another one at each call."""
        ...

    def cut(self, host: int) -> None:
        """Nothing arrives at the host any more, and nothing leaves it."""
        ...

    def replace(self, host: int) -> None:
        """The host is another one at the same address; all on it has been ended before."""
        ...

    def close(self) -> None:
        """Takes everything down; harmless when called again."""
        ...


class Groups:
    """Process groups on loopback."""

    name = "process groups"

    def __init__(self, why: str) -> None:
        self._why = why

    def describe(self) -> str:
        """What it is not."""
        return f"process groups on loopback, no link is limited ({self._why})"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command itself."""
        return list(command)

    def address(self, host: int) -> str:
        """Loopback."""
        return "127.0.0.1"

    def environment(self) -> dict[str, str]:
        """Gloo would look for the machine's name."""
        return {"GLOO_SOCKET_IFNAME": "lo"}

    def port(self) -> int:
        """One that nobody listens at."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def cut(self, host: int) -> None:
        """Raises: UnavailableError: always."""
        raise UnavailableError("process groups have no links that could be cut", hint="no --cut")

    def replace(self, host: int) -> None:
        """There is nothing of it."""

    def close(self) -> None:
        """There is nothing of it."""


class Namespaces:
    """Network namespaces with links of a stated rate.

    Args:
        word: that the names begin with; random.
        hosts: how many.
        bits_per_s: of each link, each way.
        run: runs a program.

    Raises:
        DrillError: some command failed; what was made is removed.
    """

    name = "network namespaces"

    def __init__(
        self, word: str, hosts: int, bits_per_s: int, run: Command = lambda c: _run(c)
    ) -> None:
        self._hosts, self._rate, self._run = hosts, bits_per_s, run
        self._switch = f"es-{word}-sw"
        self._names = [f"es-{word}-{host}" for host in range(hosts)]
        self._made: list[str] = []
        self._port = _FIRST_PORT
        try:
            self._make(self._switch)
            self._ip(self._switch, "link add br0 type bridge")
            self._ip(self._switch, "link set br0 up")
            for host in range(hosts):
                self._join(host)
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        """How many, and how fast."""
        return (
            f"{self._hosts} network namespaces on one machine, links of {self._rate / 1e6:g} "
            "Mbit/s each way (emulated: tc tbf)"
        )

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """In the host's namespace; the process is the same."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def address(self, host: int) -> str:
        """Of its end of the link."""
        return f"{_SUBNET}.{host + 1}"

    def environment(self) -> dict[str, str]:
        """The device that gloo takes."""
        return {"GLOO_SOCKET_IFNAME": _DEVICE}

    def port(self) -> int:
        """The next one: nobody else is in these namespaces."""
        self._port += 1
        return self._port

    def cut(self, host: int) -> None:
        """Takes down the switch's end of its link."""
        self._ip(self._switch, f"link set h{host} down")

    def replace(self, host: int) -> None:
        """Another namespace, and another link."""
        self._ip(self._switch, f"link del h{host}")
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

    def _join(self, host: int) -> None:
        name, end = self._names[host], f"h{host}"
        self._make(name)
        self._ip(self._switch, f"link add {end} type veth peer name {_DEVICE} netns {name}")
        self._ip(self._switch, f"link set {end} master br0 up")
        self._ip(name, f"addr add {self.address(host)}/24 dev {_DEVICE}")
        self._ip(name, f"link set {_DEVICE} up")
        self._ip(name, "link set lo up")
        for where, device in ((name, _DEVICE), (self._switch, end)):
            self._do(
                f"tc -n {where} qdisc add dev {device} root tbf rate {self._rate}bit "
                f"burst {_BURST} latency 100ms"
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
    why_not: Callable[[str], str | None] = why_no_namespaces,
    run: Command | None = None,
) -> Network:
    """Namespaces where the machine gives them, else process groups; or what was asked for.

    Args:
        why_not: why there are no namespaces.

    Raises:
        UnavailableError: namespaces were asked for, and there are none.
    """
    if links == "groups":
        return Groups("asked for")
    why = why_not(word)
    if why is None:
        return Namespaces(word, hosts, bits_per_s, run or _run)
    if links == "namespaces":
        raise UnavailableError(
            f"this machine gives no network namespaces: {why}",
            hint="as root, with iproute2 installed; or --links groups",
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
