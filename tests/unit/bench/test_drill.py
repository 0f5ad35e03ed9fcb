"""The failure drill: its options, its network, its clean-up, its comparison and its tables; whole
drills are in ``test_drill_runs.py``."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from everstep.cli import app
from everstep.errors import OptionError, UnavailableError
from everstep.options import presets
from everstep.workloads.comparison import Difference, Event, JournalWriter
from everstep_bench.drill import job as job_module
from everstep_bench.drill import network as network_module
from everstep_bench.drill import run as run_module
from everstep_bench.drill.hosts import Hosts
from everstep_bench.drill.job import Start, order_of
from everstep_bench.drill.network import Groups, Namespaces, choose_network
from everstep_bench.drill.plan import ARMS, DrillPlan, drill_plan, parse_at, parse_rate
from everstep_bench.drill.processes import MARK, DrillError, Marked, end_marked, find_marked
from everstep_bench.drill.report import DrillReport, Outcome, introduce
from everstep_bench.drill.run import Drill, _into, compare, median_step_s, run_drill
from everstep_bench.harness.display import progress_display
from tests.support.displays import SilentDrill
from tests.support.stalls import shown_by
from tests.support.world import TIMEOUT_S

# --- Options ----------------------------------------------------------------------------


def test_what_a_drill_does_by_default() -> None:
    plan = drill_plan()
    assert (plan.hosts, plan.kills, plan.arms) == (4, ("process", "node", "rack"), tuple(ARMS))
    assert (plan.at_step, plan.at_point) == (25, None), "half an interval after a base"


@pytest.mark.parametrize(
    ("hosts", "victim", "dead"),
    [
        (4, 1, {"process": (), "node": (1,), "rack": (1, 2)}),
        (4, 3, {"process": (), "node": (3,), "rack": (3, 0)}),
        (2, 0, {"process": (), "node": (0,), "rack": (0, 1)}),
        (8, 1, {"process": (), "node": (1,), "rack": (1, 2, 3, 4)}),
    ],
)
def test_who_dies(hosts: int, victim: int, dead: dict[Any, tuple[int, ...]]) -> None:
    plan = drill_plan(hosts=hosts, victim=victim)
    assert {kill: plan.dead_hosts(kill) for kill in plan.kills} == dead


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 1},
        {"hosts": 17},
        {"kills": "process,meteor"},
        {"kills": ""},
        {"arms": "lasy"},
        {"arms": ","},
        {"links": "wire"},
        {"parallel": "pipeline"},
        {"steps": 29},
        {"every": 0},
        {"victim": 4},
        {"victim": -1},
        {"seed": -1},
        {"seed": 2**32 - 1},
        {"batch": 0},
        {"timeout_s": 0.0},
        {"at": "39@9"},
        {"at": "9"},
        {"at": "40"},
        {"at": "save.before_lunch"[:-5] + "dinner"},
        {"at": "resume.before_timeline"},
        {"at": "save.before_rename@15"},
        {"at": "save.before_rename@40"},
        {"at": "save.before_rename@x"},
        {"at": "retain.before_unlink@20"},
        {"link": "fast"},
        {"link": "1kbit"},
        {"cut": True, "links": "groups"},
    ],
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        drill_plan(**wrong)


def test_a_wrong_name_is_met_with_the_right_one() -> None:
    with pytest.raises(OptionError, match="did you mean 'lazy'"):
        drill_plan(arms="sync,lasy")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, (25, None)),
        ("27", (27, None)),
        ("save.before_rename", (20, "save.before_rename")),
        ("capture.after_captured@10", (10, "capture.after_captured")),
        ("capture.after_captured@30", (30, "capture.after_captured")),
        ("39", (39, None)),
    ],
)
def test_when_a_kill_falls(text: str | None, found: tuple[int, str | None]) -> None:
    assert parse_at(text, steps=40, every=10) == found


def test_rates() -> None:
    assert [parse_rate(text) for text in ("1gbit", "200 mbit", "1500Kbit")] == [
        10**9,
        2 * 10**8,
        1_500_000,
    ]


def test_arms_are_methods_of_the_engine() -> None:
    assert {arm.method for arm in ARMS.values()} <= set(presets)
    for arm in ARMS.values():
        assert arm.folder == "shared" or arm.tiers, "a lost host must come back from somewhere"


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": "0"},
        {"every": "gemini"},
        {"every": "gemini=x"},
        {"every": "lasy=4"},
        {"every": "gemini=11", "at": "20"},
        {"every": "gemini=80"},
        {"store": "tape"},
        {"store": "seaweedfs", "links": "groups"},
        {"restore_steps": 2.0},
        {"store": "seaweedfs", "restore_steps": 0.0},
        {"store_link": "slow"},
        {"check": "process"},
        {"check": "process=much"},
        {"check": "node=2", "kills": "rack"},
        {"into": 1.0},
        {"into": -0.1},
        {"into": 0.5, "at": "save.before_rename"},
    ],
)
def test_options_of_stores_intervals_and_checks_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        drill_plan(**wrong)


def test_arms_with_intervals_of_their_own() -> None:
    """Each is killed half an interval, rounded down, after a base of its own."""
    plan = drill_plan(
        arms="lazy,gemini,checkfreq", steps=36, every="gemini=11,checkfreq=21,8", kills="node"
    )
    found = {arm: (plan.every_of(arm), plan.kill_step(arm)) for arm in plan.arms}
    assert found == {"lazy": (8, 20), "gemini": (11, 16), "checkfreq": (21, 31)}
    assert [plan.end_step(arm) for arm in plan.arms] == [36, 19, 34]
    said = introduce(plan, "wires")[1]
    assert "a base every 8 (lazy), 11 (gemini), 21 (checkfreq)" in said
    assert "killed after step 20 (lazy), 16 (gemini), 31 (checkfreq)" in said


def test_with_a_part_of_a_step_none_loses_more_than_half_an_interval() -> None:
    every = "gemini=11,checkfreq=21,datastates=12"
    plan = drill_plan(arms="gemini,checkfreq,datastates", steps=36, every=every, into=0.5)
    after = {arm: plan.kill_step(arm) % plan.every_of(arm) + plan.into for arm in plan.arms}
    assert after == {"gemini": 5.5, "checkfreq": 10.5, "datastates": 5.5}
    assert "killed 0.5 of a step after step 16 (gemini), 31" in introduce(plan, "wires")[1]


def test_which_part_of_a_step_has_passed_is_measured() -> None:
    events = [[{"event": "step", "step": n, "at_s": 10.0 + 2 * n} for n in range(1, 8)], []]
    start = cast(Start, SimpleNamespace(events=events))
    assert _into(start, 25.0) == 0.5  # the last one was over at 24 s
    assert _into(start, 24.0) == 0.0
    assert _into(start, 99.0) == 1.0, "no more than one can be under way"
    assert _into(cast(Start, SimpleNamespace(events=[[], []])), 5.0) == 0.0


def test_links_in_the_ratio_of_the_paper() -> None:
    """A part of the state takes so many steps from the store, half as many from another host."""
    plan = drill_plan(
        hosts=4, parallel="fsdp2", params=1_000_000, store="seaweedfs", restore_steps=3.3
    )
    assert plan.host_bytes == 3 * plan.model.params
    link, store = plan.rates_for(0.5)
    assert 8 * plan.host_bytes / store == pytest.approx(3.3 * 0.5, rel=1e-4)
    assert link == 2 * store
    assert drill_plan(hosts=4, params=1_000_000).host_bytes == 12 * plan.model.params, "under DDP"


# --- The network ------------------------------------------------------------------------


class Shell:
    """Notes commands; fails those that contain a word."""

    def __init__(self, fails: str = " never ") -> None:
        self.said: list[str] = []
        self.fails = fails

    def __call__(self, command: Sequence[str]) -> str | None:
        self.said.append(" ".join(command))
        return "Operation not permitted" if self.fails in self.said[-1] else None

    def names(self, verb: str) -> list[str]:
        start = f"ip netns {verb} "
        return [line.removeprefix(start) for line in self.said if line.startswith(start)]


def no(word: str) -> None:
    return None


def test_groups_where_there_are_no_namespaces() -> None:
    shell = Shell()
    found = choose_network("auto", "abc", 4, 10**9, why_not=lambda _: "not root", run=shell)
    assert isinstance(found, Groups)
    assert "not root" in found.describe()
    assert "no link is limited" in found.describe()
    assert not shell.said
    with pytest.raises(UnavailableError, match="not root"):
        choose_network("namespaces", "abc", 4, 10**9, why_not=lambda _: "not root", run=shell)
    with pytest.raises(UnavailableError):
        found.cut(1)


def test_groups_if_asked_for_and_namespaces_where_there_are() -> None:
    shell = Shell()
    assert isinstance(choose_network("groups", "abc", 2, 10**9, why_not=no), Groups)
    for links in ("auto", "namespaces"):
        found = choose_network(links, "abc", 2, 2 * 10**8, why_not=no, run=shell)  # type: ignore[arg-type]
        assert isinstance(found, Namespaces)
        assert "200 Mbit/s" in found.describe()
        assert "emulated" in found.describe()
        found.close()
    assert sorted(shell.names("add")) == sorted(shell.names("delete"))


def test_every_host_has_a_link_that_is_limited_at_both_ends() -> None:
    shell = Shell()
    network = Namespaces("abc", 2, 10**9, shell)
    limited = [line.split() for line in shell.said if line.startswith("tc ")]
    assert [(words[2], words[6]) for words in limited] == [
        ("es-abc-0", "eth0"),
        ("es-abc-sw", "h0"),
        ("es-abc-1", "eth0"),
        ("es-abc-sw", "h1"),
    ]
    assert all("rate 1000000000bit" in line for line in shell.said if line.startswith("tc "))
    assert network.command(1, ["true"]) == ["ip", "netns", "exec", "es-abc-1", "true"]
    assert network.address(0) != network.address(1)
    assert network.port() != network.port()
    before = len(shell.said)
    network.replace(1)
    assert shell.said[before : before + 3] == [
        "ip -n es-abc-sw link del h1",
        "ip netns delete es-abc-1",
        "ip netns add es-abc-1",
    ]
    network.cut(0)
    assert shell.said[-1] == "ip -n es-abc-sw link set h0 down"


def test_a_store_has_a_namespace_and_each_host_a_link_to_it() -> None:
    shell = Shell()
    network = Namespaces("abc", 2, 10**9, shell, 5 * 10**8)
    assert shell.names("add") == ["es-abc-sw", "es-abc-st", "es-abc-0", "es-abc-1"]
    limited = [line.split() for line in shell.said if line.startswith("tc ")]
    assert [(words[2], words[6], words[10]) for words in limited[:4]] == [
        ("es-abc-0", "eth0", "1000000000bit"),
        ("es-abc-sw", "h0", "1000000000bit"),
        ("es-abc-0", "eth1", "500000000bit"),
        ("es-abc-sw", "s0", "500000000bit"),
    ]
    assert not [words for words in limited if words[6] in ("eth2", "c0", "st")], "without limit"
    assert network.environment() == {"GLOO_SOCKET_IFNAME": "eth2"}
    assert "es-abc-st" in network.at_store(["true"])
    network.limit(2 * 10**7, 10**7)
    assert sum("rate 20000000bit" in line for line in shell.said) == 4
    assert sum("rate 10000000bit" in line for line in shell.said) == 4
    assert "20 Mbit/s" in network.describe()
    assert "10 Mbit/s from each to the store" in network.describe()
    before = len(shell.said)
    network.replace(1)
    assert sum("link del" in line for line in shell.said[before:]) == 3
    assert sum("rate 10000000bit" in line for line in shell.said[before:]) == 2
    network.close()
    assert set(shell.names("add")) == set(shell.names("delete"))


def test_a_store_needs_namespaces() -> None:
    with pytest.raises(UnavailableError, match="not root"):
        choose_network(
            "auto", "abc", 2, 10**9, store_bits_per_s=10**8, why_not=lambda _: "not root"
        )


@pytest.mark.parametrize("missing", ["weed", "setpriv"])
def test_what_a_store_takes_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setattr(network_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(
        network_module.shutil, "which", lambda name: None if name == missing else f"/bin/{name}"
    )
    with pytest.raises(UnavailableError, match=missing):
        run_drill(drill_plan(store="seaweedfs"), SilentDrill(), network=lambda word: Wire())


@pytest.mark.parametrize("fails", ["netns add es-abc-1", "type bridge", "tbf", "addr add"])
def test_a_network_that_cannot_be_made_leaves_nothing(fails: str) -> None:
    shell = Shell(fails)
    with pytest.raises(DrillError, match="not permitted"):
        Namespaces("abc", 3, 10**9, shell)
    assert set(shell.names("add")) == set(shell.names("delete"))


def test_all_namespaces_are_tried_when_one_cannot_be_deleted() -> None:
    shell = Shell()
    network = Namespaces("abc", 3, 10**9, shell)
    shell.fails = "delete es-abc-0"
    with pytest.raises(DrillError, match="es-abc-0"):
        network.close()
    assert len(shell.names("delete")) == 4
    shell.fails = " never "
    network.close()
    assert shell.names("delete")[4:] == ["es-abc-0"], "the others are gone already"


# --- Processes and hosts ----------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[Callable[[str], int]]:
    """Starts a process that does nothing, in a session of its own, with a drill's mark."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str) -> int:
        environment = {**os.environ, MARK: mark}
        started.append(subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait(TIMEOUT_S)


def pids(drill: str, host: int | None = None) -> set[int]:
    return {item.pid for item in find_marked(drill, host)}


def test_a_program_that_is_being_started_is_not_overlooked(
    monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[str], int]
) -> None:
    """For a moment the kernel shows an empty environment."""
    word = os.urandom(6).hex()
    pid, read, empty = sleeper(f"{word}.1"), Path.read_bytes, [2]

    def reading(path: Path) -> bytes:
        if path == Path(f"/proc/{pid}/environ") and empty[0]:
            empty[0] -= 1
            return b""
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", reading)
    assert pids(word) == {pid}
    assert not empty[0]


