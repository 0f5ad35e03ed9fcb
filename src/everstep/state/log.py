"""What the entries and objects of a log record are called."""

from __future__ import annotations

__all__ = ["GRADIENT", "HYPER", "UPDATE_OBJECT"]

GRADIENT = "gradient/"
"""Entries of an update under this prefix are gradients, by name of the parameter."""

HYPER = "hyper"
"""Entries of an update under this prefix are hyperparameters that are tensors."""

UPDATE_OBJECT = "update"
"""The object of an update: optimizer, hyperparameters."""
