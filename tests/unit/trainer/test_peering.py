"""Who may have a peer, how much memory that takes, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import OptionError, OutOfSpaceError
from everstep.link.messages import JobSession
from everstep.seams.machine import machine_name
from everstep.state.ranks.writers import RankInfo
from everstep.tiers.options import PeerOptions, TierOptions, split_peers
from everstep.trainer.budget import peer_bytes
from everstep.trainer.job.place import refuse_single_base_with_peer
from everstep.trainer.job.run_folder import node_name, node_names, peer_notice
from tests.support.given import options
from tests.support.ranks.together import trainings


def said(*nodes: str | None) -> list[dict[str, Any]]:
    return [{"node": node_name(None if n is None else PeerOptions(emulated_node=n))} for n in nodes]


def test_peers_are_named_among_the_tiers() -> None:
    place = TierOptions("/elsewhere")
    assert split_peers(["/a", "peer", place]) == (["/a", place], PeerOptions())
    peers = PeerOptions(bytes_per_s=1e9)
    assert split_peers([peers]) == ([], peers)
    assert split_peers([]) == ([], None)


@pytest.mark.parametrize(
    "tiers", ["peer", ["peer", PeerOptions()], ["peer", "peer"]], ids=["text", "both", "twice"]
)
def test_peers_are_named_once(tiers: Any) -> None:
    with pytest.raises(OptionError):
        split_peers(tiers)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_s": 0},
        {"bytes_per_s": -1.0},
        {"bytes_per_s": float("nan")},
        {"bytes_per_s": True},
        {"bytes_per_s": "fast"},
        {"host_bytes": 0},
        {"emulated_node": ""},
        {"emulated_node": 1},
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        PeerOptions(**wrong)


def test_nodes_are_machines_or_emulated_by_all() -> None:
    assert node_names(said(None, None), 0) == ()
    assert node_names(said("a", "b", "a"), 0) == ("emulated a", "emulated b", "emulated a")
    real = {"node": node_name(PeerOptions())}
    assert real["node"] == machine_name() != ""
    for mixed in (said("a", None), [*said("a"), real]):
        with pytest.raises(OptionError, match="only some ranks send copies to peers"):
            node_names(mixed, 0)
    with pytest.raises(OptionError, match="one node"):
        node_names([real, real], 0)


def test_one_node_is_refused_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(OptionError, match="protects nothing"),
        trainings(tmp_path / "run", tmp_path / "run", tiers=["peer"], method="lazy"),
    ):
        raise AssertionError("it was taken")


def test_a_process_that_trains_alone_has_no_peer(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="trains alone"):
        everstep.Checkpointer(tmp_path / "run", {"t": {"t": torch.zeros(3)}}, tiers=["peer"])


def test_there_is_no_peer_without_a_keeper_process(tmp_path: Path) -> None:
    seen = iter("ab")
    with (
        pytest.raises(OptionError, match="separate keeper process"),
        trainings(
            tmp_path / "run",
            tmp_path / "run",
            tiers=_Each(lambda: PeerOptions(emulated_node=next(seen))),
            method="lazy",
        ),
    ):
        raise AssertionError("it was taken")


class _Each(list[PeerOptions]):
    """Options that differ from rank to rank: each looks once."""

    def __init__(self, make: Any) -> None:
        super().__init__([PeerOptions()])
        self._make = make

    def __iter__(self) -> Any:
        return iter([self._make()])


def test_half_of_the_memory_is_for_copies_unless_it_is_said() -> None:
    info = RankInfo(0, 2, nodes=("a", "b"))
    assert peer_bytes(None, info, 1000, 400) == 0
    assert peer_bytes(PeerOptions(), info, 1000, 400) == 500
    assert peer_bytes(PeerOptions(host_bytes=600), info, 1000, 400) == 600
    with pytest.raises(OutOfSpaceError, match="1200"):
        peer_bytes(PeerOptions(), info, 1000, 600)
    with pytest.raises(OutOfSpaceError, match="1100"):
        peer_bytes(PeerOptions(host_bytes=700), info, 1000, 400)


def test_one_base_is_too_few_on_every_rank() -> None:
    names = ("a", "b", "b")  # rank 2 holds nothing for others, and refuses as they do
    for rank in range(3):
        info = RankInfo(rank, 3, nodes=names)
        refuse_single_base_with_peer(PeerOptions(), info, options(keep=2))
        refuse_single_base_with_peer(None, info, options(keep=1))
        with pytest.raises(OptionError, match="no base is left that all ranks can read"):
            refuse_single_base_with_peer(PeerOptions(), info, options(keep=1))
    refuse_single_base_with_peer(
        PeerOptions(if_there=True), RankInfo(0, 2, nodes=("a", "a")), options(keep=1)
    )


def test_who_holds_nothing_keeps_its_memory() -> None:
    names = ("a", "b", "b")  # rank 2's peer is rank 0, as rank 1's is; rank 0's is rank 1
    assert peer_bytes(PeerOptions(), RankInfo(2, 3, nodes=names), 1000, 400) == 0
    assert peer_bytes(PeerOptions(), RankInfo(0, 3, nodes=names), 1000, 400) == 500


def test_the_ring_is_printed_and_emulation_is_named() -> None:
    info = RankInfo(0, 4, nodes=("m", "m", "n", "n"))
    line = peer_notice(info, 4_000_000)
    for part in ("rank 0", "rank 2's keeper", "2 nodes", "4.0 MB", "of rank 2"):
        assert part in line
    assert "EMULATED" not in line
    names = tuple("emulated " + name for name in info.nodes)
    assert "EMULATED" in peer_notice(RankInfo(0, 4, nodes=names), 1)


def test_a_seat_knows_its_peer_and_whose_peer_it_is() -> None:
    job_session = JobSession("s", 2, ("0", "0", "2", "2"), (), nodes=("a", "a", "b", "b"))
    assert (job_session.peer, job_session.sources) == (0, (0,))
    assert JobSession.from_wire(job_session.to_wire()) == job_session
    without = JobSession("s", 2, ("0", "0", "2", "2"), ())
    assert (without.peer, without.sources) == (None, ())
