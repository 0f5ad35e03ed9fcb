"""Kinds of compression by name, as users and the gradient log choose them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import torch

from everstep.compress.floats import kept_count
from everstep.compress.quantized import Int8, int8
from everstep.compress.sparse import Sparse, sampled_threshold, topk
from everstep.config.given import nearest
from everstep.errors import OptionError

Form: TypeAlias = Sparse | Int8
"""A compressed flat tensor."""

KINDS: Final = ("topk", "threshold", "int8", "adaptive")

INT8_BELOW: Final = 100_000
"""Elements below which :func:`adaptive` quantizes (TierCheck section 3.2 and its defaults)."""


def adaptive(flat: torch.Tensor, ratio: float = 0.01, *, int8_below: int = INT8_BELOW) -> Form:
    """int8 for small tensors, sampled-threshold sparse for large ones (TierCheck section 3.2).

    TierCheck's log has float16 values: ``adaptive(flat).to(torch.float16)``, which is lossy.

    Args:
        flat: contiguous, of a dtype in ``FORMATS``, with at least one element.
        ratio: the share that is kept of a large tensor, in (0, 1].
        int8_below: tensors with fewer elements are small.

    Raises:
        OptionError: for what cannot be compressed.
    """
    return int8(flat) if flat.numel() < int8_below else sampled_threshold(flat, ratio)


def compression(kind: str, ratio: float) -> Callable[[torch.Tensor], Form]:
    """The function that compresses a flat tensor.

    Args:
        kind: one of ``KINDS``.
        ratio: the share of elements that sparse forms keep, in (0, 1].

    Raises:
        OptionError: for an unknown kind or a ratio that cannot work.
    """
    # Called for its check: a wrong ratio is refused here and not in the first step.
    kept_count(1, ratio)
    kinds: dict[str, Callable[[torch.Tensor], Form]] = {
        "topk": partial(topk, ratio=ratio),
        "threshold": partial(sampled_threshold, ratio=ratio),
        "int8": int8,
        "adaptive": partial(adaptive, ratio=ratio),
    }
    if kind not in kinds:
        guess = nearest(kind, KINDS)
        raise OptionError(
            f"no compression {kind!r}; there are: {', '.join(KINDS)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return kinds[kind]
