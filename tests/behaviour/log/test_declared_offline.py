"""Declared updates and tools that have no program: what only its functions can redo is refused
by name, and everything else is as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePath
from typing import Any

import msgpack
import pytest
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from everstep.errors import FormatError, UnsupportedStateError
from everstep.format.header import ShardIdentity
from everstep.format.log import (
    LOG_OBJECT,
    LogRecord,
    RecordHead,
    heads_of,
    plan_segment,
    record_digest,
    records_of_segment,
)
from everstep.run.chain import Chain, LogIndex
from everstep.state.layout.shards import ShardLayout
from tests.support import logged
from tests.support.logged import document, invoke, opened, rebuilder_of
from tests.support.world import forget


class World(logged.World):
    """With an average of the weights, updated in every fifth step."""

    def __init__(self, *, seed: int = 1) -> None:
        super().__init__(seed=seed)
        decay = get_ema_multi_avg_fn(0.9)
        self.state["ema"] = self.average = AveragedModel(self.model, multi_avg_fn=decay)
        self.ckpt: Any = None

    def update(self) -> None:
        self.average.update_parameters(self.model)

    def train(self) -> None:
        super().train()
        if self.state["plain"]["seen"] % 5 == 0:
            self.ckpt.before_update()
            self.update()
            self.ckpt.after_update("ema/*")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases 1, 4, 8, 9; the average is updated in step 5."""
    run = tmp_path_factory.mktemp("declared") / "run"
    world = World()
    with opened(run, world, declared={"ema/*": world.update}) as ckpt:
        world.ckpt = ckpt
        ckpt.resume()
        for _ in range(9):
            world.train()
            ckpt.step()
    forget(run)
    return run


def test_what_a_function_gives_is_refused_by_name(run: Path) -> None:
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.state_at(3).exact  # no function has run on the way from its base
        assert rebuilder.state_at(9).exact
        with pytest.raises(UnsupportedStateError, match=r"matching 'ema/\*' .* program") as why:
            rebuilder.state_at(6)
        assert why.value.leaves == (("ema/*", "a declared update"),)


def test_an_audit_says_what_it_could_not_check(run: Path) -> None:
    found = document("verify", run, "--replay")
    verdicts = [(one["after"]["step"], one["verdict"]) for one in found["replay"]]
    assert verdicts == [(4, "equal"), (8, "unchecked"), (9, "equal")]
    assert "'ema/*'" in found["replay"][1]["reason"]


def test_records_are_shown_with_what_they_update(run: Path) -> None:
    (file,) = run.glob("timeline-00001/log/000000000004-*/rank-00000.safetensors")
    assert "update of ema/*" in invoke("inspect", file).stdout
    found = document("inspect", file)["records"]
    assert [one["declared"] for one in found] == ["", "ema/*", "", "", ""]


# --- Segments ------------------------------------------------------------------------------


def segment_index(heads: list[RecordHead]) -> tuple[ShardIdentity, bytes]:
    empty = memoryview(b"")
    layout = ShardLayout(())
    records = [LogRecord(head, layout, {}, empty, record_digest(empty, {})) for head in heads]
    identity = ShardIdentity("run", heads[-1].timeline, heads[-1].step, heads[-1].lsn, 0, 1, True)
    _, body = plan_segment(identity, records)
    return identity, body.source(LOG_OBJECT)


HEADS = [
    RecordHead("update", 1, 1, 1, "s"),
    RecordHead("update", 1, 1, 2, "s", True, "ema/*"),
    RecordHead("mark", 1, 1, 2, "s"),
]


def test_a_segment_keeps_which_function_it_was() -> None:
    identity, index = segment_index(HEADS)
    path = PurePath("segment")
    assert list(heads_of(1, index, path)) == HEADS
    found = records_of_segment(identity, {LOG_OBJECT: memoryview(index)}, path)
    assert [record.head for record in found] == HEADS
    assert "'ema/*'" in str(HEADS[1])


def test_other_segments_are_written_as_they_were() -> None:
    """Readers that know no declared updates read them, and refuse only those with some."""
    _, index = segment_index([HEADS[0], dataclasses.replace(HEADS[2], lsn=1)])
    assert {len(row) for row in msgpack.unpackb(index)["records"]} == {8}
    _, index = segment_index(HEADS)
    assert [len(row) for row in msgpack.unpackb(index)["records"]] == [8, 9, 8]


@pytest.mark.parametrize(("row", "extra"), [(2, ["ema/*"]), (1, [3]), (1, ["ema/*", "more"])])
def test_what_is_no_declared_update(row: int, extra: list[Any]) -> None:
    identity, index = segment_index(HEADS)
    fields = msgpack.unpackb(index)
    fields["records"][row][8:] = extra
    data = msgpack.packb(fields)
    with pytest.raises(FormatError, match="not a segment"):
        heads_of(1, data, PurePath("segment"))
    with pytest.raises(FormatError):
        records_of_segment(identity, {LOG_OBJECT: memoryview(data)}, PurePath("segment"))


def test_how_far_a_chain_goes_without_a_function() -> None:
    from everstep.commit.lineage import BaseId

    later = [dataclasses.replace(head, step=2, lsn=head.lsn + 2) for head in HEADS]
    index = LogIndex([*HEADS, *later])
    chain = Chain(BaseId(1, 0), ((1, 1), (1, 2)), "")
    assert index.first_unregistered(chain, 0, {"ema/*"}) is None
    assert index.first_unregistered(chain, 0, ()) == (0, "ema/*")
    assert index.first_unregistered(Chain(BaseId(1, 1), ((1, 2),), ""), 2, {"swa"}) == (0, "ema/*")
    plain = LogIndex([HEADS[0], dataclasses.replace(HEADS[2], lsn=1), *later])
    assert plain.first_unregistered(chain, 0, ()) == (1, "ema/*")
