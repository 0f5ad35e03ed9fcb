"""Replay log records onto a restored state, in the training process.

Read in this order:

``redo``          ``Redo`` applies verified steps to live objects and finishes from the last step
mark
``updates``       record to ``Update``: gradients of all ranks, and the optimizer class that
replays it
``gradients``     gradients of one record, dense or compressed
``declared``      updates that a registered function computes
``marks``         comparison of the entries that consecutive step marks hold
``conditions``    comparison of the machine and versions with those of training
``owned``         entries that belong to optimizers, found from a base's object trees
``zero_objects``  optimizer state that ZeRO distributes over ranks, merged
"""
