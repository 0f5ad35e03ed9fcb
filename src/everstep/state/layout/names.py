"""Reserved names of entries and objects, in bases and in log records."""

from __future__ import annotations

RESERVED = "everstep"
"""First part of the names of everstep's own entries."""


OBJECT_PREFIX = f"{RESERVED}/objects/"
"""Prefix of the entries that hold a section's objects, encoded
(:mod:`everstep.state.values.objects`)."""


OBJECT_BYTES_MAX = 1 << 30
"""Maximum size of a section's encoded objects; larger data belongs in tensors."""


def is_reserved(name: str) -> bool:
    """Return True if the entry is everstep's own, e.g. the state of a random generator."""
    return name.startswith(f"{RESERVED}/")


GRADIENT = "gradient/"
"""Prefix of the gradients in an update record; the parameter's name follows."""

INDICES = "indices/"
VALUES = "values/"
"""Prefixes of a gradient that training consumed in sparse form (:mod:`everstep.compress.sparse`).
"""

INT8 = "int8/"
SCALES = "scales/"
"""Prefixes of a gradient that training consumed in eight bits (:mod:`everstep.compress.quantized`).
"""

HYPER = "hyper"
"""Prefix of hyperparameters that are tensors, in an update record."""

SAMPLE = "everstep/sample/"
"""Prefix of sampled elements of a declared update in a step mark; its pattern, the element width in
bytes and the device follow."""

SPOT = f"{SAMPLE}everstep/"
"""Prefix of sampled elements of the tensors that optimizers replay, in a step mark; their dtype
follows (:mod:`everstep.capture.mark_samples`)."""

UPDATE_OBJECT = "update"
"""Object of an update record: optimizer and hyperparameters."""

PART_OBJECT = "part"
"""Object of an update record that holds only some of the update's gradients; the others are in the
logs of other ranks. The name differs from :data:`UPDATE_OBJECT`, so that a reader without support
for shared logs does not take the record for a complete update."""


RNG_SECTION = f"{RESERVED}/rng"
