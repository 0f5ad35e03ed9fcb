"""Smaller gradients: for the gradient log, and for training itself. Runs in the training process.

A log of compressed gradients restores a training run exactly if training consumed the same
compressed gradients (LowDiff); ``compressor`` and ``ddp`` ensure that. Compressing only the copies
in the log (TierCheck; ``lossy``) restores an approximation.

Read in this order:

``floats``      numbers as integers that sort by magnitude
``sparse``      ``Sparse``: exact top-k, sampled threshold; search for the largest elements in numpy
                or plain torch; ``kernels``: in Triton
``quantized``   ``Int8``: eight bits per element and a scale per block
``lossy``       copies of gradients that training does not consume
``feedback``    error feedback: the compression error is added to the next gradient; the kinds by
                name; the adaptive choice by size
``compressor``  ``Compressor``: the optimizer consumes the logged gradients
``ddp``         ``DDPCompression``: ranks exchange compressed gradients
"""

from __future__ import annotations

from everstep.compress.compressor import Compressor

__all__ = ["Compressor"]
