"""What the entries and objects of a log record are called."""

from __future__ import annotations

__all__ = [
    "GRADIENT",
    "HYPER",
    "INDICES",
    "INT8",
    "OBJECT_BYTES_MAX",
    "OBJECT_PREFIX",
    "PART_OBJECT",
    "RESERVED",
    "RNG_SECTION",
    "SAMPLE",
    "SCALES",
    "SPOT",
    "UPDATE_OBJECT",
    "VALUES",
    "is_reserved",
]

RESERVED = "everstep"


OBJECT_PREFIX = f"{RESERVED}/objects/"
"""Entries under this prefix hold a section's objects, encoded (see :mod:`.objects`)."""


OBJECT_BYTES_MAX = 1 << 30
"""A section's objects, encoded; what is larger belongs into tensors."""


def is_reserved(name: str) -> bool:
    """Whether the entry is everstep's own, like the states of random generators."""
    return name.startswith(f"{RESERVED}/")


GRADIENT = "gradient/"
"""Entries of an update under this prefix are gradients, by name of the parameter."""

INDICES = "indices/"
VALUES = "values/"
"""Of a gradient that training consumed in a sparse form (:mod:`everstep.compress.sparse`)."""

INT8 = "int8/"
SCALES = "scales/"
"""Of a gradient that training consumed in eight bits (:mod:`everstep.compress.quantized`)."""

HYPER = "hyper"
"""Entries of an update under this prefix are hyperparameters that are tensors."""

SAMPLE = "everstep/sample/"
"""Entries of a mark under this prefix are a few elements of what a declared update covers: its
pattern, their width in bytes, their device."""

SPOT = f"{SAMPLE}everstep/"
"""Entries of a mark under this prefix are a few elements of what optimizers replay: their dtype
(:mod:`everstep.capture.spots`)."""

UPDATE_OBJECT = "update"
"""The object of an update: optimizer, hyperparameters."""

PART_OBJECT = "part"
"""The same of one rank's part of an update, whose other gradients are in other ranks' logs; of
another name, so that nobody who does not know of parts takes one for the whole."""


RNG_SECTION = f"{RESERVED}/rng"
