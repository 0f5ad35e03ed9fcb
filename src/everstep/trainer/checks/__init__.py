"""Checks on the training loop: optimizers and schedulers that are in no part of the state."""
