"""Saves in flight: what they hold, how many there may be, and what happens at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import DeadlineError, EverstepError, OutOfSpaceError, StorageError
from everstep.link.save import Save, failing_save
from everstep.seams import Seams
from everstep.testing import inspect
from tests.support.world import (
    TIMEOUT_S,
    Gate,
    HookedFileSystem,
    acquiring,
    assert_same,
    base_folder,
    opened,
    raising,
    size_below,
    verdict_of,
)

PAGE = 4096


def resumed(run: Path, state: dict[str, Any], **how: Any) -> everstep.Recovery:
    with opened(run, state) as ckpt:
        return ckpt.resume(**how)


def test_a_save_in_flight_holds_the_old_values(run_folder: Path) -> None:
    """I1: parameters, moments, buffers and plain data change while it is being written."""
    gate, fs = Gate(), HookedFileSystem()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    array = torch.arange(5000.0)
    state: dict[str, Any] = {
        "m": model,
        "o": optimizer,
        "t": array.expand(2, 5000),
        "p": {"n": [1], "a": array.numpy()},
    }
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    with opened(run_folder, state, fs=fs, method="async") as ckpt:
        ckpt.step()
        save = ckpt.save()
        assert save.staged.done()
        assert gate.reached.wait(TIMEOUT_S)
        wanted = [
            {k: v.clone() for k, v in model.state_dict().items()},
            {k: v.clone() for k, v in optimizer.state[model.weight].items()},
            array.clone(),
            torch.get_rng_state(),
        ]
        with torch.no_grad():
            model.weight.zero_()
            model.bias.data += 1
            for moment in optimizer.state[model.weight].values():
                moment.fill_(7)
            array.fill_(-1)
        state["p"]["n"].append(2)
        optimizer.param_groups[0]["lr"] = 5.0
        torch.rand(3)
        assert not save.durable.done()
        gate.open()
        save.durable.result(TIMEOUT_S)
    resumed(run_folder, state)
    found = [model.state_dict(), optimizer.state[model.weight], array, torch.get_rng_state()]
    assert_same(found, wanted)
    assert state["p"]["n"] == [1]
    assert optimizer.param_groups[0]["lr"] == 0.001


def test_two_saves_in_flight_hold_different_contents(run_folder: Path) -> None:
    gate, fs = Gate(), HookedFileSystem()
    state = {"t": torch.zeros(3000), "n": [0]}
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    with opened(run_folder, state, fs=fs, method="async", keep=5) as ckpt:
        saves = []
        for number in range(1, 4):
            state["t"].fill_(number)
            state["n"][0] = number
            ckpt.step()
            saves.append(ckpt.save())
        assert gate.reached.wait(TIMEOUT_S)
        state["t"].fill_(99)
        assert not any(save.durable.done() for save in saves)
        gate.open()
        ckpt.wait()
        assert all(save.durable.done() for save in saves)
    for number in (2, 1, 3):
        live = {"t": torch.zeros(3000), "n": [0]}
        resumed(run_folder, live, step=number)
        assert_same(live, {"t": torch.full((3000,), float(number)), "n": [number]})


def test_later_saves_do_not_write_into_earlier_ones(run_folder: Path) -> None:
    """Host memory is reused: a base on disk stays what it was (a stale buffer would show)."""
    state = {"t": torch.zeros(50_000)}
    with opened(run_folder, state, method="async", keep=10) as ckpt:
        for number in range(1, 7):
            state["t"].fill_(number)
            ckpt.step()
            ckpt.save()
            if number % 2:
                ckpt.wait()
    for number in range(1, 7):
        live = {"t": torch.zeros(50_000)}
        resumed(run_folder, live, step=number)
        assert (live["t"] == number).all()


def budget_for(run: Path, state: dict[str, Any], bases: int) -> everstep.Budget:
    """Room for so many bases in host memory."""
    with opened(run.with_name("measure"), state, method="async") as ckpt:
        ckpt.save()
        ckpt.wait()
        each = -(-ckpt.stats().host_bytes // PAGE) * PAGE
        return everstep.Budget(host_bytes=bases * each)


def test_full_host_memory_pushes_back(run_folder: Path) -> None:
    """I10: the third save waits for the first; nothing grows, nothing is dropped."""
    state = {"t": torch.zeros(4000)}
    budget = budget_for(run_folder, state, 2)
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    with opened(run_folder, state, fs=fs, method="async", budget=budget, keep=9) as ckpt:
        for _ in range(2):
            ckpt.step()
            ckpt.save()
        ckpt.step()
        third = threading.Thread(target=ckpt.save)
        third.start()
        assert gate.reached.wait(TIMEOUT_S)
        assert third.is_alive()
        assert ckpt.stats().host_bytes <= (budget.host_bytes or 0)
        gate.open()
        third.join(TIMEOUT_S)
        assert not third.is_alive()
        ckpt.wait()
        assert ckpt.stats().host_bytes <= (budget.host_bytes or 0)
        assert ckpt.stats().committed == 3


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["async", "lazy"])
@pytest.mark.parametrize("room", [None, 3])
def test_two_bases_at_most_wait_for_a_slow_disk(
    room: int | None, method: str, run_folder: Path
) -> None:
    """Though half of the machine's memory would hold hundreds: the third save waits for the
    first. Where memory was set apart for more, more wait."""
    state = {"t": torch.zeros(6_000_000)}
    size_bytes = 24_000_000  # three are more than a queue of small ones may be
    budget = everstep.Budget(host_bytes=room and room * (size_bytes + 65_536))
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    options = {"method": method, "budget": budget, "keep": 9}
    with opened(run_folder, state, fs=fs, **options) as ckpt:
        for _ in range(room or 2):
            ckpt.step()
            ckpt.save()
        ckpt.step()
        no_memory = pytest.raises(DeadlineError, match="no host memory was released")
        with no_memory, acquiring(ckpt, timeout_s=0.5):
            ckpt.save()
        pool = inspect(ckpt).keepers.pool
        assert pool is not None
        assert pool.used_bytes // size_bytes == (room or 2)
        gate.open()
        ckpt.wait()
        assert ckpt.stats().committed == (room or 2)


def test_pushing_back_ends_in_an_error_when_nothing_moves(run_folder: Path) -> None:
    state = {"t": torch.zeros(4000)}
    budget = budget_for(run_folder, state, 1)
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    with opened(run_folder, state, fs=fs, method="async", budget=budget) as ckpt:
        ckpt.step()
        first = ckpt.save()
        ckpt.step()
        no_memory = pytest.raises(DeadlineError, match="no host memory was released")
        with no_memory, acquiring(ckpt, timeout_s=0.2):
            ckpt.save()
        gate.open()
        first.durable.result(TIMEOUT_S)
        ckpt.save()


def test_a_state_that_can_never_fit_is_refused_early(run_folder: Path) -> None:
    state = {"t": torch.zeros(40_000)}
    with pytest.raises(OutOfSpaceError, match=r"Budget\(host_bytes=\d+\)"):
        everstep.Checkpointer(
            run_folder, state, method="async", budget=everstep.Budget(host_bytes=100_000)
        )
    with opened(run_folder, state, budget=everstep.Budget(host_bytes=100_000)) as ckpt:
        ckpt.save()  # sync needs a few chunks only


def test_a_state_that_outgrows_the_budget(run_folder: Path) -> None:
    """What a class that is not torch's makes in its first update: said at the save, training
    unharmed."""
    model = nn.Linear(100, 100)
    own = type("Own", (torch.optim.Adam,), {})
    state: dict[str, Any] = {"m": model, "o": own(model.parameters())}
    with opened(
        run_folder, state, method="async", budget=everstep.Budget(host_bytes=100_000)
    ) as ckpt:
        ckpt.step()
        ckpt.save().durable.result(TIMEOUT_S)
        model(torch.ones(1, 100)).sum().backward()
        state["o"].step()
        ckpt.step()
        with pytest.raises(OutOfSpaceError, match="host memory"):
            ckpt.save()
        ckpt.step()


def test_disk_budget(run_folder: Path) -> None:
    state = {"t": torch.zeros(100_000)}
    with pytest.raises(OutOfSpaceError, match="the budget is"):
        everstep.Checkpointer(
            run_folder, state, keep=3, budget=everstep.Budget(disk_bytes=1_000_000)
        )
    with opened(
        run_folder, state, keep=1, budget=everstep.Budget(disk_bytes=2_000_000), every=1
    ) as ckpt:
        for _ in range(6):
            ckpt.step()
            assert size_below(run_folder) <= 2_000_000


def test_close_waits(run_folder: Path) -> None:
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    ckpt = everstep.Checkpointer(
        run_folder, {"a": 1}, every=None, seams=Seams(filesystem=fs), progress_timeout_s=TIMEOUT_S
    )
    ckpt.step()
    save = ckpt.save()
    closing = threading.Thread(target=ckpt.close)
    closing.start()
    assert gate.reached.wait(TIMEOUT_S)
    assert closing.is_alive()
    gate.open()
    closing.join(TIMEOUT_S)
    assert save.durable.result(0) > 0


def test_wait_with_a_time_limit(run_folder: Path) -> None:
    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    ckpt = everstep.Checkpointer(run_folder, {"a": 1}, every=None, seams=Seams(filesystem=fs))
    ckpt.step()
    ckpt.save()
    with pytest.raises(DeadlineError, match=r"1 base\(s\) are not durable"):
        ckpt.wait(timeout_s=0.01)
    gate.open()
    ckpt.wait(timeout_s=TIMEOUT_S)
    ckpt.close()


def test_a_failed_base_is_no_reason_to_abandon_the_next(run_folder: Path) -> None:
    """close() raises the first error only when everything else is durable."""
    gate, fs = Gate(), HookedFileSystem()
    first = raising(OSError(5, "broken"), "write", "*000000000001*")
    later = raising(OSError(5, "broken, too"), "write", "*000000000003*")

    def hook(op: str, path: Any) -> None:
        if op == "create" and "000000000001" in str(path):
            gate.wait_at()
        first(op, path)
        later(op, path)

    fs.hook = hook
    ckpt = everstep.Checkpointer(run_folder, {"a": 1}, every=None, seams=Seams(filesystem=fs))
    saves = []
    for _ in range(4):
        ckpt.step()
        saves.append(ckpt.save())
    gate.open()
    with pytest.raises(StorageError, match="broken") as error:
        ckpt.close()
    assert error.value.step == 1
    assert [save.durable.exception(0) is None for save in saves] == [False, True, False, True]


def test_threads_end_with_close(run_folder: Path) -> None:
    before = set(threading.enumerate())  # those of another test may still be ending
    for _ in range(3):
        with opened(run_folder, {"t": torch.ones(100)}, method="async") as ckpt:
            ckpt.resume()
            ckpt.step()
            ckpt.save()
        assert set(threading.enumerate()) <= before


def test_the_keeper_does_not_hold_on_to_live_tensors(run_folder: Path) -> None:
    """Once staged, the live tensors may go: their memory is not kept alive by a base."""
    import gc
    import weakref

    gate, fs = Gate(), HookedFileSystem()
    fs.hook = raising(gate.wait_at, "create", "*.safetensors.tmp")
    state: dict[str, Any] = {"d": {"t": torch.ones(1000)}}
    alive = weakref.ref(state["d"]["t"])
    with opened(run_folder, state, fs=fs, method="async") as ckpt:
        ckpt.save()
        assert gate.reached.wait(TIMEOUT_S)
        state["d"] = {}
        gc.collect()
        assert alive() is None
        gate.open()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["sync", "async"])
def test_bodies_longer_than_several_chunks(method: str, run_folder: Path) -> None:
    """More than the ring of chunks holds, not a multiple of anything, cut through tensors."""
    from everstep.format.writer import CHUNK_BYTES

    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (3, CHUNK_BYTES * 5)]
    tensors += [torch.randn(CHUNK_BYTES // 4 + 13), torch.randn(7, 11).t()]
    with opened(run_folder, {"t": tensors}, method=method) as ckpt:
        ckpt.save().durable.result(TIMEOUT_S)
    live: dict[str, Any] = {"t": None}
    resumed(run_folder, live)
    assert all(torch.equal(a, b) for a, b in zip(live["t"], tensors, strict=True))
    assert base_folder(run_folder, 0).is_dir()


def test_every_base_verifies(run_folder: Path) -> None:
    from tests.support.world import inventory_of

    state = {"t": torch.randn(1000)}
    with opened(run_folder, state, method="async", every=1, keep=3) as ckpt:
        for _ in range(7):
            state["t"].add_(1)
            ckpt.step()
    bases = inventory_of(run_folder).bases
    assert [base.id.step for base in bases] == [5, 6, 7]
    assert all(not verdict_of(base).damages for base in bases)


def test_whoever_waits_for_a_save_hears_what_became_of_it() -> None:
    told: list[EverstepError] = []
    failed, interrupted, error = Save(1, 1), Save(2, 1), StorageError("no more")
    with failing_save(failed, told.append):
        raise error
    with pytest.raises(KeyboardInterrupt), failing_save(interrupted, told.append):
        raise KeyboardInterrupt
    assert told == [error]
    assert failed.staged.exception() is failed.durable.exception() is error
    assert interrupted.staged.cancelled()
    assert interrupted.durable.cancelled()
