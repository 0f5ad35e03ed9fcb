"""Replay is exact only under the conditions of training: another torch, machine or number of
threads is said, and claimed is nothing (I9)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from everstep.format.records import TimelineRecord
from everstep.restore.redo.driver import fingerprint_difference, replay_conditions
from everstep.seams import fingerprint as module
from everstep.seams.fingerprint import (
    computed_on,
    device_types,
    fingerprint,
    merge_fingerprints,
    volatile_settings,
)
from tests.support.logged import World, opened, train
from tests.support.world import TIMEOUT_S

HERE = TimelineRecord("r", 1, None, 0, True, 1, fingerprint(), 0.0)


def trained(**changed: str | None) -> TimelineRecord:
    """A timeline like one of this process, with some conditions changed (None: not recorded)."""
    found = {**fingerprint(), **{key: value for key, value in changed.items() if value is not None}}
    for key, value in changed.items():
        if value is None:
            found.pop(key, None)
    return replace(HERE, timeline=2, fingerprint=found)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"python": "2.7"}, ""),  # computes nothing
        ({"torch": "1.0"}, "trained with torch 1.0, replayed with "),
        ({"machine": "vax"}, "trained with machine vax, replayed with "),
        ({"processor": "8086"}, "trained with processor 8086, replayed with "),
        ({"system": "Plan 9"}, "trained with system Plan 9, replayed with "),
        ({"threads": "77"}, f"trained with threads 77, replayed with {torch.get_num_threads()}"),
        ({"threads": None}, f"trained with threads none, replayed with {torch.get_num_threads()}"),
        ({"device": "a GPU"}, "trained with device a GPU, replayed with none"),
        ({"cuda": "12.4"}, "trained with cuda 12.4, replayed with none"),
        ({"parameters": "cuda"}, "trained with parameters cuda, replayed with none"),
    ],
    ids=str,
)
def test_one_condition(changed: dict[str, str | None], said: str) -> None:
    found = fingerprint_difference([HERE, trained(**changed), HERE])
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_replay_without_the_program_is_on_the_cpu() -> None:
    assert replay_conditions([HERE])[1] == ""
    for changed, where in (({"parameters": "mps"}, "mps"), ({"device": "a GPU"}, "a GPU")):
        assert (
            replay_conditions([trained(**changed)])[1] == f"trained on {where}, replayed on the CPU"
        )


def test_where_a_training_computes_is_a_condition() -> None:
    model, fake = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, fake)]
    assert device_types(optimizers[:1]) == ("cpu",)
    assert device_types(optimizers) == ("cpu", "meta")
    assert "parameters" not in fingerprint()
    with computed_on(device_types(optimizers[:1])):
        assert "parameters" not in fingerprint()
        with computed_on(device_types(optimizers)):
            assert fingerprint()["parameters"] == "cpu, meta"
            assert "replayed with cpu, meta" in fingerprint_difference([HERE])
        assert fingerprint_difference([HERE]) == ""


def test_a_timeline_whose_record_is_lost() -> None:
    assert "damaged" in fingerprint_difference([HERE, None])
    assert fingerprint_difference([]) == ""


def test_offline_the_number_of_threads_is_taken_over_and_not_refused() -> None:
    """Without the program that trained it, replay chooses how many it computes with."""
    assert replay_conditions([HERE]) == (torch.get_num_threads(), "")
    assert replay_conditions([trained(threads="77")]) == (77, "")
    assert replay_conditions([HERE, trained(threads="77")]) == (None, "")
    assert replay_conditions([trained(threads=None)]) == (None, "")
    assert replay_conditions([trained(torch="1.0")])[1].startswith("trained with torch 1.0")
    assert replay_conditions([trained(processor="8086")])[1].startswith(
        "trained with processor 8086"
    )
    assert "replayed on the CPU" in replay_conditions([trained(device="a GPU")])[1]


def test_denormals_that_training_flushes_are_a_condition() -> None:
    """Second moments become so small; torch does not tell, so a product is looked at."""
    assert torch.set_flush_denormal(True)
    try:
        record = trained()
        assert record.fingerprint["denormals"] == "flushed"
        assert fingerprint_difference([record]) == ""
        assert (
            fingerprint_difference([HERE]) == "trained with denormals kept, replayed with flushed"
        )
    finally:
        torch.set_flush_denormal(False)
    assert fingerprint_difference([record]) == "trained with denormals flushed, replayed with kept"
    assert replay_conditions([record])[1] == "trained with denormals flushed, replayed with kept"
    assert "denormals" not in fingerprint()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def flushing(*, late: bool) -> TimelineRecord:
    """Of a training whose second thread is there before denormals are to be flushed, or not; both
    end with the call."""
    if late:
        torch.ones(1 << 17).mul_(2)
    assert torch.set_flush_denormal(True)
    return trained()


def in_another_thread(late: bool) -> TimelineRecord:
    """In one that has torch's threads to itself, so that none of ours flushes."""
    with torch_threads(2), ThreadPoolExecutor(1) as pool:
        return pool.submit(flushing, late=late).result(TIMEOUT_S)


