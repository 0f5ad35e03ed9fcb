"""Layouts of captures on their way to the keeper."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from everstep.errors import KeeperError
from everstep.format import BasePlan, ShardIdentity
from everstep.format.header import ShardPlan
from everstep.link.messages import identity_to_wire, layout_to_wire, plan_from_wire, to_plain
from everstep.state.layout import Entry
from everstep.state.layout.shards import plan_shards

IDENTITY = ShardIdentity(run="run", timeline=1, step=3, lsn=9, rank=0, world=1, exact=True)
COUNT = 200


def plan() -> BasePlan:
    entries = [
        Entry("model/a", "F32", (2, 3), (4, 3), (2, 0), "(Shard(dim=0),)", (1, 2), None, 7),
        *(Entry.whole(f"optimizer/{n}", "F64", (2,)) for n in range(COUNT)),
    ]
    (layout,) = plan_shards(entries)
    return BasePlan(IDENTITY, (ShardPlan("file", layout, {"b": "a"}, 4096, 10),), {"a": "model"})


def test_a_plan_comes_back() -> None:
    sent = msgpack.unpackb(msgpack.packb(layout_to_wire(plan())))
    assert plan_from_wire(sent, identity_to_wire(IDENTITY)) == plan()


def test_an_entry_takes_little_more_than_its_name() -> None:
    """The size of a message limits the number of entries of a state."""
    size = len(msgpack.packb(layout_to_wire(plan())))
    assert size < COUNT * (len("optimizer/100") + 40)


@pytest.mark.parametrize("rows", [None, [], [[["only a name"]]], [[], []]])
def test_rows_of_another_form_are_refused(rows: Any) -> None:
    sent = {**layout_to_wire(plan()), "rows": rows}
    with pytest.raises(KeeperError, match="invalid fields in a message"):
        plan_from_wire(sent, identity_to_wire(IDENTITY))


def test_what_would_become_something_else_is_not_sent() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        to_plain({"name": np.str_("abc")})