def test_only_what_has_the_mark_is_ended(sleeper: Callable[[str], int]) -> None:
    word = os.urandom(6).hex()
    first, second, tenth = sleeper(f"{word}.1"), sleeper(f"{word}.2"), sleeper(f"{word}.10")
    other = sleeper(f"{word}x.1")
    assert pids(word) == {first, second, tenth}
    assert pids(word, 1) == {first}
    assert end_marked(word, 1) == 1
    assert pids(word) == {second, tenth}
    assert end_marked(word) == 2
    assert not pids(word)
    assert pids(f"{word}x") == {other}


def test_a_process_that_does_not_die_is_named_and_not_waited_for_for_ever() -> None:
    tried = []
    with pytest.raises(DrillError, match=r"4711 \(python -m undead"):
        end_marked(
            "word",
            1,
            timeout_s=0.1,
            find=lambda drill, host: [Marked(4711, "python -m undead")],
            end=lambda drill, host, item: tried.append(item.pid),
        )
    assert set(tried) == {4711}


class Wire(Groups):
    """Notes what becomes of the network."""

    def __init__(self) -> None:
        super().__init__("a test")
        self.closed = 0
        self.replaced: list[int] = []

    def replace(self, host: int) -> None:
        self.replaced.append(host)

    def close(self) -> None:
        self.closed += 1


