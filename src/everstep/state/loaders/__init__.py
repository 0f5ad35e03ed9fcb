"""Positions of data loaders that save their own, and the random generators of their workers.

The room runs in the training process, except for ``workers``, which runs in a loader's worker
processes.

``positions``  completes the positions of torchdata's StatefulDataLoader
``workers``    saves the random generators of worker processes
"""
