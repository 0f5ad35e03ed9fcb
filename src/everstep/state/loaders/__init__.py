"""Positions of data loaders that save their own, and the random generators of their workers.

``positions``  completes the positions of torchdata's StatefulDataLoader, in the training process;
               saves the generators of worker processes, there
"""