def test_a_host_dies_with_its_disk_and_comes_back_empty(tmp_path: Path) -> None:
    wire, ended = Wire(), []
    hosts = Hosts(tmp_path, "word", 2, wire, lambda drill, host: ended.append(host) or 0)  # type: ignore[func-returns-value]
    hosts.reset()
    for place in (hosts.disk(0), hosts.disk(1), hosts.durable):
        (place / "base").touch()
    hosts.kill(1)
    assert not hosts.disk(1).exists()
    hosts.replace(1)
    assert list(hosts.disk(1).iterdir()) == []
    assert (hosts.disk(0) / "base").exists()
    assert (hosts.durable / "base").exists()
    assert wire.replaced == [1]
    hosts.reset()
    assert not any((place / "base").exists() for place in (hosts.disk(0), hosts.durable))
    assert ended == [None, 1, None]


def test_a_folder_whose_name_is_too_long_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="too long"):
        Hosts(tmp_path / ("x" * 90), "word", 2, Wire())


def test_the_network_goes_down_even_if_a_host_does_not_die(tmp_path: Path) -> None:
    def undead(drill: str, host: int | None) -> int:
        raise DrillError("it does not die")

    wire = Wire()
    with pytest.raises(DrillError, match="does not die"):
        Hosts(tmp_path, "word", 2, wire, undead).close()
    assert wire.closed == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, DrillError("it went wrong")])
