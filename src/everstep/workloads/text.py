"""Real text without a download, and a loader whose order can be resumed at any batch.

The text is the Python standard library's own source: some 15 to 30 MB on every machine
that runs Python. Every file is read in the same order, so that two processes of one
installation see the same bytes.

Shapes: ``B`` windows in a batch, ``T`` bytes of context.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from everstep.errors import MismatchError, OptionError, UnavailableError

_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)


def stdlib_text(size_bytes: int, *, folder: Path | None = None) -> bytes:
    """The first ``size_bytes`` bytes of the standard library's ``.py`` files.

    Files follow each other by path; other people's packages and tests are left out.

    Args:
        size_bytes: how much to read at most.
        folder: the library to read (default: the running interpreter's).

    Raises:
        OptionError: when ``size_bytes`` is less than 1.
        UnavailableError: when this installation has no ``.py`` files (some embed a zip).
    """
    if size_bytes < 1:
        raise OptionError(f"size_bytes must be at least 1, not {size_bytes}")
    root = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= size_bytes:
            break
    if not text:
        raise UnavailableError(
            "the standard library's source files are not installed",
            path=root,
            hint="use a Python whose library is a folder of .py files",
        )
    return bytes(text[:size_bytes])


def _sources(root: Path) -> Iterator[Path]:
    """Regular ``.py`` files under ``root``, in the order of a sorted depth-first walk."""
    for folder, folders, files in os.walk(root):
        # In place, as os.walk() requires; sorted, because file systems list names in any order.
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(files):
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and not path.is_symlink():
                yield path


class WindowLoader:
    """Batches of windows over a text, in an order that is a pure function of the state.

    Window ``w`` is bytes ``[w T, w T + T]``, both ends included: T inputs, and the same
    shifted by one as targets. Each epoch visits every window at most once, in a
    permutation drawn from ``(seed, epoch)`` alone; windows that do not fill a batch are
    left out of that epoch. No global generator is touched.

    Args:
        text: the bytes to read windows from.
        context: ``T``.
        batch: ``B``.
        seed: of the permutations, >= 0.

    Raises:
        OptionError: when the text does not fill one batch.
    """

    def __init__(self, text: bytes, *, context: int, batch: int, seed: int) -> None:
        if min(context, batch) < 1 or seed < 0:
            raise OptionError(f"no loader with context {context}, batch {batch}, seed {seed}")
        self._text = np.frombuffer(text, dtype=np.uint8)
        self._windows = max(0, (len(text) - 1) // context)
        if self._windows < batch:
            raise OptionError(
                f"a text of {len(text)} bytes has {self._windows} windows of {context} bytes, "
                f"less than one batch of {batch}"
            )
        self._identity: dict[str, Any] = {
            "text_bytes": len(text),
            "text_digest": xxhash.xxh3_128_hexdigest(text),
            "context": context,
            "batch": batch,
            "seed": seed,
        }
        self._context = context
        self._batch = batch
        self._seed = seed
        self._reach = np.arange(context + 1)
        self._go_to(epoch=0, position=0)

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return self._windows // self._batch

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next ``(inputs, targets)``, each ``(B, T)`` int64; begins a new epoch as needed."""
        if self._position == self.batches:
            self._go_to(epoch=self._epoch + 1, position=0)
        first = self._position * self._batch
        self._position += 1
        starts = self._order[first : first + self._batch] * self._context
        windows = torch.from_numpy(self._text[starts[:, None] + self._reach].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the next batch is number ``position`` of ``epoch``."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises:
            MismatchError: for the state of a loader over another text, or with other sizes.
        """
        mismatches = tuple(
            (name, f"saved {state.get(name)!r}, live {value!r}")
            for name, value in self._identity.items()
            if state.get(name) != value
        )
        if mismatches:
            listed = "\n".join(f"  {name}: {what}" for name, what in mismatches)
            raise MismatchError(f"another loader's state:\n{listed}", mismatches=mismatches)
        self._go_to(epoch=state["epoch"], position=state["position"])

    def _go_to(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = np.random.default_rng([self._seed, epoch]).permutation(self._windows)
