"""State of a replica in memory, updated in place by replaying the log; assembly of multi-step
bases.

Imports torch. Import this module in a background thread, and only when there is a replica or a
multi-step base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from everstep.errors import DamageError
from everstep.format import BasePlan, Marker, ShardIdentity, TimelineRecord
from everstep.format.log import NOT_EXACT, RecordHead
from everstep.keeper.log import LoggedStep
from everstep.keeper.replica.rebuilds import records_of
from everstep.link.assembly import Assembly, PartialUpdate, check_samples
from everstep.link.capture import Capture, shard_offsets
from everstep.link.recordable import pack_tensors, tensor_hyperparameters
from everstep.replay import ReplayOptions
from everstep.restore.offline.memory import HostMemory, OfflineState
from everstep.restore.redo import ReplayDriver, Step, replay_conditions
from everstep.run.tensors import as_complex, shape_of_base
from everstep.state.layout import GRADIENT, OBJECT_PREFIX, ShardLayout
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import torch_dtype


class ReplicaState:
    """A base in memory, updated by steps of the log (LowDiff section VI).

    Args:
        plan: plan of the base.
        memory: memory block with the contents of its files; updated in place.
        objects: encoded objects of the base.
        trained: record of the timeline: versions, threads and device of the training process.
        threads: Python threads for replay.

    Attributes:
        why: why the state may differ from training's in some bits (I9); "" if it does not.
    """

    def __init__(
        self,
        plan: BasePlan,
        memory: memoryview,
        objects: Mapping[str, bytes],
        trained: TimelineRecord | None,
        *,
        threads: int,
    ) -> None:
        identity = plan.identity
        placed = [place for shard in plan.shards for place in shard.layout.placed]
        entries = {place.entry.name: place.entry for place in placed}
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        self._views: dict[str, torch.Tensor] = {}
        # complex128 entries whose bytes are not aligned for a complex view of the block.
        self._pairs: dict[str, torch.Tensor] = {}
        for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
            aliases.update(shard.aliases)
            for place in shard.layout.placed:
                name = place.entry.name
                data = memory[offset + place.begin : offset + place.end]
                plain = _tensor_over(data, place.entry.shape, torch_dtype(place.entry.dtype))
                twice = place.entry.logical_dtype is not None
                tensors[name] = self._views[name] = as_complex(plain) if twice else plain
                if tensors[name].data_ptr() != plain.data_ptr():
                    self._pairs[name] = plain
        trees = {name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in objects.items()}
        marker = Marker.of(identity, ())
        training_threads, elsewhere = replay_conditions([trained])
        self.why = "" if identity.exact else "the base is not exact"
        self._elsewhere = elsewhere
        self._identity = identity
        # Identity of the current step, once settle() has run for it.
        self._settled: ShardIdentity | None = None
        shape = shape_of_base(placed, aliases, trees)
        state = OfflineState(marker, entries, tensors, aliases, dict(objects), shape)
        self._state = state
        self._memory = HostMemory(state, trees, ReplayOptions(threads, training_threads))
        self._driver = ReplayDriver(self._memory, compares=not elsewhere)

    @property
    def shape(self) -> str:
        """Digest of names, dtypes and shapes; only a log with the same digest can be applied."""
        return self._state.shape

    @property
    def step(self) -> int:
        """Step of the state."""
        return self._head.step

    @property
    def lsn(self) -> int:
        """LSN of the state."""
        return self._head.lsn

    def advance(self, steps: Sequence[LoggedStep]) -> None:
        """Apply complete steps, in order. Their records are not read again.

        Raises:
            DamageError: a record is damaged; its step and all later ones were not applied.
            AuditError: replay's result differs from training's: the state must be discarded.
            EverstepError: a record does not fit, or replay failed half-way: the state must be
                discarded.
        """
        damaged: DamageError | None = None
        # Before the first step: a pass that fails half-way has changed the state, too.
        self._settled = None
        for step in steps:
            try:
                for record in (*step.updates, step.mark):
                    record.verify()
            except DamageError as error:
                # Raised at the end: the steps before this one are good and are finished first.
                damaged = error
                break
            own = self._state.marker.world > 1
            self._driver.step(Step.of(step.updates, step.mark, own=own))
            if step.updates:
                self.why = self.why or self._elsewhere
            if not step.mark.head.exact:
                self.why = self.why or NOT_EXACT
        self._driver.idle()
        self._put_pairs()
        if damaged is not None:
            raise damaged

    def settle(self) -> tuple[ShardIdentity, Mapping[str, bytes]]:
        """Make the memory block the exact state of :attr:`step`.

        Runs once per step: as soon as a base of the step is durable, the training process reuses
        the memory of the step mark, which must not be read after that.

        Returns:
            Identity and encoded objects of the state.

        Raises:
            EverstepError: the last mark does not fit the state: the state must be discarded.
        """
        if self._settled is not None:
            return self._settled, self._state.objects
        self._driver.finish()
        for name, view in self._views.items():
            tensor = self._state.tensors[name]
            # Replay works on a copy where training's strides differ from the stored order.
            if tensor is not view and name not in self._pairs:
                view.copy_(tensor)
        self._put_pairs()
        why = self._memory.exactness.why or next(iter(self._memory.surprises), "")
        self.why = self.why or why
        identity = replace(self._identity, step=self.step, lsn=self.lsn, exact=not self.why)
        # After the first replayed mark, objects come from marks, no longer from the base.
        if identity.step != self._identity.step:
            identity = replace(identity, behind_mark=False)
        self._settled = identity
        return identity, self._state.objects

    @property
    def _head(self) -> RecordHead | ShardIdentity:
        return self._identity if self._driver.last is None else self._driver.last.head

    def _put_pairs(self) -> None:
        """Copy complex entries that are computed outside the block into the block."""
        for name, pairs in self._pairs.items():
            pairs.copy_(torch.view_as_real(self._state.tensors[name].resolve_conj()))


def _tensor_over(data: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an entry as a tensor over its stored bytes."""
    # torch.frombuffer refuses an empty buffer.
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(shape)