def test_whatever_happens_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, sleeper: Callable[[str], int], error: Any
) -> None:
    wire, place = Wire(), []
    word: list[str] = []

    class Broken:
        def __init__(self, plan: Any, hosts: Any, folder: Path, *_: Any) -> None:
            place.append(folder)
            sleeper(f"{word[0]}.1")

        def undisturbed(self, consumes: str) -> None:
            assert pids(word[0])
            raise error

    def network(random: str) -> Wire:
        word.append(random)
        return wire

    monkeypatch.setattr(run_module, "Drill", Broken)
    with pytest.raises(error if isinstance(error, type) else DrillError):
        run_drill(drill_plan(), SilentDrill(), network=network)
    assert wire.closed == 1
    assert not place[0].exists()
    assert not pids(word[0])


class Shop:
    """A store that is nowhere."""

    def environment(self) -> dict[str, str]:
        return {"AWS_REGION": "here"}

    def url(self, name: str) -> str:
        return f"s3://drill/{name}"

    def close(self) -> None: ...


def told(tmp_path: Path, arm: str, store: Any) -> dict[str, Any]:
    hosts = Hosts(tmp_path, "word", 2, Wire(), lambda drill, host: 0, store=store)
    plan = drill_plan(hosts=2, link="8mbit", every=7)
    return order_of(plan, hosts, "a-1", arm, tmp_path, scenario=f"{arm}-node")