def test_denormals_that_some_threads_flush_and_others_keep() -> None:
    """Those that torch had before it was told: not even an equal mixture gives the same bits,
    since replay shares the elements out otherwise."""
    assert in_another_thread(late=False).fingerprint["denormals"] == "flushed"
    mixed = in_another_thread(late=True)
    assert mixed.fingerprint["denormals"] == "mixed"
    said = "trained with denormals flushed by some of torch's threads and kept by others: call "
    assert fingerprint_difference([mixed]).startswith(said)
    assert replay_conditions([mixed]) == (None, fingerprint_difference([mixed]))
    of_all = merge_fingerprints([mixed.fingerprint, HERE.fingerprint])
    assert fingerprint_difference([replace(mixed, fingerprint=of_all)]).startswith(said)


def test_a_replay_where_some_threads_flush_denormals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_denormals", lambda: "mixed")
    assert fingerprint_difference([HERE]).startswith("replayed with denormals flushed by some of ")
    assert replay_conditions([HERE])[1].startswith("replayed with denormals flushed by some of ")
    assert fingerprint_difference([trained()]).startswith(
        "trained with denormals flushed by some of "
    )


@pytest.mark.parametrize("flushes", [True, False])
def test_a_forked_child_asks_no_threads_that_are_gone(
    flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator of several would wait for them for ever."""
    monkeypatch.setattr(module, "_forked", True)
    monkeypatch.setattr(torch, "full", lambda *_, **__: pytest.fail("all threads are asked"))
    with torch_threads(2):
        try:
            torch.set_flush_denormal(flushes)
            assert fingerprint().get("denormals") == ("mixed" if flushes else None)
        finally:
            torch.set_flush_denormal(False)


def test_fewer_threads_than_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP has the last word, and torch does not tell."""
    with torch_threads(2):
        two = trained()
        monkeypatch.setenv("OMP_THREAD_LIMIT", "2")
        assert fingerprint_difference([two]) == ""
        monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
        limited = trained()
        limit = "2 within OMP_THREAD_LIMIT=1"
        assert fingerprint_difference([two]) == f"trained with threads 2, replayed with {limit}"
        assert replay_conditions([two]) == (None, "")  # replay would get one
        assert fingerprint_difference([limited]) == ""
        monkeypatch.delenv("OMP_THREAD_LIMIT")
        assert fingerprint_difference([limited]) == f"trained with threads {limit}, replayed with 2"
        assert replay_conditions([limited]) == (None, "")
        assert replay_conditions([two]) == (2, "")


def test_a_number_of_threads_that_openmp_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_threads(2):
        two = trained()
        monkeypatch.setenv("OMP_DYNAMIC", "false")
        assert fingerprint_difference([two]) == ""
        monkeypatch.setenv("OMP_DYNAMIC", "TRUE")
        assert "2 or fewer, as OMP_DYNAMIC allows" in fingerprint_difference([two])
        assert "2 or fewer, as OMP_DYNAMIC allows" in fingerprint_difference(
            [trained()]
        )  # equal ones
        assert replay_conditions([two]) == replay_conditions([trained()]) == (None, "")
    with torch_threads(1):
        assert fingerprint()["threads"] == "1"


def forge(record: TimelineRecord) -> TimelineRecord:
    return replace(record, fingerprint={**record.fingerprint, "threads": "77"})


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("change", "exact"), [(lambda record: record, True), (forge, False)], ids=["same", "other"]
)
def test_a_resume_that_replays(
    change: Callable[[TimelineRecord], TimelineRecord], exact: bool, run_folder: Path
) -> None:
    """By the log, with another number of threads: the state comes back, the claim does not, and
    what descends from it makes none either. A base needs no replay."""
    world = World()
    train(run_folder, world, 6)
    path = run_folder / "timeline-00001" / "timeline.json"
    path.write_bytes(change(TimelineRecord.decode(path.read_bytes(), path)).encode())
    with opened(run_folder, World(seed=9), every=None) as ckpt:
        recovery = ckpt.resume(step=5)
        assert recovery.replayed == 1
        assert recovery.exact == exact
        assert ("trained with threads 77" in recovery.evidence) != exact
    with opened(run_folder, World(seed=9), every=None) as ckpt:
        assert ckpt.resume().exact == exact
    with opened(run_folder, World(seed=9), every=None) as ckpt:
        recovery = ckpt.resume(step=4)
        assert (recovery.replayed, recovery.exact) == (0, True)


RESUMES = """
import sys
from pathlib import Path
from everstep.testing import inspect
from tests.support.logged import World, opened
with opened(Path(sys.argv[1]), World(seed=9), every=None) as ckpt:
    recovery = ckpt.resume(step=5)
    print(recovery.step, recovery.exact)
    print(recovery.evidence)
    inspect(ckpt).skip_last_base()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no vector code here"
)
@pytest.mark.parametrize("capability", [None, "default"])
def test_a_resume_on_a_processor_with_other_vector_code(
    capability: str | None, run_folder: Path
) -> None:
    """The step comes back, by other roundings; it is neither called exact nor taken for one that
    something else has written to."""
    train(run_folder, World(), 6)
    environment = {**os.environ} | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
    done = subprocess.run(
        [sys.executable, "-c", RESUMES, str(run_folder)],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * TIMEOUT_S,
        check=True,
    )
    first, evidence = done.stdout.splitlines()[:2]
    assert first == f"5 {capability is None}", done.stderr
    assert ("trained with processor" in evidence) == (capability is not None)


def test_cuda_that_comes_into_use_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call of the driver: it is asked with each record."""
    before = volatile_settings()
    assert before == (torch.get_num_threads(), False, False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the driver is asked"))
    assert volatile_settings() == (torch.get_num_threads(), True, False)
