"""Record of a program's training: used by ``programs/``, read by :mod:`tests.frameworks.kills`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

__all__ = ["final", "kill_if_due", "recovered", "step"]

_OUT = Path(os.environ["OUT"])
_RANK = os.environ.get("RANK", "0")
_KILL_AT = os.environ.get("KILL_AT", "")
_KILL_RANKS = os.environ.get("KILL_RANKS", "0").split(",")


def _write(entry: dict[str, Any]) -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    name = "record.jsonl" if _RANK == "0" else f"record-{_RANK}.jsonl"
    with (_OUT / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def recovered(recovery: Any) -> None:
    """Note the result of ``resume()``."""
    about = {"step": recovery.step, "exact": recovery.exact, "notes": list(recovery.notes)}
    _write({"recovery": about})


def step(number: int, saw: Any) -> None:
    """Note a finished step and the samples and loss that it saw."""
    _write({"step": number, "saw": saw})


def kill_if_due(number: float) -> None:
    """End this process by SIGKILL at the point that the test has chosen for its rank: after step
    ``number``, or amid the next one if a half is added."""
    if _KILL_AT and number == float(_KILL_AT) and _RANK in _KILL_RANKS:
        os.kill(os.getpid(), signal.SIGKILL)


def final(**parts: Any) -> None:
    """Note a digest of each part of the final state, by its bits."""
    _write({"final": {name: _digest(part) for name, part in parts.items()}})


def _digest(part: Any) -> str:
    digest = hashlib.sha256()
    _feed(digest, part)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if hasattr(value, "to_local"):  # a DTensor
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())
