"""The state that a replica holds: a base in a block of memory, brought forward in place.

The only part of a keeper process that needs torch; imported when there is a replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from everstep.errors import DamageError
from everstep.format.header import ShardIdentity
from everstep.format.log import NOT_EXACT
from everstep.format.plan import BasePlan
from everstep.format.records import Marker, TimelineRecord
from everstep.keeper.log.log import LoggedStep
from everstep.link.capture import shard_offsets
from everstep.restore.offline.rebuild import replay_conditions
from everstep.restore.offline.state import OfflineState
from everstep.run.shape import shape_of_base
from everstep.run.tensors import as_complex
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.values.objects import decode
from everstep.state.values.tensors import torch_dtype

__all__ = ["ReplicaState"]


class ReplicaState:
    """One base in memory, and what the log has made of it since (LowDiff section VI).

    Args:
        plan: of the base.
        memory: its block, which mirrors its files; updated in place.
        objects: encoded objects of the base.
        trained: the record of the timeline: where its updates were computed.
        threads: Python threads that share the work of replay.

    Attributes:
        why: why the state is not bit for bit that of training (I9); "" if it is.
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
        entries: dict[str, Entry] = {}
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._pairs: dict[str, torch.Tensor] = {}  # of complex128 that cannot lie in the block
        for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
            aliases.update(shard.aliases)
            for place in shard.layout.placed:
                entries[place.entry.name] = place.entry
                name = place.entry.name
                data = memory[offset + place.begin : offset + place.end]
                plain = _tensor_over(data, place.entry)
                twice = place.entry.logical_dtype is not None
                tensors[name] = self._views[name] = as_complex(plain) if twice else plain
                if tensors[name].data_ptr() != plain.data_ptr():
                    self._pairs[name] = plain
        trees = {name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in objects.items()}
        placed = [place for shard in plan.shards for place in shard.layout.placed]
        marker = Marker.of(identity, ())
        training_threads, elsewhere = replay_conditions([trained])
        self.why = "" if identity.exact else "the base is not exact"
        self._elsewhere = elsewhere
        self._identity = identity
        self._settled: ShardIdentity | None = None  # of the step that it has
        self._state = OfflineState(
            marker,
            entries,
            tensors,
            aliases,
            objects,
            trees,
            shape_of_base(placed, aliases, trees),
            threads=threads,
            training_threads=training_threads,
        )

    @property
    def shape(self) -> str:
        """What the state consists of; a log of another shape does not fit it."""
        return self._state.shape

    @property
    def step(self) -> int:
        """Of the newest step that was applied."""
        return self._state.step

    @property
    def lsn(self) -> int:
        """Of the newest update that was applied."""
        return self._state.lsn

    def advance(self, steps: Sequence[LoggedStep]) -> None:
        """Applies whole steps, in order; their records are not read any more afterwards.

        Raises:
            DamageError: a record is damaged; nothing of its step, nor of those behind it, was
                applied.
            AuditError: what they give is not what training had: the state is of no use.
            EverstepError: a record does not fit, or failed half-way: likewise.
        """
        damaged: DamageError | None = None
        self._settled = None
        for step in steps:
            try:
                self._state.advance(step.updates, step.mark)
            except DamageError as error:
                damaged = error
                break
            if step.updates:
                self.why = self.why or self._elsewhere
            if not step.mark.head.exact:
                self.why = self.why or NOT_EXACT
        self._state.work_off()
        self._put_pairs()
        if not self._elsewhere:
            self._state.compare()
        if damaged is not None:
            raise damaged

    def settle(self) -> tuple[ShardIdentity, Mapping[str, bytes]]:
        """Makes the block the state of :attr:`step`; returns what identifies it, and its objects.

        Once for each step: as soon as a base of it is durable, the training process writes over
        the mark, which must not be read again.

        Raises:
            EverstepError: the last mark does not fit the state, which is of no use then.
        """
        if self._settled is not None:
            return self._settled, self._state.objects
        self._state.finish()
        for name, view in self._views.items():
            tensor = self._state.tensors[name]
            if tensor is not view and name not in self._pairs:  # it had other strides in training
                view.copy_(tensor)
        self._put_pairs()
        why = self._state.exactness.why or next(iter(self._state.surprises), "")
        self.why = self.why or why
        identity = replace(self._identity, step=self.step, lsn=self.lsn, exact=not self.why)
        if identity.step != self._identity.step:  # from now on everything is as the marks have it
            identity = replace(identity, behind_mark=False)
        self._settled = identity
        return identity, self._state.objects

    def _put_pairs(self) -> None:
        """Brings to the block what is computed elsewhere."""
        for name, pairs in self._pairs.items():
            pairs.copy_(torch.view_as_real(self._state.tensors[name].resolve_conj()))


def _tensor_over(data: memoryview, entry: Entry) -> torch.Tensor:
    """An entry as a tensor over its bytes, as they are stored."""
    if not data.nbytes:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
    return torch.frombuffer(data, dtype=torch_dtype(entry.dtype)).view(entry.shape)
