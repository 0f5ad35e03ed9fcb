"""Gradients of log records, dense or compressed, as replay takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from everstep.compress.lossy import restored_values
from everstep.compress.quantized import Int8
from everstep.compress.sparse import Sparse
from everstep.errors import FormatError
from everstep.replay.packed import Gradient, Packed
from everstep.run.tensors import with_strides
from everstep.state.layout.names import GRADIENT, INDICES, INT8, SCALES, VALUES

__all__ = ["gradient_of", "gradients_of"]


def gradients_of(
    about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Gradient]:
    """All gradients of a record, by name of the parameter.

    Args:
        about: what the record says of its update.
        tensors: of the record.

    Raises:
        FormatError: a form is none.
        AttributeError, LookupError, TypeError, ValueError: likewise.
    """
    dense = [name.removeprefix(GRADIENT) for name in tensors if name.startswith(GRADIENT)]
    names = (*dense, *about.get("compressed", {}))
    return {name: gradient_of(name, about, tensors) for name in names}


def gradient_of(
    name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Gradient:
    """One of them; arguments and errors as for :func:`gradients_of`."""
    fields = about.get("compressed", {}).get(name)
    return tensors[GRADIENT + name] if fields is None else _compressed(name, fields, tensors)


def _compressed(
    name: str, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Gradient:
    """A gradient that training consumed compressed, as it consumed it; or a lossy copy of one."""
    form: Sparse | Int8
    shape = tuple(fields["shape"])
    stride = fields["stride"]
    if "counts" in fields:
        numel = math.prod(shape)
        values = tensors[VALUES + name]
        if "lossy" in fields:
            values = restored_values(values, fields["dtype"], fields["exponent"])
        form = Sparse(numel, tensors[INDICES + name], values, fields["counts"])
    else:
        form = Int8(tensors[INT8 + name], tensors[SCALES + name], fields["dtype"])
    form.check()
    packed = Packed(form, shape)
    if form.numel != packed.numel():
        raise FormatError(f"the gradient of {name!r} has {form.numel} elements, not {list(shape)}")
    if stride is None:
        return packed
    return with_strides(packed.dense(), stride)
