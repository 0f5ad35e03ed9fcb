"""Events of a run: who listens, the event log in the run folder, and sinks for monitoring.

The training process emits events; each listener gets them in a thread of its own. Read in this
order:

``event``   one event; the kinds of events
``stream``  delivers events to listeners, without delaying training
``log``     the event log in the run folder: JSON lines
``sinks``   listeners for Prometheus, OpenTelemetry, TensorBoard, Weights & Biases and MLflow
"""

from everstep.events.event import KINDS, Event
from everstep.events.log import EventLog, read_events
from everstep.events.sinks import MLflow, OpenTelemetry, Prometheus, TensorBoard, WandB
from everstep.events.stream import EventStream

__all__ = [
    "KINDS",
    "Event",
    "EventLog",
    "EventStream",
    "MLflow",
    "OpenTelemetry",
    "Prometheus",
    "TensorBoard",
    "WandB",
    "read_events",
]
