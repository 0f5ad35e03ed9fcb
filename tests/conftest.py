"""What all tests share: one thread, fixed seeds, a clean machine before and after."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.leftovers import MARK, SHARED_MEMORY, left_behind, shared_memory_names
from tests.support.plugin import provide_plugin

# Before torch is imported, and inherited by every child process of a test.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
for _name in ("EVERSTEP_FAILPOINTS", "EVERSTEP_DISABLE"):
    os.environ.pop(_name, None)
provide_plugin()
os.environ.pop("COLUMNS", None)  # the width of who runs the tests is not that of what they run
# One of the processes that share the tests (pytest -n); its id and its folder are in those of the
# run, so that whoever started it finds what it leaves behind, however it ends.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
RUN_ID = f"{os.environ[MARK]}.{WORKER}" if WORKER else secrets.token_hex(8)
os.environ[MARK] = RUN_ID
# Keepers of this test run meet nobody else's. Short: sockets have short names.
if WORKER:
    _RUNTIME_DIR = Path(os.environ["EVERSTEP_RUNTIME_DIR"], WORKER)
    _RUNTIME_DIR.mkdir(mode=0o700)
else:
    _RUNTIME_DIR = Path(tempfile.mkdtemp(prefix="everstep-test-"))
os.environ["EVERSTEP_RUNTIME_DIR"] = str(_RUNTIME_DIR)

import atexit  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import random  # noqa: E402
import shutil  # noqa: E402
import weakref  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import typer.testing  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from everstep.replay import engine  # noqa: E402
from everstep.seams import failpoints, progress  # noqa: E402
from everstep.trainer import budget  # noqa: E402
from everstep.workloads.gpt import GPTConfig  # noqa: E402
from everstep.workloads.training import (  # noqa: E402
    Training,
    TrainingConfig,
    training_of,
)
from tests.support.keepers import end_keepers  # noqa: E402
from tests.support.trainers import end_server  # noqa: E402

SEED = 20240229

# pytest handles the records of all loggers; these tests are programs that configure none.
progress.logging_is_configured = lambda: False

# Made once for each app: out of all their parameters it takes 60 ms, most verbs take one.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

# The same examples in every run. EVERSTEP_HYPOTHESIS=explore draws new ones each time;
# what fails is then printed with the line that reproduces it.
settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("same"), derandomize=False, max_examples=1000
)
PROFILE = os.environ.get("EVERSTEP_HYPOTHESIS", "same")
settings.load_profile(PROFILE)


def pytest_report_header() -> str:
    return f"everstep: seed {SEED}, hypothesis profile {PROFILE}, torch {torch.__version__}"


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is ``thinned(n)`` all but each n-th are slow: of several
    parameters those on diagonals, so that each value of each is in some quick case."""
    seen: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and _diagonal(item, seen) % thinned.args[0]:
            item.add_marker(pytest.mark.slow)


def _diagonal(item: pytest.Item, seen: dict[tuple[str, str], list[Any]]) -> int:
    """The sum of the places of the values of its parameters, each ``parametrize`` counted once."""
    values: dict[str, Any] = dict(item.callspec.params)  # type: ignore[attr-defined]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:
            del values[name.strip()]
    total = 0
    for name, value in values.items():
        known = seen.setdefault((item.nodeid.partition("[")[0], name), [])
        place = next((n for n, one in enumerate(known) if one is value), len(known))
        if place == len(known):
            known.append(value)
        total += place
    return total


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no garbage collection looks at it again, and tests ask for
    many. With it what torch loads when the first optimizer is made."""
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def first_updates_are_known() -> Iterator[None]:
    """Ask an optimizer of a class only once what it will keep of a tensor of a form."""
    known: dict[Any, Any] = {}
    ask = budget._kept

    def kept(kind: type, group: Mapping[str, Any], parameter: torch.Tensor) -> Any:
        options = repr({key: value for key, value in group.items() if key != "params"})
        form = kind, options, parameter.shape, parameter.dtype
        if form not in known:
            known[form] = ask(kind, group, parameter)
        return known[form]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_kept", kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails the run if it leaves a process, or a name under /dev/shm."""
    before = shared_memory_names(RUN_ID)
    yield
    end_server()
    # Names without an id may be those of the other processes that share the tests.
    left = left_behind(RUN_ID, _RUNTIME_DIR, before=None if WORKER else before)
    shutil.rmtree(_RUNTIME_DIR)
    assert not left, "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def small_states_are_replayed_in_blocks() -> Iterator[None]:
    """What tests replay is small, and what is to be seen is how large states go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "BLOCKS_PAY_ELEMENTS", 0)
        yield


_SHARING = pytest.StashKey[set[str]]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of a run whose tests are shared: the fixture above is in other processes, and one that is
    killed does not get to its end."""
    if session.config.pluginmanager.has_plugin("dsession"):
        session.config.stash[_SHARING] = shared_memory_names(RUN_ID)


@pytest.hookimpl(trylast=True)  # when those processes have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    if _SHARING not in stash:
        return
    stash[_LEFT] = left_behind(RUN_ID, _RUNTIME_DIR, before=stash[_SHARING])
    shutil.rmtree(_RUNTIME_DIR)
    if stash[_LEFT]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in terminalreporter.config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"FAILED: {line}", red=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same state of all generators."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def nothing_waits_for_the_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Checkpointer that a test drops is to be finished when this process exits. Until then it
    would keep its state alive, and each later look at all objects would take longer."""
    # Weak: some tests close thousands, and each function holds the memory of its Checkpointer.
    registered: list[weakref.ref[Any]] = []
    register = atexit.register

    def noted(function: Any, *args: Any, **options: Any) -> Any:
        registered.append(weakref.ref(function))
        return register(function, *args, **options)

    monkeypatch.setattr("everstep.trainer.session.session.atexit.register", noted)
    yield
    for reference in registered:
        if (function := reference()) is not None:
            atexit.unregister(function)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No failpoint stays armed after a test."""
    yield
    failpoints.disarm_all()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Where a run can be made; it does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_garbage() -> None:
    """What earlier tests dropped is gone: memory and descriptors of theirs would be found, or be
    given back while one looks."""
    # pytest keeps the traceback of the last test that failed, also if that was expected, and its
    # frames hold the test's objects.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()


@pytest.fixture
def no_keeper_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nor is there one of another test, which had still to end."""
    end_keepers(tmp_path_factory.getbasetemp())
    yield
    end_keepers(tmp_path_factory.getbasetemp())


@pytest.fixture
def tmpfs_folder() -> Iterator[Path]:
    """An empty folder in memory, on a file system that may refuse O_DIRECT."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip(f"no {SHARED_MEMORY} to write to")
    folder = Path(tempfile.mkdtemp(prefix=f"everstep-test-{RUN_ID}-", dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def make_training() -> Callable[[int], Training]:
    """Builds a small GPT with AdamW, schedule and loader, two steps into its training.

    The result is a function of the seed alone; all generators are seeded with it. The head
    shares the embedding's tensor, and dropout draws from torch's generator at each step.
    """

    def build(seed: int) -> Training:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model = GPTConfig(layers=1, width=32, heads=2, context=16)
        config = TrainingConfig(steps=50, batch=2, seed=seed, warmup_steps=4)
        training = training_of(model, config, text=bytes(range(32, 127)) * 16)
        training.step()
        training.step()
        return training

    return build