@pytest.mark.parametrize("arm", ["gemini", "checkfreq", "datastates", "everstep"])
def test_with_a_store_whatever_is_durable_is_behind_its_link(tmp_path: Path, arm: str) -> None:
    order = told(tmp_path, arm, Shop())
    assert order["runs"] == [str(tmp_path / f"h{host}" / "disk" / "run") for host in range(2)]
    places = [tier for tier in order["arm"]["tiers"] if tier != "peer"]
    assert [place.partition(f"/{arm}-node")[0] for place in places] == ["s3://drill"]
    assert order["arm"]["keeper"] == "process", "it makes the copies"
    assert order["every"] == 7
    assert ARMS[arm].staged == (arm in ("checkfreq", "datastates"))
    paced = order["arm"]["peer_bytes_per_s"]
    assert paced == (1e6 if arm == "everstep" else None), "GEMINI's go as the link does anyway"


def test_without_a_store_arms_are_as_they_were(tmp_path: Path) -> None:
    order = told(tmp_path, "datastates", None)
    assert order["runs"] == [str(tmp_path / "durable" / "run")] * 2
    assert (order["arm"]["keeper"], order["arm"]["tiers"]) == ("thread", [])
    assert told(tmp_path, "everstep", None)["arm"]["peer_bytes_per_s"] is None


def test_an_arm_consumes_what_it_is_compared_with(tmp_path: Path) -> None:
    order = told(tmp_path, "everstep_int8", Shop())
    assert (order["consumes"], order["arm"]["copied"]) == ("int8", "whole")
    assert told(tmp_path, "everstep_lossy", Shop())["consumes"] == "whole"

    asked: list[str] = []

    class Asked(Drill):
        def _start(self, *_: Any, consumes: str = "", **rest: Any) -> Any:
            asked.append(consumes)
            raise DrillError("enough")

    hosts = Hosts(tmp_path, "word", 2, Wire(), lambda drill, host: 0)
    asks = Asked(drill_plan(arms="everstep_int8"), hosts, tmp_path, SilentDrill())
    with pytest.raises(DrillError, match="enough"):
        asks.undisturbed("int8")
    assert asked == ["int8"]


def test_a_system_without_memory_keeps_nothing_on_disks(tmp_path: Path) -> None:
    ended: list[int | None] = []
    hosts = Hosts(tmp_path, "word", 2, Wire(), lambda drill, host: ended.append(host) or 0)  # type: ignore[func-returns-value]
    hosts.reset()
    (hosts.disk(1) / "base").touch()
    (hosts.durable / "base").touch()
    hosts.drop_runs()
    assert list(hosts.disk(1).iterdir()) == []
    assert (hosts.durable / "base").exists()
    assert ended == [None, None], "keepers, too"


# --- A start of the job -----------------------------------------------------------------


class Agents(Hosts):
    """Hosts on which nothing but ``sleep`` (or another program) runs."""

    program: tuple[str, ...] = ("sleep", "600")

    def start(self, host: int, command: Sequence[str], log: Path, extra: Any) -> Any:
        self.commands = [*getattr(self, "commands", []), list(command)]
        log.write_text(f"the words of agent {host}")
        return subprocess.Popen([*self.program], start_new_session=True)

    def end_programs(self, argument: Path) -> None:
        pass


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    hosts = Agents(tmp_path, os.urandom(6).hex(), 2, Wire())
    hosts.reset()
    return hosts


@pytest.fixture
def begun(agents: Agents, tmp_path: Path) -> Iterator[Callable[..., Start]]:
    made: list[Start] = []

    def begin(**changes: Any) -> Start:
        plan = dataclasses.replace(drill_plan(hosts=2), **changes)
        order = order_of(plan, agents, "a-1", "lazy", tmp_path)
        made.append(Start(agents, order, tmp_path))
        return made[-1]

    yield begin
    for start in made:
        for agent in start.agents:
            agent.kill()
        start.end()


