"""Apply several updates at once, slice by slice: SGD, Adam and AdamW on a CUDA device.

On a device a call takes longer to launch than a small tensor takes to update, and gradients come
from host memory. So tensors with the same updates are joined end to end and cut into slices as
large as the device's cache allows. A slice stays there for all updates of a call, while the
gradients of the next one are copied (``uploads``). torch's own functions run on the slices, in the
variant (for-loop, foreach, fused) that the hyperparameters select; ``self_test`` checks that the
bits are those of complete tensors. A kernel that keeps a slice in registers (``kernels``) may
replace them.

Only :mod:`everstep.replay.fused.uploads` allocates CUDA memory: tests run this module in host
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.compress.quantized import BLOCK_NUMEL
from everstep.replay.functional import Tensors, form_of, options_of
from everstep.replay.fused.cuts import line
from everstep.replay.fused.programs import describes, numbers
from everstep.replay.fused.uploads import Uploads
from everstep.replay.packed import Gradient, Packed
from everstep.replay.updates import Update

__all__ = [
    "UPDATES_MAX",
    "Kernel",
    "Slice",
    "SliceGroup",
    "Sliced",
    "cut_slices",
    "slice_elements",
]

ELEMENTS_MIN = 64 * 1024
ELEMENTS_MAX = 4 * 1024 * 1024
"""Limits of a slice. Smaller ones are dominated by launches; in larger ones gradients take too much
memory."""

_CACHE_SHARE = 2  # half of the cache, since gradients stream through it as well
_ALIGNED_BYTES = 256

Kernel = Callable[[torch.Tensor, Tensors, Tensors, torch.Tensor], None]
"""Function that updates a slice in place. Arguments: parameters; moments, in the order of their
names;
gradients of each update, at equal distances in memory; and a row of
:func:`~everstep.replay.fused.programs.numbers` for each, float32. All on the device."""


def slice_elements(device: torch.device, element_bytes: int) -> int:
    """Return how many elements of a state fit in the cache of a device beside streamed gradients.

    Args:
        device: device of the state.
        element_bytes: bytes of parameter, moments and gradient together.
    """
    if device.type != "cuda":
        return ELEMENTS_MIN
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    elements = cache_bytes // (_CACHE_SHARE * element_bytes)
    return min(max(elements, ELEMENTS_MIN), ELEMENTS_MAX) // BLOCK_NUMEL * BLOCK_NUMEL


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """Parameters that have the same updates.

    Attributes:
        group: number of their parameter group.
        keys: names of their moments that some update needs.
        dtypes: dtype of their gradients in each update; None: no gradients in it.
        count: step count before the updates; None: there is no ``step``.
        names: names of the parameters, in order.
        kernel: used instead of torch's functions; None: there is none.
        rows: numbers for the kernel.
    """

    group: int
    keys: tuple[str, ...]
    dtypes: tuple[torch.dtype | None, ...]
    count: float | None
    names: list[str] = field(default_factory=list)
    kernel: Kernel | None = None
    rows: torch.Tensor | None = None

    @property
    def present(self) -> list[int]:
        """Updates that have gradients of these parameters."""
        return [number for number, dtype in enumerate(self.dtypes) if dtype is not None]


Piece = tuple[str, slice]


@dataclass(frozen=True, slots=True)
class Slice:
    """Ranges of parameters of one group, end to end.

    Attributes:
        alike: group of the parameters.
        pieces: parameters, and ranges of their elements, in memory order.
        numel: number of elements of all pieces.
    """

    alike: SliceGroup
    pieces: Sequence[Piece]
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        places = self.places()
        return int(places[-1][2].stop)

    def places(self) -> list[tuple[int, torch.dtype, slice]]:
        """Return the places of gradients in memory: update, dtype, bytes."""
        found = []
        begin = 0
        for number in self.alike.present:
            dtype = self.alike.dtypes[number]
            assert dtype is not None
            end = begin + self.numel * dtype.itemsize
            found.append((number, dtype, slice(begin, end)))
            begin = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return found


def cut_slices(alike: SliceGroup, numels: Mapping[str, int], elements: int) -> Iterator[Slice]:
    """Cut a group into slices; parameters are cut at multiples of :data:`BLOCK_NUMEL` only.

    Args:
        alike: group of parameters.
        numels: number of elements of each parameter.
        elements: largest size of a slice, a multiple of :data:`BLOCK_NUMEL`.
    """
    pieces: list[Piece] = []
    space = elements
    for name in alike.names:
        begin = 0
        numel = numels[name]
        while True:
            size = numel - begin
            if size > space:
                size = space // BLOCK_NUMEL * BLOCK_NUMEL
            if size or not numel:  # an empty tensor counts steps as well
                pieces.append((name, slice(begin, begin + size)))
            begin = begin + size
            space = space - size
            if begin == numel:
                break
            yield Slice(alike, pieces, elements - space)
            pieces = []
            space = elements
    if pieces:
        yield Slice(alike, pieces, elements - space)


UPDATES_MAX = 8
"""Largest number of updates in one pass over the state: their gradients wait in pinned memory."""


class Sliced:
    """Update the parameters and the state of an optimizer in place, slice by slice.

    Args:
        optimizer: holds the state; of a class in :data:`~everstep.replay.functional.KINDS`. Its
            ``step``
            is not called.
        names: parameter names of each group, in order; all parameters are on one device.
        elements: size of a slice, a multiple of 256; None: by the device's cache.
        kernel: returns a kernel for an update and the number of a group whose parameters and
            moments are
            float32, or None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        *,
        elements: int | None = None,
        kernel: Callable[[Update, int], Kernel | None] = lambda update, number: None,
    ) -> None:
        assert elements is None or (elements > 0 and elements % BLOCK_NUMEL == 0)
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._form = form_of(self._kind)
        self._names = names
        self._parameters = {
            name: parameter
            for group, members in zip(optimizer.param_groups, names, strict=True)
            for name, parameter in zip(members, group["params"], strict=True)
        }
        self._elements = elements
        self._kernel = kernel

    def takes(self, update: Update) -> bool:
        """Return True if this update can be applied to the present state.

        It cannot if the optimizer would create state, if hyperparameters are tensors (torch chooses
        its code by their device), or if gradients are not in host memory, in the memory order of
        their parameters: the optimizer's own step handles those.
        """
        for members, options in zip(self._names, options_of(self._kind, update), strict=True):
            if any(_has_tensors(value) for value in options.values()):
                return False
            keys = self._form.moments(options)
            for name in members:
                if name in update.gradients and not self._ready(name, keys, update.gradients[name]):
                    return False
        return True

    def _ready(self, name: str, keys: Sequence[str], gradient: Gradient) -> bool:
        parameter = self._parameters[name]
        state = self._state(name)
        if gradient.device.type != "cpu":
            return False
        if self._form.counts and not isinstance(state.get("step"), torch.Tensor):
            return False
        tensors = [parameter]
        for key in keys:
            moment = state.get(key)
            if not isinstance(moment, torch.Tensor) or moment.device != parameter.device:
                return False
            if moment.shape != parameter.shape:
                return False
            tensors.append(moment)
        if isinstance(gradient, Packed):
            if not parameter.is_contiguous() or not gradient.splits_at(BLOCK_NUMEL):
                return False
        else:
            tensors.append(gradient)
        return all(line(tensor, parameter) is not None for tensor in tensors)

    def run(self, updates: Sequence[Update]) -> None:
        """Apply ``updates``, all accepted by :meth:`takes`, in their order."""
        with torch.no_grad():
            for begin in range(0, len(updates), UPDATES_MAX):
                self._pass([self._here(one) for one in updates[begin : begin + UPDATES_MAX]])

    def _here(self, update: Update) -> Update:
        """Return the update with a scaler's tensors on the device."""
        device = next(iter(self._parameters.values())).device
        found = {
            name: tensor.to(device)
            for name in ("grad_scale", "found_inf")
            if (tensor := getattr(update, name)) is not None
        }
        return replace(update, **found) if found else update

    def _pass(self, updates: Sequence[Update]) -> None:
        options = [options_of(self._kind, update) for update in updates]
        every = self._grouped(updates, options)
        slices = [one for alike in every for one in self._cut(alike)]
        if not slices:
            return
        device = next(iter(self._parameters.values())).device
        uploads = Uploads(device, max(one.size_bytes for one in slices))
        uploads.send(0, partial(self._fill, slices[0], updates))
        left: dict[int, torch.Tensor] = {}
        for number, one in enumerate(slices):
            step = self._run_slice(one, uploads.receive(number), updates, options)
            uploads.release(number)
            if number + 1 < len(slices):
                uploads.send(number + 1, partial(self._fill, slices[number + 1], updates))
            if step is not None:
                left[id(one.alike)] = step  # the same for each slice
        for alike in every:
            for name in alike.names if id(alike) in left else ():
                self._state(name)["step"].copy_(left[id(alike)])

    # --- Grouping -----------------------------------------------------------------

    def _grouped(
        self, updates: Sequence[Update], options: Sequence[Sequence[Mapping[str, Any]]]
    ) -> list[SliceGroup]:
        counts = self._counts()
        found: dict[Any, SliceGroup] = {}
        for group, members in enumerate(self._names):
            for name in members:
                logged = [update.gradients.get(name) for update in updates]
                dtypes = tuple(None if one is None else one.dtype for one in logged)
                parameter = self._parameters[name]
                state = self._state(name)
                wanted = {
                    key
                    for own, dtype in zip(options, dtypes, strict=True)
                    if dtype is not None
                    for key in self._form.moments(own[group])
                }
                if all(dtype is None for dtype in dtypes):
                    continue
                keys = tuple(sorted(wanted))
                of_state = tuple(state[key].dtype for key in keys)
                step = state.get("step")
                where = None if step is None else (step.device, step.dtype)
                key = (group, parameter.dtype, keys, of_state, dtypes, counts.get(name), where)
                if key not in found:
                    found[key] = SliceGroup(group, keys, dtypes, counts.get(name))
                found[key].names.append(name)
        return [self._with_kernel(alike, updates, options) for alike in found.values()]

    def _counts(self) -> dict[str, float]:
        """Return the step counts of the parameters, read together: each read from a device waits
        for it."""
        steps: dict[Any, dict[str, torch.Tensor]] = {}
        for name in self._parameters if self._form.counts else ():
            step = self._state(name).get("step")
            if step is not None:
                steps.setdefault((step.device, step.dtype), {})[name] = step.detach().reshape(())
        found: dict[str, float] = {}
        for own in steps.values():
            found.update(zip(own, torch.stack(list(own.values())).tolist(), strict=True))
        return found

    def _with_kernel(
        self,
        alike: SliceGroup,
        updates: Sequence[Update],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ) -> SliceGroup:
        kernel = self._kernel_for(alike, updates, options)
        if kernel is None:
            return alike
        rows = [
            numbers(self._kind, options[number][alike.group], (alike.count or 0.0) + place)
            for place, number in enumerate(alike.present, 1)
        ]
        device = self._parameters[alike.names[0]].device
        table = torch.tensor(rows, dtype=torch.float32, device="cpu").to(device)
        return replace(alike, kernel=kernel, rows=table)

    def _kernel_for(
        self,
        alike: SliceGroup,
        updates: Sequence[Update],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ) -> Kernel | None:
        first = alike.names[0]
        dtypes = {self._parameters[first].dtype}
        dtypes.update(self._state(first)[key].dtype for key in alike.keys)
        present = alike.present
        counts = () if alike.count is None else (alike.count + 1, alike.count + len(present))
        if dtypes != {torch.float32} or len({alike.dtypes[number] for number in present}) > 1:
            return None
        kernels = []
        for number in present:
            own = options[number][alike.group]
            update = updates[number]
            if update.grad_scale is not None or update.found_inf is not None:
                return None
            if self._form.moments(own) != alike.keys or not describes(self._kind, own, counts):
                return None
            kernels.append(self._kernel(update, alike.group))
        return kernels[0] if all(kernel is kernels[0] for kernel in kernels) else None

    def _cut(self, alike: SliceGroup) -> Iterator[Slice]:
        first = alike.names[0]
        moments = [self._state(first)[key] for key in alike.keys]
        tensors = [self._parameters[first], *moments, self._parameters[first]]  # and a gradient
        elements = self._elements or slice_elements(
            tensors[0].device, sum(tensor.element_size() for tensor in tensors)
        )
        numels = {name: self._parameters[name].numel() for name in alike.names}
        return cut_slices(alike, numels, elements)

    # --- One slice --------------------------------------------------------------------------

    def _fill(self, one: Slice, updates: Sequence[Update], memory: torch.Tensor) -> int:
        """Write the gradients of a slice to host memory; return the number of bytes."""
        for number, dtype, place in one.places():
            out = memory[place].view(dtype)
            begin = 0
            for name, elements in one.pieces:
                gradient = updates[number].gradients[name]
                target = out[begin : begin + elements.stop - elements.start]
                begin += target.numel()
                if isinstance(gradient, Packed):
                    gradient.part(elements).into(target)
                else:
                    target.copy_(self._line(gradient, name)[elements])
        return one.size_bytes

    def _run_slice(
        self,
        one: Slice,
        memory: torch.Tensor,
        updates: Sequence[Update],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ) -> torch.Tensor | None:
        """Apply all updates to a slice; return the resulting step count, if there is one."""
        alike = one.alike
        parameters = self._joined(one, lambda name: self._parameters[name])
        moments = {
            key: self._joined(one, lambda name, key=key: self._state(name)[key])  # type: ignore[misc]
            for key in alike.keys
        }
        gradients = [memory[place].view(dtype) for _, dtype, place in one.places()]
        step = None
        if alike.count is not None:
            step = self._state(alike.names[0])["step"].detach().clone()
        if alike.kernel is None:
            own = {key: joined.flat for key, joined in moments.items()}
            self._call(one, parameters.flat, own, gradients, step, updates, options)
        else:
            assert alike.rows is not None
            held = [moments[key].flat for key in alike.keys]
            alike.kernel(parameters.flat, held, gradients, alike.rows)
            if step is not None:
                step += len(gradients)
        for joined in (parameters, *moments.values()):
            joined.put_back()
        return step

    def _call(
        self,
        one: Slice,
        parameters: torch.Tensor,
        moments: Mapping[str, torch.Tensor],
        gradients: Tensors,
        step: torch.Tensor | None,
        updates: Sequence[Update],
        options: Sequence[Sequence[Mapping[str, Any]]],
    ) -> None:
        """Call torch's own functions. They may write to the gradients, which nothing else uses."""
        for number, gradient in zip(one.alike.present, gradients, strict=True):
            own = options[number][one.alike.group]
            self._form.call(
                [parameters],
                [gradient.to(parameters.dtype)],
                {key: [moments[key]] for key in self._form.moments(own)},
                [] if step is None else [step],
                own,
                updates[number],
            )

    def _joined(self, one: Slice, of: Callable[[str], torch.Tensor]) -> _Joined:
        return _Joined([self._line(of(name), name)[elements] for name, elements in one.pieces])

    def _line(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        flat = line(tensor.detach(), self._parameters[name])
        assert flat is not None  # checked by `takes`
        return flat

    def _state(self, name: str) -> dict[str, Any]:
        # Not by index: the state is a defaultdict, which would create an entry.
        found: dict[str, Any] = self._optimizer.state.get(self._parameters[name], {})
        return found


class _Joined:
    """Pieces of tensors end to end: the single piece itself, or a copy of several.

    Attributes:
        flat: shape ``[n]``.
    """

    def __init__(self, pieces: Tensors) -> None:
        self._pieces = pieces
        self.flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def put_back(self) -> None:
        """Write a copy back to its pieces."""
        if len(self._pieces) > 1:
            chunks = torch.split(self.flat, [piece.numel() for piece in self._pieces])
            torch._foreach_copy_(self._pieces, list(chunks))


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)
