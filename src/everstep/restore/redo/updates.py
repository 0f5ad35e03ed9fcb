"""Decode log records into updates, and choose the optimizer class that replays them.

With several ranks each gradient is recorded once, by one of the ranks that consumed it
(``docs/design/ranks.md``): an update is assembled from the shares of all of them.

Replay of declared updates: run registered functions where they ran in training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.capture.spot_check import Probe
from everstep.compress.lossy import restored_values
from everstep.compress.quantized import Int8
from everstep.compress.sparse import Sparse
from everstep.errors import FormatError, MismatchError, ReplayError
from everstep.format.log import LogRecord, RecordHead
from everstep.replay import Exactness, Gradient, Update, kind_name, replay_kind
from everstep.replay.updates import Packed
from everstep.run.tensors import copy_into, tensor_of, with_strides
from everstep.state.layout import GRADIENT, SAMPLE, Placed
from everstep.state.layout.entries import (
    HYPER,
    INDICES,
    INT8,
    PART_OBJECT,
    SCALES,
    SPOT,
    UPDATE_OBJECT,
    VALUES,
)
from everstep.state.ranks import names_digest
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tensors import torch_dtype
from everstep.state.values.tree import join

_DEFAULT_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # accepted by torch.set_default_dtype


def update_from_record(record: LogRecord, *, own: bool = False) -> Update:
    """Decode an update, assembled from the shares of all ranks where it was recorded in shares.

    Args:
        record: the record of one rank, with the records of the others in ``parts``.
        own: leave out the gradients that other ranks recorded.

    Raises:
        FormatError: the record is no update, or a share is missing.
    """
    try:
        in_shares = PART_OBJECT in record.objects
        about: Any = decode(record.objects[PART_OBJECT if in_shares else UPDATE_OBJECT])
        tensors = {place.entry.name: tensor_of(record, place) for place in record.layout.placed}
        hyper: dict[str, Any] = {
            name: t for name, t in tensors.items() if name.startswith(HYPER + "/")
        }
        gradients = gradients_of(about, tensors)
        lossy = bool(about.get("lossy", False))
        # Where each rank updates its own parameters only, its record is complete; otherwise the
        # gradients that other ranks recorded are needed (docs/design/ranks.md).
        own = own or (bool(about.get("spread", False)) and not record.parts)
        if in_shares and not own:
            others, are_lossy = _gradients_from_other_ranks(record, about)
            gradients |= others
            lossy = lossy or are_lossy
        return Update(
            lsn=record.head.lsn,
            optimizer=str(about["optimizer"]),
            groups=tuple(_mapping(join(group, hyper)) for group in about["groups"]),
            gradients=gradients,
            grad_scale=tensors.get("grad_scale"),
            found_inf=tensors.get("found_inf"),
            lossy=lossy,
            kind=str(about.get("kind") or ""),
            default_dtype=_default_dtype(about.get("default_dtype")),
        )
    # The fields were decoded from a file: any of them may be missing or of another type.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{record.head} is not a valid update: {error!r}") from error


def replay_class(update: Update, mine: type[Optimizer]) -> tuple[type[Optimizer] | None, str]:
    """Return the optimizer class for replay and, if it may differ from training's, why replay may
    be inexact ("" if it cannot).

    The class is None if this program does not have the class of training. One of torch's classes
    never stands for another class; a user's class may have been renamed or moved to another module.

    Args:
        update: the update to replay.
        mine: class of the optimizer in this program.
    """
    theirs = update.kind
    name = kind_name(mine)
    found = replay_kind(theirs)
    if not theirs or theirs == name or found is mine:
        return mine, ""
    why = f"{update.optimizer!r} was a {theirs} in training, and is a {name} here"
    if not any(one.startswith("torch.optim.") for one in (theirs, name)):
        return mine, why
    return (None, why) if found is None else (found, "")


def _default_dtype(code: Any) -> torch.dtype | None:
    if code is None:
        return None
    dtype = torch_dtype(code)
    if dtype not in _DEFAULT_DTYPES:
        raise ValueError(f"{dtype} is not a floating-point default dtype")
    return dtype


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"options of a group must be a dict, not {type(value).__name__}")
    return value


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
    return {name: _gradient_of(name, about, tensors) for name in names}


def _gradient_of(
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
        form = Sparse(numel, tensors[INDICES + name], values)
        if tuple(fields["counts"]) != (values.numel(),):
            raise FormatError(f"the gradient of {name!r} has counts {fields['counts']}")
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


def _gradients_from_other_ranks(
    record: LogRecord, about: Mapping[str, Any]
) -> tuple[dict[str, Gradient], bool]:
    """Return the gradients of an update that other ranks recorded: together with this rank's, all
    that it consumed, each once; and True if some are lossy copies of the consumed ones.

    Args:
        record: record of this rank, with the records of other ranks in ``parts``.
        about: decoded fields of the update.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: the fields are invalid, or a share is
            missing
            or belongs to another update.
        FormatError: a compressed gradient is invalid.
    """
    found: dict[str, Gradient] = {}
    lossy = False
    for ranks, wanted, own in about["shared"]:
        names = list(own)
        for rank in ranks:
            part = record.parts.get(rank)
            if part is not None:
                gradients, are_lossy = _from_rank(
                    record, part, rank, about["optimizer"], ranks, wanted
                )
                names += gradients
                found |= gradients
                lossy = lossy or are_lossy
        # Without the digest a missing share would look like parameters that had no gradient.
        if len(names) != len(set(names)) or names_digest(names) != wanted:
            raise ValueError(f"gradients that rank(s) {ranks} have in common are missing")
    return found, lossy


def own_share(update: Update, record: LogRecord, names: Collection[str]) -> Update:
    """Return an update with the gradients of the given parameters only, from this rank's record.

    Args:
        update: decoded without other ranks' records.
        record: the record that it comes from.
        names: parameter names.

    Raises:
        FormatError: another rank recorded the gradient of one of them.
    """
    if PART_OBJECT in record.objects:
        about: Any = decode(record.objects[PART_OBJECT])
        known = {*update.gradients, *about.get("resting", ())}
        if lost := sorted(set(names) - known):
            raise FormatError(
                f"{record.head}: the gradient of {lost[0]!r} is in another rank's log"
            )
    mine = {name: gradient for name, gradient in update.gradients.items() if name in names}
    return replace(update, gradients=mine)


def _from_rank(
    record: LogRecord, part: LogRecord, rank: int, optimizer: str, ranks: Any, wanted: str
) -> tuple[dict[str, Gradient], bool]:
    """Return the gradients that one other rank recorded, after checking that its record is of the
    same update; and True if they are lossy copies."""
    # Gradients of another update would fit in shape, and give a wrong state that looks exact.
    if place_in_log(part.head) != place_in_log(record.head):
        raise ValueError(f"rank {rank} has {part.head} in its place")
    about: Any = decode(part.objects[PART_OBJECT])
    if about["optimizer"] != optimizer:
        raise ValueError(f"rank {rank} has an update of {about['optimizer']!r}")
    shares = [(digest, names) for group, digest, names in about["shared"] if group == ranks]
    if len(shares) != 1 or shares[0][0] != wanted:
        raise ValueError(f"rank {rank} consumed the gradients of other parameters")
    tensors = {place.entry.name: tensor_of(part, place) for place in part.layout.placed}
    gradients = {name: _gradient_of(name, about, tensors) for name in shares[0][1]}
    return gradients, bool(about.get("lossy", False))


def place_in_log(head: RecordHead) -> tuple[str, int, int, int]:
    """Return the place of a record in the log, equal for the records of all ranks."""
    return head.kind, head.timeline, head.step, head.lsn


class UnknownClassError(ReplayError):
    """Error of an update that cannot be replayed: the log names another optimizer class than this
    program has, and that class is not available.

    Attributes:
        optimizer: key of the optimizer in the state.
    """

    def __init__(self, message: str, *, step: int, optimizer: str) -> None:
        super().__init__(message, step=step)
        self.optimizer = optimizer

    def refused(self, before: int, path: PurePath) -> MismatchError:
        """Return the error to raise where no step may be left out.

        Args:
            before: last step that can be restored.
            path: path of the base.
        """
        return MismatchError(
            f"the log cannot be replayed from step {self.step} on: {self.message}",
            mismatches=(
                (self.optimizer, "updates of an optimizer class that this program does not have"),
            ),
            step=self.step,
            path=path,
            hint="declare the class in this program (everstep.replay.exactness.declare), so that "
            "it replays its log; or resume() once with an optimizer of that class, and save(); or "
            f"resume(strict=False) to continue from step {before}",
        )


class DeclaredRedo:
    """Run the functions registered on a live state (I8).

    Attributes:
        exactness: False once a function gave a value that differs from the samples in a mark.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._probe = Probe()
        self.exactness = Exactness(True, "")

    def run(self, record: LogRecord) -> None:
        """Replay one declared update. All earlier updates must have been applied.

        Raises:
            ReplayError: no function is registered for the pattern, or it fails.
            FormatError: the record does not fit the state.
        """
        pattern = record.head.declared
        function = self._state.ownership_rules.updates.get(pattern)
        if function is None:
            raise ReplayError(f"{record.head}: no function is registered for {pattern!r}")
        # The record holds the inputs as the function read them in training.
        if record.layout.placed:
            tensors = self._state.survey().tensors
            for place in record.layout.placed:
                _put(tensors.get(place.entry.name), record, place)
        # Tells hooks of the state that these writes are replay, not training.
        self._state.replaying = True
        try:
            function()
        except Exception as error:
            raise ReplayError(
                f"the function registered for {pattern!r} failed in replay of step "
                f"{record.head.step}: {error!r}",
                step=record.head.step,
                hint="the function must depend on nothing but the state",
            ) from error
        finally:
            self._state.replaying = False

    def settle(self, mark: LogRecord) -> None:
        """Finish a step: restore declared entries that the mark holds in full because no function
        was registered at that time, and compare the results of functions with the samples in the
        mark.

        Raises:
            FormatError: the mark does not fit the state.
        """
        if not self._state.ownership_rules.updates:
            return
        survey = self._state.survey()
        for place in mark.layout.placed:
            owner = survey.shape.owners.get(place.entry.name)
            if owner is not None and owner.update is not None:
                _put(survey.tensors[place.entry.name], mark, place)
        found = self._probe.take(survey) if self.exactness.exact else {}
        logged = {place.entry.name: place for place in mark.layout.placed}
        if not self._state.ownership_rules.replays and any(
            name.startswith(SAMPLE) and not name.startswith(SPOT) for name in logged
        ):
            # Older logs leave out entries that a function updated; they cannot be compared.
            why = "inputs of registered functions are on other ranks during replay"
            self.exactness = Exactness(False, why)
        for name, mine in found.items():
            if name in logged and (other := self._difference(name, mine, mark, logged[name])):
                pattern = name.removeprefix(SAMPLE).rsplit("/", 2)[0]
                why = f"the function registered for {pattern!r} gives {other} than training had"
                self.exactness = Exactness(False, f"{why}, at step {mark.head.step}")
                return

    def _difference(self, name: str, mine: torch.Tensor, mark: LogRecord, place: Placed) -> str:
        theirs = tensor_of(mark, place)
        if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            return "other entries"
        differs = (theirs != mine.cpu()).nonzero()
        if not len(differs):
            return ""
        return f"another {self._probe.entry_at(name, int(differs[0]))!r}"


def _put(target: torch.Tensor | None, record: LogRecord, place: Placed) -> None:
    source = tensor_of(record, place)
    if target is None or (target.shape, target.dtype) != (source.shape, source.dtype):
        raise FormatError(
            f"{record.head}: shape or dtype of {place.entry.name!r} differs from the state's"
        )
    copy_into(target, source)