def test_a_start_is_followed_through_journals(
    begun: Callable[..., Start], agents: Agents, tmp_path: Path
) -> None:
    start = begun()
    assert [f"--node-rank={host}" in agents.commands[host] for host in range(2)] == [True, True]
    journals = [JournalWriter(tmp_path / f"a-1-{rank}.jsonl") for rank in range(2)]
    for rank, journal in enumerate(journals):
        journal.write("started", pid=os.getpid() + rank)
        journal.write("resumed", step=20)
        journal.write("taken", number=21 + rank, loss=(1.5).hex())
        journal.write("step", step=21 + rank)
        journal.write("taken", number=22 + rank, loss=(2.5).hex())
        journal.close()
    start.follow(lambda: start.all_found("resumed") and start.reached == 22)
    assert [start.step(rank) for rank in range(2)] == [21, 22]
    assert start.losses(1) == [(22, (1.5).hex()), (23, (2.5).hex())]
    assert start.pid(1) == os.getpid() + 1
    assert start.found(0, "finished") is None


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 says that it has lost another one."""
    monkeypatch.setattr(job_module, "_CULPRIT_S", 0.2)
    journal = JournalWriter(tmp_path / "a-1-1.jsonl")
    journal.write("lost", what="connection closed by peer")
    journal.close()


@pytest.mark.usefixtures("lost")
def test_a_rank_that_is_lost_before_the_kill_ends_the_drill(begun: Callable[..., Start]) -> None:
    start = begun()
    with pytest.raises(DrillError, match=r"rank 1 is lost: connection closed(.|\n)*agent 1"):
        start.follow(lambda: False)


@pytest.mark.usefixtures("lost")
def test_of_several_that_fail_the_one_is_named_that_began(
    begun: Callable[..., Start], agents: Agents
) -> None:
    agents.program = ("false",)
    start = begun()
    for agent in start.agents:
        agent.wait(TIMEOUT_S)
    with pytest.raises(DrillError, match="rank 0 has ended with status 1"):
        start.follow(lambda: False)


def test_an_agent_that_fails_ends_the_drill(begun: Callable[..., Start], agents: Agents) -> None:
    agents.program = ("false",)
    with pytest.raises(DrillError, match="has ended with status 1"):
        begun().follow(lambda: False)


def test_a_job_that_ends_too_early_ends_the_drill(
    begun: Callable[..., Start], agents: Agents
) -> None:
    agents.program = ("true",)
    with pytest.raises(DrillError, match="before their time"):
        begun().follow(lambda: False)


def test_a_job_that_says_nothing_ends_the_drill(
    begun: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "_SILENCE_FACTOR", 0.05)
    with pytest.raises(DrillError, match="said nothing"):
        begun(timeout_s=1.0).follow(lambda: False)


def test_ranks_that_do_not_notice_are_not_waited_for_for_ever(
    begun: Callable[..., Start], sleeper: Callable[[str], int], tmp_path: Path
) -> None:
    start = begun()
    journal = JournalWriter(tmp_path / "a-1-0.jsonl")
    journal.write("started", pid=sleeper("nobody.0"))
    start.poll()
    assert start.await_loss([0], 0.05) is None
    journal.write("lost", what="reset")
    journal.close()
    knew_s = start.await_loss([0], TIMEOUT_S)
    assert knew_s == start.events[0][-1]["at_s"]


# --- The comparison ---------------------------------------------------------------------

PLAN = drill_plan(hosts=2, steps=3, every=1, at="1")


def ended(losses: Sequence[float], last: str, first: int = 1) -> Start:
    """A start whose two ranks have taken steps and described their state as ``last``."""
    start = object.__new__(Start)
    start.events = []
    for rank in range(2):
        events: list[Event] = []
        for index, loss in enumerate(losses):
            step = first + index
            events.append({"event": "taken", "number": step, "loss": (loss + rank).hex()})
            events.append({"event": "step", "step": step, "at_s": 0.5 * index})
        if last:
            events.append({"event": "finished", "step": 3, "fingerprint": {"model/w": last}})
        start.events.append(events)
    return start


def test_what_is_the_same_is_found_the_same() -> None:
    starts = [ended([3.0, 2.0], ""), ended([2.0, 1.0], "bits", 2)]
    assert compare(PLAN, ended([3.0, 2.0, 1.0], "bits"), starts) == ()


@pytest.mark.parametrize(
    ("starts", "witness"),
    [
        ([ended([3.0], ""), ended([2.0, 1.0], "other bits", 2)], "live state"),
        ([ended([3.0], ""), ended([2.0, 1.0], "", 2)], "live state"),
        ([ended([3.0], ""), ended([2.5, 1.0], "bits", 2)], "loss"),
        ([ended([3.0], ""), ended([1.0], "bits", 3)], "loss"),
    ],
)
def test_what_differs_is_found(starts: list[Start], witness: str) -> None:
    found = compare(PLAN, ended([3.0, 2.0, 1.0], "bits"), starts)
    assert {item.name.split(":")[0] for item in found} == {"rank 0", "rank 1"}
    assert witness in {item.witness for item in found}


def test_a_run_that_ends_earlier_is_compared_where_it_ends() -> None:
    alone = ended([3.0, 2.0, 1.0], "bits")
    for events, bits in zip(alone.events, ("then", "then"), strict=True):
        events.append({"event": "described", "number": 2, "fingerprint": {"model/w": bits}})
    start = ended([3.0, 2.0], "")
    for events, bits in zip(start.events, ("then", "else"), strict=True):
        events.append({"event": "finished", "step": 2, "fingerprint": {"model/w": bits}})
    (found,) = compare(PLAN, alone, [start], 2)
    assert (found.witness, found.name.split(":")[0]) == ("live state", "rank 1")


def test_runs_of_which_neither_has_come_to_the_end() -> None:
    starts = [ended([3.0, 2.0, 1.0], "")]
    found = compare(PLAN, ended([3.0, 2.0, 1.0], ""), starts)
    assert [item.detail for item in found] == ["has not come to the end"] * 2


def test_the_median_step() -> None:
    assert median_step_s(ended([1.0] * 6, "")) == 0.5
    assert median_step_s(ended([1.0], "")) == 0.0


# --- Tables -----------------------------------------------------------------------------


def outcome(**changes: Any) -> Outcome:
    base = Outcome(
        "lazy",
        "node",
        dead_hosts=(1,),
        reached=25,
        recovered=20,
        detect_s=0.25,
        launch_s=9.0,
        restore_s=1.5,
        step_s=0.1,
        sources=("memory", "disk", "memory", "memory"),
        exact=True,
        evidence="xxh3-128 of 9 entries",
    )
    return dataclasses.replace(base, **changes)


REFUSED = Outcome("checkfreq", "node", refused="this job has 4 ranks")
WRONG = outcome(differences=(Difference("loss", "rank 0: step 21", "1 != 2"),))


def report(*outcomes: Outcome, plan: DrillPlan | None = None) -> DrillReport:
    used = plan or drill_plan(kills="node", arms="lazy,checkfreq")
    return DrillReport(used, "four wires", "network namespaces", outcomes, 0.1, (5.0, 4.0), 60.0)


def test_tiercheck_figures() -> None:
    found = outcome()
    assert (found.rollback_s, found.lost, found.rerun_s) == (1.75, 5, 0.5)
    assert found.total_s == 2.25
    assert found.from_words == "memory x 3, disk x 1"
    assert outcome(detect_s=None).rollback_s == 1.5
    assert (outcome(into=0.5).lost, outcome(into=0.5).rerun_s) == (5.5, pytest.approx(0.55))


def test_the_table_says_what_it_cost_and_who_was_refused() -> None:
    text = shown_by(report(outcome(), REFUSED))
    row = next(line for line in text.splitlines() if line.strip().startswith("lazy "))
    assert row.split() == [
        *("lazy", "0.25", "1.50", "1.75", "5", "0.50", "2.25", "9.0"),
        *("memory", "x", "3,", "disk", "x", "1", "yes", "yes"),
    ]
    assert "checkfreq refused: this job has 4 ranks" in text
    assert "IDENTICAL: 1 recoveries" in text
    assert "hosts: four wires" in text
    assert "kill node: host(s) 1" in text


def test_the_table_says_what_differs() -> None:
    text = shown_by(report(WRONG))
    assert "DIFFERENT: lazy, node: 1 differences" in text
    assert "rank 0: step 21: 1 != 2" in text
    assert "IDENTICAL" not in text
    assert "NOTHING RAN" in shown_by(report(REFUSED))
    assert "never" in shown_by(report(outcome(detect_s=None)))


def four(**changes: Any) -> DrillReport:
    plan = drill_plan(
        kills="node", arms="gemini,datastates,lazy,everstep", store="seaweedfs", **changes
    )
    arms = {"gemini": 8.0, "datastates": 6.0, "lazy": 1.0, "everstep": 2.5}
    found = [
        outcome(arm=arm, detect_s=0.0, restore_s=total, recovered=25) for arm, total in arms.items()
    ]
    return report(*found, REFUSED, plan=plan)


@pytest.mark.parametrize(("asked", "met"), [("node=2.4", True), ("node=2.5", False)])
def test_ratios_to_the_best_of_the_others(asked: str, met: bool) -> None:
    """Of TierCheck's systems: ``lazy`` is everstep, too."""
    found = four(check=asked)
    (ratio,) = found.ratios
    assert (ratio.best, ratio.times, found.met) == ("datastates", 2.4, met)
    line = " ".join(shown_by(found).split())
    assert "best other datastates 6.00 s / everstep 2.50 s = 2.40; asked" in line
    assert ("NOT MET" in line) != met
    assert four().met, "nothing is asked"
    data = json.loads(json.dumps(found.as_json()))
    assert (data["met"], data["ratios"][0]["times"]) == (met, 2.4)


