"""Gradients of log records, dense or compressed, in the form that replay takes."""

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
    """Return all gradients of a record, by parameter name.

    Args:
        about: decoded fields of the update.
        tensors: tensors of the record, by name.

    Raises:
        FormatError: the compressed form is invalid.
        AttributeError, LookupError, TypeError, ValueError: fields are missing or of another type.
    """
    dense = [name.removeprefix(GRADIENT) for name in tensors if name.startswith(GRADIENT)]
    names = (*dense, *about.get("compressed", {}))
    return {name: gradient_of(name, about, tensors) for name in names}


def gradient_of(
    name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Gradient:
    """Return the gradient of one parameter; arguments and errors as for :func:`gradients_of`."""
    fields = about.get("compressed", {}).get(name)
    return tensors[GRADIENT + name] if fields is None else _compressed(name, fields, tensors)


def _compressed(
    name: str, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Gradient:
    """Return a compressed gradient: the form that training consumed, or a lossy copy of it."""
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
    # The form comes from a file: indices and counts must be checked before any kernel uses them.
    form.check()
    packed = Packed(form, shape)
    if form.numel != packed.numel():
        raise FormatError(f"the gradient of {name!r} has {form.numel} elements, not {list(shape)}")
    if stride is None:
        return packed
    # A gradient with strides of its own cannot stay packed: kernels round by memory layout.
    return with_strides(packed.dense(), stride)
