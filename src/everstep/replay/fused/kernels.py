"""Triton kernels for SGD, Adam and AdamW: several updates with the state in registers.

A slice of the state is read once and written once, however many updates there are; only gradients
are read for each. Parameters and moments are float32, gradients float32 or narrower.

Each kernel does the operations of torch's operators in their order, in float32. Its bits depend on
the compiler: CUDA's contracts products and sums to fused multiply-adds, and a division may become a
multiplication by the reciprocal. So kernels come in several flavours, and ``self_test`` finds the
one, if any, that gives the bits of ``step()`` on the device. torch's fused kernels compute in
another order: no flavour is made for them, and a match is luck.

Import this only if triton is installed.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch.optim import SGD, Optimizer

from everstep.replay.functional import Tensors
from everstep.replay.fused.slices import Kernel

__all__ = ["flavours"]

_BLOCK = 1024  # elements of one program
_WIDTHS = {"adam": 8, "sgd": 5}  # numbers of one update


def flavours(kind: type[Optimizer], variant: str) -> list[Kernel]:
    """Return the kernels of an optimizer class, always the same objects, the likeliest one first.

    Args:
        kind: one of :data:`~everstep.replay.functional.KINDS`.
        variant: torch's implementation: ``"for-loop"``, ``"foreach"``, ``"fused"``.
    """
    return [_flavour(kind is SGD, variant == "for-loop", fuses) for fuses in (True, False)]


@functools.cache
def _flavour(is_sgd: bool, loops: bool, fuses: bool) -> Kernel:
    def run(parameters: torch.Tensor, moments: Tensors, gradients: Tensors, rows: Any) -> None:
        first = gradients[0]
        numel = parameters.numel()
        stride = 0
        if len(gradients) > 1:
            stride = (gradients[1].data_ptr() - first.data_ptr()) // first.element_size()
        assert rows.shape == (len(gradients), _WIDTHS["sgd" if is_sgd else "adam"])
        if not numel:
            return
        grid = (triton.cdiv(numel, _BLOCK),)
        # Fusion is explicit: the compiler's own choice may change between versions.
        constants: dict[str, Any] = {"FUSES": fuses, "BLOCK": _BLOCK, "enable_fp_fusion": False}
        with torch.cuda.device_of(parameters) if parameters.is_cuda else contextlib.nullcontext():
            if is_sgd:
                momentum = moments[0] if moments else parameters
                _sgd[grid](
                    parameters, momentum, first, rows, numel, stride, len(gradients),
                    MOMENTUM=bool(moments), **constants,
                )  # fmt: skip
            else:
                _adam[grid](
                    parameters, *moments, first, rows, numel, stride, len(gradients),
                    LOOPS=loops, **constants,
                )  # fmt: skip

    return run


@triton.jit
def _plus(a, b, c, FUSES: tl.constexpr):
    """Return ``a * b + c``, rounded once or twice."""
    return tl.fma(a, b, c) if FUSES else a * b + c


@triton.jit
def _adam(
    parameters, means, squares, gradients, rows, numel, stride, updates,
    LOOPS: tl.constexpr, FUSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    p = tl.load(parameters + at, mask=inside, other=0.0)
    m = tl.load(means + at, mask=inside, other=0.0)
    v = tl.load(squares + at, mask=inside, other=0.0)
    for update in range(updates):
        row = rows + update * 8  # see passes._adam_numbers
        decays = tl.load(row)
        decay = tl.load(row + 1)
        weight = tl.load(row + 2)
        beta2 = tl.load(row + 3)
        weight2 = tl.load(row + 4)
        root = tl.load(row + 5)
        eps = tl.load(row + 6)
        size = tl.load(row + 7)
        g = tl.load(gradients + update * stride + at, mask=inside, other=0.0)
        g = g.to(tl.float32)
        p = tl.where(decays == 1.0, p * decay, p)
        g = tl.where(decays == 2.0, _plus(p, decay, g, FUSES), g)
        away = g - m
        m = tl.where(
            tl.abs(weight) < 0.5,
            _plus(weight, away, m, FUSES),
            _plus(-away, 1.0 - weight, g, FUSES),
        )
        v = v * beta2
        if LOOPS:
            v = _plus(weight2 * g, g, v, FUSES)
            denominator = tl.sqrt_rn(v) * tl.div_rn(1.0, root) + eps
        else:
            v = _plus(weight2, g * g, v, FUSES)
            denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
        p = _plus(size, tl.div_rn(m, denominator), p, FUSES)
    tl.store(parameters + at, p, mask=inside)
    tl.store(means + at, m, mask=inside)
    tl.store(squares + at, v, mask=inside)


@triton.jit
def _sgd(
    parameters, buffers, gradients, rows, numel, stride, updates,
    MOMENTUM: tl.constexpr, FUSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    p = tl.load(parameters + at, mask=inside, other=0.0)
    b = tl.load(buffers + at, mask=inside, other=0.0)
    for update in range(updates):
        row = rows + update * 5  # see passes._sgd_numbers
        decay = tl.load(row)
        momentum = tl.load(row + 1)
        weight = tl.load(row + 2)
        nesterov = tl.load(row + 3)
        size = tl.load(row + 4)
        g = tl.load(gradients + update * stride + at, mask=inside, other=0.0)
        g = g.to(tl.float32)
        g = tl.where(decay != 0.0, _plus(p, decay, g, FUSES), g)
        if MOMENTUM:
            b = _plus(weight, g, b * momentum, FUSES)
            g = tl.where(nesterov != 0.0, _plus(momentum, b, g, FUSES), b)
        p = _plus(size, g, p, FUSES)
    tl.store(parameters + at, p, mask=inside)
    if MOMENTUM:
        tl.store(buffers + at, b, mask=inside)
