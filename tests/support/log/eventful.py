"""A run with events: trained, killed in a made-up way, resumed, closed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep.events import Event, EventLog
from everstep.seams import PosixFileSystem

BEGIN_S = 1_700_000_000.0


def train(run: Path, steps: int = 20, **options: Any) -> None:
    """Trains a small model with a log on disk; its events are those of a real run."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    log = everstep.LogOptions(to="disk", lag_steps=0)
    chosen: dict[str, Any] = {"method": "logged", "every": 5, "log": log, **options}
    with everstep.Checkpointer(run, state, **chosen) as ckpt:
        recovery = ckpt.resume()
        for _ in range(recovery.step, steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()


def events_of_two_lives() -> list[Event]:
    """Events of a run of 0.5 s a step: bases every 10 steps, killed after step 57, resumed at step
    55 from disk, ended at step 100."""
    found = [_event("started", -1.0, 0, 0, method="logged", every="every 10 steps", world=1)]
    found += _life(1, 0, 57, 0.0, source="fresh")
    found.append(_event("started", 40.0, 0, 0, method="logged", every="every 10 steps", world=1))
    found += _life(2, 55, 100, 41.0, source="disk")
    found.append(_event("failure", 60.0, 2, 93, error="StorageError", message="<b>disk</b>"))
    found.append(_event("closed", 64.0, 2, 100))
    return found


def failing_often() -> list[Event]:
    """Events of three starts of 50 s, in which bases stalled training for 2 s each."""
    found = []
    for number in range(3):
        at_s = BEGIN_S + 100.0 * number
        step = 400 * number
        about = {"method": "lazy", "state_bytes": 12_000, "gradient_bytes": 4_000}
        source = {"source": "memory" if number else "fresh", "load_s": 0.1}
        figures = {"step_s": 0.1, "base_cost_s": 2.0}
        found += [
            Event("started", at_s, 0, 0, 0, about),
            Event("recovery", at_s, 0, 1, step, source),
            Event("log_checked", at_s + 1.0, 0, 1, step, {"why_not": ""}),
            Event("base_captured", at_s + 1.0, 0, 1, step, {"seconds": 0.01}),
            Event("progress", at_s + 50.0, 0, 1, step + 400, figures),
        ]
    return found


def write_events(run: Path, events: list[Event], *, rank: int = 0) -> None:
    """Writes the event log of a rank."""
    log = EventLog(PosixFileSystem(), run, rank)
    for event in events:
        log(replace(event, rank=rank))
    log.close()


def _life(timeline: int, begin: int, end: int, at_s: float, source: str) -> list[Event]:
    about = {"exact": True, "evidence": "xxh3-128", "base_step": begin // 10 * 10, "replayed": 5}
    seconds = {"seconds": 0.5, "load_s": 0.25, "replay_s": 0.25, "size_bytes": 1000}
    found = [_event("recovery", at_s, timeline, begin, source=source, **about, **seconds)]
    for step in range(begin + 1, end + 1):
        now_s = at_s + (step - begin) / 2
        if step % 10 == 0:
            found.append(_event("base_begun", now_s, timeline, step))
            found.append(_event("base_captured", now_s, timeline, step, seconds=0.1))
            durable = {"tier": "disk", "seconds": 0.3, "size_bytes": 4096}
            found.append(_event("base_durable", now_s, timeline, step, **durable))
        if step % 4 == 0 or step == end:
            figures = {
                "step_s": 0.5,
                "durable_step": step - 2,
                "recoverable_step": step,
                "recoverable_from": {"s3://bucket/run": step // 10 * 10},
                "stall_s": {"gate": 0.01 * (step - begin), "capture": 0.0},
                "saves": (step - begin) // 10,
                "written_bytes": 100 * (step - begin),
                "log_written_bytes": 0,
                "forecast_bytes_per_day": 17_280_000.0,
            }
            found.append(_event("progress", now_s, timeline, step, **figures))
    return found


def _event(kind: str, at_s: float, timeline: int, step: int, **details: Any) -> Event:
    return Event(kind, BEGIN_S + at_s, 0, timeline, step, details)
