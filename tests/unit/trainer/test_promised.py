"""A promise is parsed, and turned into options or refused with what is missing."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest

from everstep import PeerOptions, TierOptions
from everstep.config.promise import Promise
from everstep.errors import OptionError
from everstep.options import Every, LogOptions
from everstep.tiers import options as tier_options
from everstep.trainer.job import promised
from everstep.trainer.job.promised import PromisedOptions, promised_options

RUN = PurePath("/disk/run")


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = {"/disk": "ext4", "/net": "nfs4", "/mem": "tmpfs"}
    for module in (promised, tier_options):
        monkeypatch.setattr(module, "mounted_as", lambda path: found["/" + path.parts[1]])


def planned(most: str, even_if: str, run: PurePath = RUN, **given: Any) -> PromisedOptions:
    promise = Promise.parse(most, even_if)
    assert promise is not None
    options: dict[str, Any] = {"method": None, "every": 100, "log": None, "tiers": (), **given}
    return promised_options(promise, run, **options)


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("1 step", 1, None), ("10 steps", 10, None), ("30s", None, 30.0), ("10min", None, 600.0)],
)
def test_amounts(text: str, steps: int | None, seconds: float | None) -> None:
    promise = Promise.parse(text, None)
    assert promise is not None
    assert (promise.steps, promise.seconds, promise.even_if) == (steps, seconds, "process")


@pytest.mark.parametrize(
    ("most", "even_if", "words"),
    [
        ("0 steps", None, "the step in flight is always lost"),
        ("soon", None, "neither a number of steps nor a time"),
        (3, None, "neither a number of steps nor a time"),
        ("0s", None, "neither a number of steps nor a time"),
        ("1 step", "fire", "no even_if 'fire'"),
        (None, "power", "needs lose_at_most="),
    ],
)
def test_what_is_no_promise(most: Any, even_if: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Promise.parse(most, even_if)


def test_no_promise() -> None:
    assert Promise.parse(None, None) is None


def test_the_log_goes_where_the_failure_does_not_reach() -> None:
    found = planned("1 step", "process")
    assert (found.promise.holder, found.method, found.log) == ("keeper", "logged", LogOptions())
    found = planned("3 steps", "power")
    wanted = LogOptions(to="disk", lag_steps=2, batch_steps=1)
    assert (found.promise.holder, found.log) == ("disk", wanted)
    found = planned("50 steps", "power")
    assert found.log == LogOptions(to="disk", lag_steps=49, batch_steps=10)
    found = planned("30s", "power")
    assert found.log == LogOptions(to="disk", batch_steps=1)
    found = planned("1 step", "rack", PurePath("/net/run"))
    wanted = LogOptions(to="disk", lag_steps=0, batch_steps=1)
    assert (found.promise.holder, found.log) == ("disk", wanted)


def test_a_store_gets_the_log_at_each_step_that_may_not_be_lost() -> None:
    tiers = ["/disk/copies", "s3://bucket/run", TierOptions("/net/copies", log_steps=2)]
    found = planned("4 steps", "rack", tiers=tiers)
    assert found.promise.holder == "store"
    assert found.tiers == [
        "/disk/copies",
        TierOptions("s3://bucket/run", log="whole", log_steps=2),
        TierOptions("/net/copies", log="whole", log_steps=2),
    ]
    without_log = planned("4 steps", "rack", tiers=tiers, method="lazy")
    assert without_log.tiers == tiers


def test_a_node_is_survived_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned("1 step", "node", tiers=["peer"])
    assert (found.promise.holder, found.tiers) == ("peer", [PeerOptions()])
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert planned("1 step", "node").tiers == [PeerOptions()]
    with pytest.raises(OptionError, match="does not send the exact log"):
        planned("1 step", "node", tiers=[PeerOptions(log="adaptive")])
    with pytest.raises(OptionError, match="no place for copies survives it"):
        planned("1 step", "rack", tiers=["peer"])


def test_only_places_that_survive_the_failure_count() -> None:
    """A rack takes the peers with it, and any failure of a node its other disks."""
    tiers = ["/disk/copies", "s3://bucket/run", "peer"]
    assert planned("1 step", "rack", tiers=tiers).promise.places == ("s3://bucket/run",)
    assert planned("1 step", "node", tiers=tiers).promise.places == ("s3://bucket/run", "peer")
    lossy = ["s3://bucket/run", PeerOptions(log="adaptive")]
    assert planned("1 step", "node", tiers=lossy).promise.places == ("s3://bucket/run",)
    assert planned("1 step", "node", tiers=["/disk/copies", "peer"]).promise.places == ("peer",)


@pytest.mark.parametrize(
    ("most", "every", "wanted"),
    [
        ("1 step", 100, Every(steps=1)),
        ("10 steps", 100, Every(steps=5)),
        ("10 steps", 3, Every(steps=3)),
        ("60s", 100, Every(seconds=30.0)),
        ("60s", "10s", Every(seconds=10.0)),
        ("60s", 1, Every(steps=1)),
    ],
)
def test_bases_alone(most: str, every: Any, wanted: Every) -> None:
    found = planned(most, "power", method="lazy", every=every)
    assert (found.log, found.every) == (None, wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "gockpt"}, "no step can wait for a base of method='gockpt'"),
        ({"method": "checkflow"}, "no step can wait for a base of method='checkflow'"),
        ({"method": "gemini"}, "keeps most bases in memory"),
        ({"method": "unknown"}, "is no method"),
        ({"log": LogOptions(to="disk")}, "LogOptions.to and lose_at_most= exclude each other"),
        ({"log": LogOptions(batch_steps=3)}, "LogOptions.batch_steps and lose_at_most="),
        ({"run": PurePath("/mem/run")}, "is in memory"),
        ({"even_if": "node"}, r"on this machine \(ext4\), and no place for copies survives"),
        ({"even_if": "rack", "tiers": ["/disk/copies"]}, "no place for copies survives"),
    ],
)
def test_what_cannot_be_promised(given: dict[str, Any], words: str) -> None:
    even_if = given.pop("even_if", "power")
    with pytest.raises(OptionError, match=words):
        planned("1 step", even_if, **given)


def test_a_history_may_be_asked_for() -> None:
    found = planned("1 step", "power", log=LogOptions(to="disk", history="all"))
    assert found.log == LogOptions(to="disk", lag_steps=0, batch_steps=1, history="all")
