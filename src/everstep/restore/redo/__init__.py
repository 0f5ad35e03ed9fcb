"""Replay log records onto a state that was restored from a base.

Runs in the training process during ``resume()``; ``driver`` and what it needs also run offline and
in the keeper's replica. Read in this order:

``driver``      ``ReplayDriver``: queue the updates of verified steps, apply several steps at once,
                compare with the samples in marks, finish from the last mark
``live``        ``LiveMemory``: the live objects that it applies them to
``updates``     record to ``Update``: gradients of all ranks, dense or compressed, and the optimizer
                class; updates that a registered function computes
``conditions``  comparison of the machine and versions with those of training
``owned``       entries that belong to optimizers, found from a base's object trees; optimizer state
                that ZeRO distributes over ranks, merged
"""