def test_a_ratio_that_there_is_none_of_is_not_met() -> None:
    plan = drill_plan(kills="node", arms="gemini", check="node=1")
    found = report(outcome(arm="gemini"), plan=plan)
    assert not found.met
    assert "ratio node: asked 1: NOT MET, there is none" in shown_by(found)


def test_an_arm_that_says_it_is_not_exact_may_be_near() -> None:
    """It does not make a drill fail; one that claims to be exact, and is not, does."""
    near = replace(WRONG, arm="everstep_lossy", exact=False, losses=(2.5, 2.625))
    plan = drill_plan(kills="node", arms="gemini,everstep,everstep_lossy", check="node=3")
    gemini, ours = outcome(arm="gemini", detect_s=0.0, restore_s=6.0, recovered=25), near
    ours = replace(ours, detect_s=0.0, restore_s=1.5, reached=25, recovered=25)
    whole = outcome(arm="everstep", detect_s=0.0, restore_s=3.0, recovered=25)
    found = report(gemini, whole, ours, plan=plan)
    assert found.same
    assert found.met, "one of two arms of ours is three times as fast"
    assert [(one.ours, one.times, one.met) for one in found.ratios] == [
        ("everstep", 2.0, False),
        ("everstep_lossy", 4.0, True),
    ]
    text = " ".join(shown_by(found).split())
    assert "NEAR: everstep_lossy, node, as it says itself: loss at the end 2.6250, undi" in text
    assert "IDENTICAL: 2 recoveries" in text
    assert not report(replace(near, exact=True)).same


