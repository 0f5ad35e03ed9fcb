"""The hosts of a drill: each with a disk folder, the memory of its keeper, and a way to die."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everstep.seams.processes.processes import RUNTIME_DIR_VARIABLE
from everstep.seams.sockets import SOCKET_PATH_BYTES_MAX
from everstep.workloads.processes import training_environment
from everstep_bench.drill.network import Network, Store
from everstep_bench.drill.processes import (
    MARK,
    DrillError,
    Marked,
    end_marked,
    find_marked,
    mark_of,
)

_KEEPER_SOCKET = f"k/{'0' * 16}.sock"
_SHARED = "durable"


class Hosts:
    """All hosts, numbered from 0, in folders of ``place``.

    Args:
        drill: random word, by which their processes are known.
        count: how many.
        end: ends all processes of a host, or of all of them (None).
        store: the durable tier, behind links; None: a folder, behind none. Closed with the hosts.

    Raises:
        DrillError: ``place`` has too long a name for the sockets of keepers.
    """

    def __init__(
        self,
        place: Path,
        drill: str,
        count: int,
        network: Network,
        end: Callable[[str, int | None], int] = end_marked,
        store: Store | None = None,
    ) -> None:
        self.count = count
        self.network = network
        self.store = store
        self._place = place
        self._drill = drill
        self._end = end
        longest = len(str(self._folder(count) / _KEEPER_SOCKET).encode())
        if longest > SOCKET_PATH_BYTES_MAX:
            raise DrillError(
                f"{place} is too long a name: sockets of keepers in it have {longest} bytes, and "
                f"may have {SOCKET_PATH_BYTES_MAX}",
                path=place,
                hint="name a folder with a shorter path",
            )

    @property
    def durable(self) -> Path:
        """The durable tier, where there is no store: a folder that all hosts see."""
        return self._place / _SHARED

    def durable_tier(self, name: str) -> str:
        """The durable tier of a scenario, as a place for copies."""
        return str(self.durable) if self.store is None else self.store.url(name)

    def drop_runs(self) -> None:
        """Remove the remains of training from all hosts: keepers and run folders."""
        self._end(self._drill, None)
        for host in range(self.count):
            shutil.rmtree(self._folder(host))
            self._furnish(host)

    def disk(self, host: int) -> Path:
        """The disk of a host."""
        return self._folder(host) / "disk"

    def reset(self) -> None:
        """All processes are ended, all disks and the durable tier are empty."""
        self._end(self._drill, None)
        for folder in (self.durable, *map(self._folder, range(self.count))):
            if folder.exists():
                shutil.rmtree(folder)
        self.durable.mkdir()
        for host in range(self.count):
            self._furnish(host)

    def start(
        self, host: int, command: Sequence[str], log: Path, extra: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a program on a host, in a session of its own.

        Args:
            log: file for what it prints.
            extra: environment.
        """
        environment = training_environment(extra.get("EVERSTEP_FAILPOINTS", ""))
        environment.update(self.network.environment())
        if self.store is not None:
            environment.update(self.store.environment())
        environment.update(extra)
        environment[MARK] = mark_of(self._drill, host)
        environment[RUNTIME_DIR_VARIABLE] = str(self._folder(host) / "k")
        with log.open("ab") as output:
            return subprocess.Popen(
                self.network.command(host, command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder(host),
                env=environment,
                start_new_session=True,
            )

    def processes(self, host: int) -> list[Marked]:
        """Return the processes of a host."""
        return find_marked(self._drill, host)

    def kill_process(self, host: int, pid: int) -> None:
        """One process of a host dies; nothing happens if it has died already.

        Raises:
            DrillError: it does not die.
        """
        end_marked(
            self._drill,
            host,
            find=lambda drill, host: [p for p in find_marked(drill, host) if p.pid == pid],
        )

    def kill(self, host: int) -> None:
        """All of its processes die, its keeper too; its disk is gone."""
        self._end(self._drill, host)
        shutil.rmtree(self._folder(host))

    def end_programs(self, argument: Path) -> None:
        """Ends agents and trainers that were started with this argument; keepers stay.

        Raises:
            DrillError: they do not end.
        """
        word = str(argument)

        def started(drill: str, host: int | None) -> list[Marked]:
            return [item for item in find_marked(drill, host) if word in item.command.split()]

        end_marked(self._drill, find=started)

    def replace(self, host: int) -> None:
        """An empty host comes in place of one that was killed."""
        self.network.replace(host)
        self._furnish(host)

    def close(self) -> None:
        """Ends all processes, and takes the network down; the second also if the first fails."""
        try:
            self._end(self._drill, None)
        finally:
            try:
                if self.store is not None:
                    self.store.close()
            finally:
                self.network.close()

    def _folder(self, host: int) -> Path:
        return self._place / f"h{host}"

    def _furnish(self, host: int) -> None:
        self.disk(host).mkdir(parents=True)
        (self._folder(host) / "k").mkdir(mode=0o700)
