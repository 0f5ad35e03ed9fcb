"""Redo: an optimizer's own update, over the gradients that a log kept.

``updates``    what one ``step()`` call consumed: the redo record as tensors
``exactness``  which optimizers can be replayed, and where the result is bit-for-bit training's
``engine``     ``Replayer``: applies updates of one optimizer to named tensors, in place
``checks``     what is refused: order, names, shapes
``own``        the optimizer's own ``step()``, on whole tensors and without hooks
``blocked``    SGD, Adam and AdamW on the CPU: several updates at once, a block at a time
``forms``, ``cuts``   torch's functional forms that it calls; where tensors are cut
``passes``     instead of them, for-loop and foreach: the same operators, away from Python's lock
``slices``, ``alike``  likewise on a CUDA device: tensors end to end, cut into slices
``uploads``    gradients on their way there, one slice ahead
``kernels``    Triton: a slice in registers for all updates
``proof``, ``trial``   the self-tests without which none of these is used

State at LSN v = base + the records up to v (LowDiff, Algorithm 1, lines 13-19; the paper's
own loop applies merged gradients, which is wrong for every optimizer with moments). Nothing here
knows checkpoints: a recovery, a replica beside the trainer and offline tools all use it.
"""
