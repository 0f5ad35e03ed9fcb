"""Sinks: listeners that pass events on to monitoring systems.

Each is given to a Checkpointer as ``on_event=``, and reads the fields of :func:`scalars`. Their
libraries are imported when a sink is created.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from everstep.errors import OptionError, UnavailableError
from everstep.events.event import Event

_COUNTED = ("base_durable", "base_failed", "recovery", "failure", "notice")
_PREFIX = "everstep"


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by name: ``stall_s`` becomes ``stall_s/capture`` and so on.

    Only of events with figures over time: ``progress``, ``recovery``, and durable bases.
    """
    if event.kind == "progress":
        return _numbers("", event.details)
    if event.kind in ("recovery", "base_durable"):
        return _numbers(f"{event.kind}/", event.details)
    return {}


def _numbers(prefix: str, fields: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, (int, float)):
            found[prefix + name] = float(value)
    return found


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"this sink needs {package}, which cannot be imported: {error}",
            hint=f"pip install {package}",
        ) from error


class Prometheus:
    """Metrics for Prometheus, on a port of this process or in a file for node_exporter.

    Gauges ``everstep_<field>`` of the last progress (labels ``rank``, and ``cause`` or ``place``
    where a field has several values), and counters ``everstep_events_total`` by kind.

    Args:
        port: port of an HTTP endpoint of its own; None: no endpoint. With several ranks on a node
            each needs its own, for example ``9400 + local_rank``.
        textfile: file that is replaced with each progress, for node_exporter's textfile collector;
            its name must end in ``.prom``.
        address: address that the endpoint listens at.
        registry: registry of ``prometheus_client`` to add the metrics to; None: a new one.

    Attributes:
        port: port of the endpoint; None without one. With ``port=0`` the system chooses it.

    Raises:
        OptionError: there is nowhere to put the metrics.
        UnavailableError: ``prometheus-client`` is not installed.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        textfile: str | os.PathLike[str] | None = None,
        address: str = "127.0.0.1",
        registry: Any = None,
    ) -> None:
        if port is None and textfile is None and registry is None:
            raise OptionError(
                "Prometheus() has nowhere to put its metrics",
                hint='Prometheus(port=9400) or Prometheus(textfile="/var/lib/node/everstep.prom")',
            )
        self._library = _imported("prometheus_client", "prometheus-client")
        self._registry = self._library.CollectorRegistry() if registry is None else registry
        self._textfile = None if textfile is None else os.fspath(textfile)
        self._gauges: dict[str, Any] = {}
        # By rank: names and labels of the last progress.
        self._labelled: dict[int, set[tuple[str, tuple[Any, ...]]]] = {}
        self._events = self._library.Counter(
            f"{_PREFIX}_events", "Events by kind", ["rank", "kind"], registry=self._registry
        )
        self._server: Any = None
        self.port: int | None = None
        if port is not None:
            started = self._library.start_http_server(port, address, registry=self._registry)
            self._server = started[0]
            self.port = self._server.server_port

    def __call__(self, event: Event) -> None:
        """Update the metrics."""
        self._events.labels(event.rank, event.kind).inc()
        if event.kind != "progress":
            return
        labelled = {
            (name, label)
            for name, value in {"step": event.step, **event.details}.items()
            for label in self._set_all(name, value, event.rank)
        }
        # A value that is not known any more must not stay as it was.
        for name, labels in self._labelled.get(event.rank, set()) - labelled:
            self._gauges[name].remove(*labels)
        self._labelled[event.rank] = labelled
        if self._textfile is not None:
            self._library.write_to_textfile(self._textfile, self._registry)

    def _set_all(self, name: str, value: Any, rank: int) -> Iterator[tuple[Any, ...]]:
        """Set the gauges of a field; yield their labels."""
        by_key = isinstance(value, Mapping)
        values = value if isinstance(value, Mapping) else {None: value}
        names = ["rank", "cause" if name == "stall_s" else "place"] if by_key else ["rank"]
        for key, one in values.items():
            if not isinstance(one, (int, float)):
                continue
            if name not in self._gauges:
                self._gauges[name] = self._library.Gauge(
                    f"{_PREFIX}_{name}", f"{name} of everstep", names, registry=self._registry
                )
            labels = (rank, key) if by_key else (rank,)
            self._gauges[name].labels(*labels).set(one)
            yield labels

    def close(self) -> None:
        """End the HTTP endpoint."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server = None


class OpenTelemetry:
    """Gauges ``everstep.<field>`` and a counter ``everstep.events`` of OpenTelemetry.

    Args:
        meter: a ``Meter``; None: that of the global meter provider.

    Raises:
        UnavailableError: ``opentelemetry-api`` is not installed.
    """

    def __init__(self, meter: Any = None) -> None:
        if meter is None:
            meter = _imported("opentelemetry.metrics", "opentelemetry-api").get_meter(_PREFIX)
        self._meter = meter
        self._gauges: dict[str, Any] = {}
        self._events = meter.create_counter(f"{_PREFIX}.events", description="Events by kind")

    def __call__(self, event: Event) -> None:
        """Record the numbers of an event."""
        self._events.add(1, {"kind": event.kind, "rank": event.rank})
        for name, value in scalars(event).items():
            dotted = f"{_PREFIX}.{name.replace('/', '.')}"
            if dotted not in self._gauges:
                self._gauges[dotted] = self._meter.create_gauge(dotted)
            self._gauges[dotted].set(value, {"rank": event.rank})


class TensorBoard:
    """Scalars ``everstep/<field>`` over steps.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        """Write the numbers of an event."""
        for name, value in scalars(event).items():
            self._writer.add_scalar(
                f"{_PREFIX}/{name}", value, global_step=event.step, walltime=event.unix_s
            )


class WandB:
    """Metrics ``everstep/<field>`` of a run of Weights & Biases, over ``everstep/step``.

    They have a step of their own, so that they do not advance the step of the program's metrics.

    Args:
        run: the run, as ``wandb.init()`` returns it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(f"{_PREFIX}/*", step_metric=f"{_PREFIX}/step")

    def __call__(self, event: Event) -> None:
        """Log the numbers of an event."""
        found = {f"{_PREFIX}/{name}": value for name, value in scalars(event).items()}
        if found:
            self._run.log({**found, f"{_PREFIX}/step": event.step})


class MLflow:
    """Metrics ``everstep/<field>`` of a run of MLflow.

    Args:
        run_id: the run; None: the active one when the sink is created.
        client: an ``MlflowClient``; None: a new one.

    Raises:
        OptionError: there is no active run.
        UnavailableError: ``mlflow`` is not installed.
    """

    def __init__(self, run_id: str | None = None, *, client: Any = None) -> None:
        if client is None or run_id is None:
            mlflow = _imported("mlflow", "mlflow")
            client = mlflow.MlflowClient() if client is None else client
            active = mlflow.active_run() if run_id is None else None
            run_id = run_id if active is None else active.info.run_id
        if run_id is None:
            raise OptionError("there is no active run of MLflow", hint="give MLflow(run_id=...)")
        self._run_id = run_id
        self._client = client

    def __call__(self, event: Event) -> None:
        """Log the numbers of an event."""
        for name, value in scalars(event).items():
            self._client.log_metric(
                self._run_id,
                f"{_PREFIX}/{name}",
                value,
                timestamp=round(event.unix_s * 1000),
                step=event.step,
            )