def test_what_else_was_consumed_is_said() -> None:
    found = dataclasses.replace(report(outcome()), others={"int8": (0.125, 5.5, 2.75)})
    text = " ".join(shown_by(found).split())
    assert "undisturbed, consuming int8 gradients: 125 ms a step, loss 5.5000 -> 2.7500" in text
    data = found.as_json()["undisturbed_others"]
    assert data == {"int8": {"step_s": 0.125, "loss_first": 5.5, "loss_last": 2.75}}


def test_what_links_mean_is_said_in_steps() -> None:
    found = four(link="40mbit", store_link="20mbit")
    assert found.scale is not None
    store, peer = found.scale
    assert store == pytest.approx(2 * peer)
    text = " ".join(shown_by(found).split())
    assert f"takes {store:.2f} undisturbed steps from the store and {peer:.2f} from" in text
    assert report(outcome()).scale is None


def test_the_report_as_plain_data() -> None:
    found = json.loads(json.dumps(report(outcome(), WRONG, REFUSED).as_json()))
    assert [item.get("same") for item in found["outcomes"]] == [True, False, None]
    assert not found["same"]
    assert found["emulation"] == "network namespaces"
    assert found["outcomes"][0]["rerun_s"] == 0.5
    assert found["outcomes"][2]["refused"]


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plan = drill_plan()
    with progress_display(plan.steps) as display:
        for line in introduce(plan, "four wires"):
            display.event(line)
        display.progress("lazy-node-1", 3)
    said = capsys.readouterr().err
    assert "4 hosts: four wires" in said
    assert "\x1b" not in said


# --- The command ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "status"),
    [((outcome(),), 0), ((outcome(), REFUSED), 0), ((outcome(), WRONG), 1), ((REFUSED,), 3)],
)
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Outcome, ...], status: int, words: tuple[str]
) -> None:
    plans: list[DrillPlan] = []

    def canned(plan: DrillPlan, display: Any, **_: Any) -> DrillReport:
        plans.append(plan)
        return report(*found, plan=plan)

    monkeypatch.setattr(run_module, "run_drill", canned)
    arguments = ["drill", "--hosts", "3", "--kill", "node", "--arms", "lazy,checkfreq", *words]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    assert (plans[0].hosts, plans[0].kills) == (3, ("node",))
    if words:
        assert len(json.loads(result.stdout)["outcomes"]) == len(found)


@pytest.mark.parametrize(("found", "status"), [(outcome(), 3), (WRONG, 1)])
def test_a_ratio_that_is_not_reached_is_a_goal_and_no_difference(
    monkeypatch: pytest.MonkeyPatch, found: Outcome, status: int
) -> None:
    monkeypatch.setattr(run_module, "run_drill", lambda plan, *_, **__: report(found, plan=plan))
    arguments = ["drill", "--kill", "node", "--arms", "lazy,checkfreq", "--check", "node=9"]
    assert CliRunner().invoke(app, arguments).exit_code == status


def test_a_wrong_option_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["drill", "--hosts", "1"])
    assert result.exit_code == 2
    assert "--hosts" in result.output