# Fields of records that several ranks have in shares.
_OF_SHARES = ("shared", "resting", "spread")


def _needed_updates(assembly: Assembly) -> Iterator[PartialUpdate]:
    """Yield the updates, each with the gradients of the parameters captured before it."""
    if assembly.captured is None:
        yield from assembly.updates
        return
    for update in assembly.updates:
        (encoded,) = update.objects.values()
        about: Any = decode(encoded)
        names = {
            name
            for lsn, parameters in assembly.captured
            if lsn < update.head.lsn
            for name in parameters.get(about["optimizer"], ())
        }
        placed = [
            place
            for place in update.layout.placed
            if not place.entry.name.startswith(GRADIENT)
            or place.entry.name.removeprefix(GRADIENT) in names
        ]
        # Other ranks replay their own shares: this record stands for itself.
        about = {name: value for name, value in about.items() if name not in _OF_SHARES}
        compressed = about.get("compressed", {})
        about["compressed"] = {name: compressed[name] for name in compressed if name in names}
        if names:
            layout = ShardLayout(tuple(placed))
            objects = {UPDATE_OBJECT: encode(about, checked=True)}
            yield replace(update, layout=layout, objects=objects)


def rebuild(
    capture: Capture,
    arena: memoryview,
    objects: Mapping[str, bytes],
    assembly: Assembly,
    trained: TimelineRecord | None,
    *,
    threads: int,
) -> tuple[ShardIdentity, Mapping[str, bytes]]:
    """Bring the parts of a multi-step base to one step, in place.

    Works like a replica to which the log is applied once. Updates that an entry had seen before it
    was captured contain no gradient for it and leave it as it is (GoCkpt 4.3.1).

    Args:
        capture: base with the identity of the last step.
        arena: memory of the base and the updates.
        objects: encoded objects of the last step mark.
        trained: record of the timeline: versions, threads and device of the training process.
        threads: Python threads for replay.

    Returns:
        Identity and encoded objects of the base.

    Raises:
        AuditError: replay's result differs from samples of the live state.
        EverstepError: an update does not fit; the memory block must be discarded.
    """
    plan = capture.plan
    identity = capture.plan.identity
    _, size_bytes = shard_offsets(plan)
    memory = arena[capture.offset : capture.offset + size_bytes]
    state = ReplicaState(plan, memory, objects, trained, threads=threads)
    hyperparameters = pack_tensors(tensor_hyperparameters(plan, memory, objects))
    needed = replace(assembly, updates=list(_needed_updates(assembly)))
    *updates, mark = records_of(identity, arena, needed, objects, hyperparameters)
    state.advance([LoggedStep(tuple(updates), mark, 0)])
    made, objects = state.settle()
    # Samples can only be compared where replay yields the bits of training.
    if not state.why:
        check_samples(assembly.samples, plan, memory, identity.step)
    return made, objects
