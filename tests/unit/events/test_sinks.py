"""Sinks pass the numbers of events on, by names that stay."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from everstep.errors import OptionError, UnavailableError
from everstep.events import Event, MLflow, OpenTelemetry, Prometheus, TensorBoard, WandB, sinks
from everstep.trainer.session.run_events import FIGURES

ROOT = Path(__file__).parents[3]

PROGRESS = Event(
    "progress",
    1000.0,
    2,
    1,
    40,
    {
        "durable_step": 30,
        "step_s": 0.5,
        "mtbf_s": None,
        "stall_s": {"capture": 0.25, "gate": 0.0},
        "recoverable_from": {"peer": 38},
    },
)
BASE = Event("base_durable", 1001.0, 2, 1, 40, {"tier": "disk", "seconds": 1.5, "size_bytes": 8})
NUMBERS = {
    "durable_step": 30.0,
    "step_s": 0.5,
    "stall_s/capture": 0.25,
    "stall_s/gate": 0.0,
    "recoverable_from/peer": 38.0,
}


def test_numbers_of_events() -> None:
    assert sinks.scalars(PROGRESS) == NUMBERS
    assert sinks.scalars(BASE) == {"base_durable/seconds": 1.5, "base_durable/size_bytes": 8.0}
    assert sinks.scalars(Event("notice", 1.0, 0, 1, 1, {"message": "x", "n": 1})) == {}


def test_prometheus_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "everstep.prom"
    sink = Prometheus(textfile=path)
    sink(BASE)
    assert not path.exists()
    sink(PROGRESS)
    lines = path.read_text().splitlines()
    assert 'everstep_step{rank="2"} 40.0' in lines
    assert 'everstep_durable_step{rank="2"} 30.0' in lines
    assert 'everstep_stall_s{cause="capture",rank="2"} 0.25' in lines
    assert 'everstep_recoverable_from{place="peer",rank="2"} 38.0' in lines
    assert 'everstep_events_total{kind="base_durable",rank="2"} 1.0' in lines
    assert not any("mtbf" in line for line in lines)
    unknown = {"durable_step": None, "recoverable_from": {}, "stall_s": {"gate": 1.0}}
    later = Event("progress", 1002.0, 2, 1, 41, unknown)
    sink(later)
    text = path.read_text()
    assert "everstep_durable_step{" not in text
    assert 'place="peer"' not in text
    assert 'everstep_stall_s{cause="gate",rank="2"} 1.0' in text


def test_prometheus_over_http_until_it_is_closed() -> None:
    registry = prometheus_client.CollectorRegistry()
    sink = Prometheus(0, registry=registry)
    sink(PROGRESS)
    port = sink.port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        assert b'everstep_step{rank="2"} 40.0' in page.read()
    sink.close()
    sink.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


def test_prometheus_needs_a_place() -> None:
    with pytest.raises(OptionError, match="nowhere to put its metrics"):
        Prometheus()


def test_opentelemetry() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    sink = OpenTelemetry(provider.get_meter("test"))
    sink(PROGRESS)
    sink(BASE)
    data: Any = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    values = {
        one.name: {tuple(point.attributes.items()): point.value for point in one.data.data_points}
        for one in metrics
    }
    assert values["everstep.stall_s.capture"] == {(("rank", 2),): 0.25}
    assert values["everstep.events"] == {
        (("kind", "progress"), ("rank", 2)): 1,
        (("kind", "base_durable"), ("rank", 2)): 1,
    }
    provider.shutdown()


class Recorder:
    """Takes calls of any method, and keeps their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.calls.append((name, args, named))


def test_tensorboard() -> None:
    writer = Recorder()
    TensorBoard(writer)(BASE)
    about = {"global_step": 40, "walltime": 1001.0}
    assert writer.calls == [
        ("add_scalar", ("everstep/base_durable/seconds", 1.5), about),
        ("add_scalar", ("everstep/base_durable/size_bytes", 8.0), about),
    ]


def test_weights_and_biases_have_a_step_of_their_own() -> None:
    run = Recorder()
    sink = WandB(run)
    sink(Event("notice", 1.0, 0, 1, 1))
    sink(BASE)
    assert run.calls == [
        ("define_metric", ("everstep/*",), {"step_metric": "everstep/step"}),
        (
            "log",
            (
                {
                    "everstep/base_durable/seconds": 1.5,
                    "everstep/base_durable/size_bytes": 8.0,
                    "everstep/step": 40,
                },
            ),
            {},
        ),
    ]


def test_mlflow() -> None:
    client = Recorder()
    MLflow("run-1", client=client)(BASE)
    about = {"timestamp": 1_001_000, "step": 40}
    assert client.calls == [
        ("log_metric", ("run-1", "everstep/base_durable/seconds", 1.5), about),
        ("log_metric", ("run-1", "everstep/base_durable/size_bytes", 8.0), about),
    ]


def test_mlflow_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = SimpleNamespace(MlflowClient=Recorder, active_run=lambda: None)
    monkeypatch.setattr(sinks, "_imported", lambda module, package: mlflow)
    with pytest.raises(OptionError, match="no active run"):
        MLflow()
    active = SimpleNamespace(info=SimpleNamespace(run_id="run-2"))
    monkeypatch.setattr(mlflow, "active_run", lambda: active)
    MLflow()(BASE)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Any:
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(sinks, "import_module", missing)
    with pytest.raises(UnavailableError, match="needs prometheus-client"):
        Prometheus(textfile="x.prom")
    with pytest.raises(UnavailableError, match="needs opentelemetry-api"):
        OpenTelemetry()


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    asked = {
        name.removeprefix("everstep_")
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"everstep_\w+", target["expr"])
    }
    assert asked - {"step", "events_total"} <= set(FIGURES)
    assert len(asked) >= 8
