"""The newest steps that survive: which place for copies leads to which step."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from everstep.link import Save
from everstep.trainer.session.recoverable import RecoverableSteps

PLACES = ("s3://bucket/run", "/disk/copies")


class Training:
    """A training process whose keeper sends copies."""

    def __init__(self, exact: Collection[str] = ("peer", *PLACES)) -> None:
        self.keepers: Any = SimpleNamespace(current=None, peer_log_step=None)
        self.recorder: Any = SimpleNamespace(stats=SimpleNamespace(holes=0))
        self.steps = RecoverableSteps(self.keepers, [], self.recorder, PLACES, exact)


def test_a_place_has_what_its_base_and_log_lead_to() -> None:
    training = Training()
    steps = training.steps
    assert steps.by_place == {}
    steps.base_taken(Save(10, 1))
    steps.copied(0, None, 14)
    assert steps.by_place == {}  # a log without its base leads nowhere
    steps.copied(0, 10, None)
    steps.base_everywhere(10)
    assert steps.by_place == {"s3://bucket/run": 14, "peer": 10}
    training.keepers.peer_log_step = 17
    assert steps.by_place == {"s3://bucket/run": 14, "peer": 17}


def test_the_log_leads_over_no_update_that_it_lacks() -> None:
    training = Training()
    training.steps.base_taken(Save(10, 1))
    training.steps.copied(0, 10, 14)
    training.recorder.stats.holes = 1
    assert training.steps.by_place == {"s3://bucket/run": 10}
    training.steps.base_taken(Save(15, 1))
    training.steps.copied(0, 15, 16)
    assert training.steps.by_place == {"s3://bucket/run": 16}


def test_only_places_that_survive_the_failure_count() -> None:
    steps = Training().steps
    steps.base_taken(Save(10, 1))
    steps.base_everywhere(10)
    steps.copied(1, 10, None)
    assert steps.step_in(["s3://bucket/run"]) is None
    assert steps.step_in(["peer", "s3://bucket/run"]) == 10


def test_a_new_keeper_has_sent_nothing() -> None:
    steps = Training().steps
    steps.base_taken(Save(10, 1))
    steps.copied(0, 10, None)
    service: Any = None
    steps.start(service)
    assert steps.by_place == {}


def test_an_approximate_log_leads_nowhere_exactly() -> None:
    training = Training(exact=["/disk/copies"])
    training.steps.base_taken(Save(10, 1))
    for place in (0, 1):
        training.steps.copied(place, 10, None)
        training.steps.copied(place, None, 14)
    training.steps.base_everywhere(10)
    training.keepers.peer_log_step = 17
    assert training.steps.by_place == {"s3://bucket/run": 10, "/disk/copies": 14, "peer": 10}
