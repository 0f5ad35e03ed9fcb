"""Gradients in fewer bytes: for the log, and for training itself.

``floats``     numbers as integers that sort by magnitude
``scan``       finding the largest elements: numpy, plain torch; ``kernels``: Triton
``sparse``     ``Sparse``: exact top-k, sampled threshold, all that is not zero
``quantized``  ``Int8``: eight bits and a scale for each block
``forms``      the kinds by name; the adaptive choice by size
``lossy``      copies of gradients that training does not consume
``feedback``   error feedback: what was left out comes back in the next step
``training``   ``Compressor``: an optimizer consumes the gradients that are logged
``ddp``        ``DDPCompression``: ranks exchange compressed gradients

A log of compressed gradients restores a training exactly if the training consumed just these
(LowDiff): ``training`` and ``ddp`` see to that. Compressing only what is logged
(TierCheck; ``lossy``) restores an approximation.
"""

from __future__ import annotations

from everstep.compress.compressor import Compressor

__all__ = ["Compressor"]
