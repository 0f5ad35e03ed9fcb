"""Who answers for each entry between two bases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.errors import OptionError, StateError
from everstep.state.ownership import Memory, OwnedMemory, Owner, OwnershipIndex, memory_of
from everstep.state.training_state import State
from tests.support.state_changes import step, world

LOGGED = Owner("logged")
READ = Owner("logged", read="whole")
"""What updates read, besides."""


def owners(values: dict[str, Any], **told: Any) -> dict[str, Owner]:
    return dict(State(values, **told).survey().shape.owners)


def stepped(optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_owners_of_a_training() -> None:
    values = world()
    found = owners(values)
    sections = {"critic": "adam", "adam": "adam", "model": "optimizer", "optimizer": "optimizer"}
    logged = {
        *("model/mask", "model/body.1.running_mean", "model/body.1.running_var"),
        *("model/body.1.num_batches_tracked", "data/seen", "empty", "everstep/rng/torch"),
    }
    assert logged < set(found)
    assert "model/head.weight" not in found  # it is model/emb.weight
    for name, owner in found.items():
        optimizer = sections.get(name.split("/")[0], "")
        assert owner == (LOGGED if name in logged else Owner("replayed", optimizer)), name


def test_parameters_of_no_optimizer_are_logged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = owners({"m": model, "o": torch.optim.SGD(model[0].parameters(), lr=0.1)})
    assert found["m/0.weight"] == Owner("replayed", "o")
    assert found["m/1.weight"] == LOGGED


def test_state_that_appears_has_its_owner() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = State({"m": model, "o": optimizer})
    first = state.survey().shape
    stepped(optimizer)
    later = state.survey().shape
    assert later is not first
    new = set(later.owners) - set(first.owners)
    assert {later.owners[name] for name in new} == {Owner("replayed", "o")}
    assert len(new) == 6


def test_what_two_optimizers_own_is_logged() -> None:
    model = nn.Linear(2, 2)
    one = stepped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    two = stepped(torch.optim.SGD([model.bias], lr=0.1, momentum=0.9))
    state = State({"m": model, "one": one, "two": two})
    found = state.survey().shape.owners
    assert found["m/weight"] == Owner("replayed", "one")
    assert found["m/bias"] == READ
    assert found["one/state/m.bias/momentum_buffer"] == Owner("replayed", "one")
    two.param_groups[0]["params"] = []
    two.state.clear()
    assert state.survey().shape.owners["m/bias"] == Owner("replayed", "one")


def test_what_one_optimizer_owns_twice_is_logged() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight, nn.Parameter(weight.data)], lr=0.1)
    assert owners({"w": {"w": weight}, "o": optimizer})["w/w"] == READ
    held = torch.zeros(2)
    optimizer = torch.optim.SGD([weight, nn.Parameter(torch.ones(2))], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"shared": held}
    found = owners({"w": weight, "o": optimizer})
    assert [found[name] for name in found if name.startswith("o/")] == [READ]


def test_tensor_hyperparameters_are_logged_whoever_shares_them() -> None:
    """Schedulers change them between updates, where no replay would."""
    model = nn.Linear(2, 2)
    lr = torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=lr)
    values: dict[str, Any] = {"m": model, "o": optimizer}
    state = State(values)
    assert state.survey().shape.owners["o/param_groups/0/lr"] == LOGGED
    assert state.survey().shape.aliases == {"o/param_groups/1/lr": "o/param_groups/0/lr"}
    values["p"] = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
    assert owners(values)["o/param_groups/0/lr"] == LOGGED
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    del values["p"]
    found = state.survey().shape.owners
    assert found["o/param_groups/0/lr"] == found["o/param_groups/1/lr"] == LOGGED


@pytest.mark.parametrize(
    ("first", "second", "read"),
    [
        (lambda t: t, lambda t: t[1:], "inside"),
        (lambda t: t[:3], lambda t: t[2:], "part"),
        (lambda t: t, lambda t: t.view(2, 2), "inside"),
        (lambda t: t[1:3], lambda t: t, "part"),
        (lambda t: t, lambda t: t.view(torch.int32), "inside"),
        (lambda t: t[::2], lambda t: t[:3], "part"),
    ],
)
def test_memory_that_is_shared_in_part_is_logged(first: Any, second: Any, read: Any) -> None:
    memory = torch.ones(4)
    weight, apart = nn.Parameter(first(memory)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight, apart], lr=0.1)
    values: dict[str, Any] = {"w": weight, "apart": apart, "o": optimizer, "v": torch.ones(1)}
    state = State(values)
    assert state.survey().shape.owners["w"] == Owner("replayed", "o")
    values["v"] = second(memory)
    found = state.survey().shape.owners
    assert (found["w"], found["v"]) == (READ, Owner("logged", read=read))
    assert found["apart"] == Owner("replayed", "o")


def test_an_owned_view_that_is_no_entry_makes_the_whole_logged() -> None:
    memory = torch.ones(4)
    whole, part = nn.Parameter(memory), nn.Parameter(memory[1:])
    assert owners({"w": whole, "o": torch.optim.SGD([whole, part], lr=0.1)})["w"] == READ


def test_what_says_how_rates_are_is_not_read() -> None:
    """Whoever sets them sets them between updates, and each has them in its record."""
    rates, weight = torch.tensor([0.1, 0.2]), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": rates[0]}], lr=0.1)
    found = owners({"w": weight, "rates": rates, "o": optimizer})
    assert found["rates"] == found["o/param_groups/0/lr"] == LOGGED


def test_what_is_declared_may_be_read() -> None:
    memory = torch.ones(4)
    values: dict[str, Any] = {"flat": memory, "o": torch.optim.SGD([nn.Parameter(memory[:2])], 0.1)}
    assert owners(values, declared=["flat"])["flat"] == Owner("declared", read="part")
    values["p"] = torch.optim.SGD([nn.Parameter(memory[2:])], 0.1)
    assert owners(values, declared=["flat"])["flat"] == Owner("declared", read="inside")


def test_ownership_does_not_depend_on_the_state_dict() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "copies": [torch.ones(3)]}

    model = nn.Linear(2, 2)
    found = owners({"m": model, "o": stepped(Own(model.parameters(), lr=0.1, momentum=0.9))})
    assert found["m/weight"] == found["o/state/m.bias/momentum_buffer"] == Owner("replayed", "o")
    assert found["o/copies/0"] == LOGGED


def test_nested_state_is_owned() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = owners({"m": model, "o": optimizer})
    nested = [owner for name, owner in found.items() if "/old_dirs/" in name]
    assert nested
    assert set(nested) == {Owner("replayed", "o")}


def test_replacing_a_parameter_behind_the_optimizers_back_is_seen() -> None:
    model = nn.Linear(2, 2)
    state = State({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)})
    assert state.survey().shape.owners["m/weight"] == Owner("replayed", "o")
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert state.survey().shape.owners["m/weight"] == LOGGED


# --- What the user says -------------------------------------------------------------------


def test_declared_and_static_entries() -> None:
    values = world()
    values["ema"] = {"a": torch.ones(2), "b[0]": torch.ones(2), "c": torch.ones(2)}
    values["tied"] = values["ema"]["c"]
    told = {"declared": ["ema/b[0]", "tied"], "static": ("model/ma?k", "data/*")}
    found = owners(values, **told)
    assert found["ema/a"] == LOGGED
    assert found["ema/b[0]"] == found["ema/c"] == Owner("declared")  # the second by its alias
    assert found["model/mask"] == found["data/seen"] == Owner("static")
    assert found["everstep/rng/torch"] == LOGGED
    assert found == owners(values, **told)


def test_functions_that_update() -> None:
    flat = torch.zeros(4)
    values = {
        "ema": {"a": torch.ones(2), "b": torch.ones(2), "none": torch.ones(0)},
        "views": {"first": flat[:3], "second": flat[2:]},
        "plain": torch.ones(1),
    }
    functions = {"ema/*": list, "views/*": list, "plain": None}
    found = owners(values, declared=functions)
    assert found["ema/a"] == found["ema/none"] == Owner("declared", update="ema/*")
    # Replay on separate copies would give something else: in full, whatever updates it.
    assert found["views/first"] == found["views/second"] == found["plain"] == Owner("declared")
    assert [found[name].in_marks for name in ("ema/a", "views/first", "plain")] == [
        False,
        True,
        True,
    ]


def test_two_functions_may_not_claim_one_entry() -> None:
    values = {"ema": {"a": torch.ones(2), "b": torch.ones(2)}}
    with pytest.raises(OptionError, match=r"ema/b is updated by the functions of '\*' and 'ema/b'"):
        State(values, declared={"*": list, "ema/b": list})
    assert owners(values, declared={"*": None, "ema/b": list})["ema/b"].update == "ema/b"


def test_patterns_match_nothing_of_everstep() -> None:
    assert owners({"x": torch.ones(1)}, static="*".split())["everstep/rng/torch"] == LOGGED
    with pytest.raises(OptionError, match="matches no entry"):
        State({"x": torch.ones(1)}, static=["everstep/*"])


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(OptionError, match="declared='model/runing_mean' matches no") as error:
        State(world(), declared=["model/runing_mean"])
    assert "model/body.1.running_mean" in str(error.value.hint)
    with pytest.raises(OptionError, match="static='zzz'"):
        State({"x": torch.ones(1)}, static=["x", "zzz"])


@pytest.mark.parametrize("option", ["declared", "static"])
@pytest.mark.parametrize("pattern", ["model/emb.weight", "model/head.*", "adam/*", "critic/bias"])
def test_a_pattern_may_not_claim_what_an_optimizer_owns(option: str, pattern: str) -> None:
    with pytest.raises(
        OptionError, match=f"declared as {option}, but it is updated by (optimizer|adam)"
    ):
        State(world(), **{option: [pattern]})


def test_not_even_what_two_of_them_own() -> None:
    model = nn.Linear(2, 2)
    values = {key: torch.optim.SGD(model.parameters(), lr=0.1) for key in ("one", "two")}
    with pytest.raises(OptionError, match="declared as static, but it is updated by one and two"):
        State({"m": model, **values}, static=["m/bias"])


def test_what_a_pattern_claims_later_is_refused_then() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = State({"m": model, "o": optimizer, "exp": torch.ones(1)}, static=["*exp*"])
    stepped(optimizer)
    for _ in range(2):
        with pytest.raises(
            StateError, match="exp_avg is declared as static, but it is updated by o"
        ):
            state.survey()
    optimizer.state.clear()
    assert state.survey().shape.owners["exp"] == Owner("static")


def test_declared_and_static_at_once() -> None:
    with pytest.raises(OptionError, match="matches patterns of both declared and static"):
        State({"x": torch.ones(1)}, declared=["x"], static=["*"])


@pytest.mark.parametrize("patterns", ["model/*", b"x", [1], 3, None])
def test_what_is_no_list_of_patterns(patterns: Any) -> None:
    with pytest.raises(OptionError, match="static= must be a list of patterns"):
        State({"x": torch.ones(1)}, static=patterns)


def test_training_does_not_change_owners() -> None:
    values = world()
    state = State(values, static=["model/mask"])
    shape = state.survey().shape
    for _ in range(3):
        step(values)
        assert state.survey().shape is shape


# --- Claims -------------------------------------------------------------------------------


def piece(begin: int, count: int, stride: int) -> Memory:
    return Memory(torch.device("cpu"), begin, (count,), (stride,), torch.uint8, False, False)


pieces = st.builds(piece, st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))


def span(memory: Memory) -> range:
    (count,), (stride,) = memory.shape, memory.stride
    return range(memory.begin, memory.begin + (count - 1) * stride + 1)


def meet(one: Memory, other: Memory) -> bool:
    return not set(span(one)).isdisjoint(span(other))


@given(owned=st.lists(pieces, max_size=6), others=st.lists(pieces, max_size=6))
def test_overlaps_are_those_of_the_bytes(owned: list[Memory], others: list[Memory]) -> None:
    claims = OwnershipIndex(
        [OwnedMemory("o", tuple(owned[:3])), OwnedMemory("p", tuple(owned[3:]))]
    )
    everything = {*owned, *others}
    assert claims.overlapping(others) == {
        one for one in everything if any(meet(one, other) for other in everything - {one})
    }
    for memory in everything:
        assert claims.own_part_of(memory) == any(meet(memory, other) for other in owned)


def test_the_end_of_memory() -> None:
    tensor = torch.zeros(5, 7, dtype=torch.float64)
    for view in (
        tensor,
        tensor.t(),
        tensor[1:3, ::2],
        tensor[4],
        tensor[0, 0],
        tensor.expand(2, 5, 7),
    ):
        memory = memory_of(view)
        assert memory is not None
        last = view[tuple(-1 for _ in view.shape)]
        assert memory.end == last.data_ptr() + 8
    assert memory_of(torch.empty(0, 3)) is None


def test_devices_are_apart() -> None:
    there = Memory(torch.device("cuda:0"), 1, (4,), (1,), torch.uint8, False, False)
    claims = OwnershipIndex([OwnedMemory("o", (there,))])
    assert not claims.own_part_of(piece(1, 4, 1))
    assert claims.own_part_of(there)
    assert claims.overlapping([piece(1, 4, 1)]) == set()
