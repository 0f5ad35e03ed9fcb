"""Takes bases: captures the state in the training thread and hands it to the keeper."""

from __future__ import annotations

from pathlib import PurePath

from everstep.arena import BlockPool
from everstep.arena.buffers import PAGE_BYTES
from everstep.capture.base import Body, LiveBody, stage
from everstep.capture.lane import Lane
from everstep.errors import EverstepError
from everstep.format.header import ShardIdentity
from everstep.keeper.budget import check_disk_budget
from everstep.keeper.channel import BackgroundChannel
from everstep.keeper.local import LocalKeeper
from everstep.keeper.persist import BasePlan, plan_base
from everstep.keeper.save import Save
from everstep.options import Options
from everstep.seams import Clock
from everstep.state.image import State

__all__ = ["Saver"]


class Saver:
    """Takes bases, of whichever timeline is being written.

    Attributes:
        saves: bases asked for.
        stall_s: seconds the training thread was held up, by cause.
        last_save_s: when the last one was asked for, on the monotonic clock.
    """

    def __init__(
        self,
        options: Options,
        run: PurePath,
        state: State,
        lane: Lane,
        pool: BlockPool,
        channel: BackgroundChannel,
        clock: Clock,
    ) -> None:
        self._options = options
        self._run = run
        self._state = state
        self._lane = lane
        self._pool = pool
        self._keeper: LocalKeeper | None = None
        self._channel = channel
        self._clock = clock
        self._last: Save | None = None
        self.saves = 0
        self.stall_s = {"capture": 0.0, "back_pressure": 0.0, "persist": 0.0}
        self.last_save_s = clock.monotonic_s()

    def start(self, keeper: LocalKeeper) -> None:
        """From now on bases go to ``keeper``, that of a new timeline."""
        self._keeper = keeper
        self._last = None

    def take(self, identity: ShardIdentity, *, show: bool) -> Save:
        """Takes a base of the state as it is now; the same step's base if there is one.

        Args:
            show: show the progress of a ``sync`` save.

        Raises:
            EverstepError: what failed, now or in the background, by the policy.
        """
        last = self._last
        base = (identity.timeline, identity.step)
        if last is not None and (last.timeline, last.step) == base and not _failed(last):
            return last
        save = Save(identity.step, identity.timeline)
        self.saves += 1
        self.last_save_s = self._clock.monotonic_s()
        try:
            plan = plan_base(self._state.image(lsn=identity.lsn), identity)
            check_disk_budget(self._options, self._run, plan.size_bytes)
            self._last = save
            if self._options.method.base == "sync":
                self._persist_now(plan, save, show=show)
            else:
                self._capture(plan, save)
        except EverstepError as error:
            for future in (save.staged, save.durable):
                if not future.done():
                    future.set_exception(error)
            self._channel.post(error)
        except BaseException:
            save.staged.cancel()
            save.durable.cancel()
            self._last = None
            raise
        self._channel.check()
        return save

    def _persist_now(self, plan: BasePlan, save: Save, *, show: bool) -> None:
        start_s = self._clock.monotonic_s()
        try:
            assert self._keeper is not None
            self._keeper.persist(plan, self._bodies(plan), save, show=show)
            save.staged.set_result(None)
        finally:
            self.stall_s["persist"] += self._clock.monotonic_s() - start_s

    def _capture(self, plan: BasePlan, save: Save) -> None:
        """Copies the state into host memory and hands it to the keeper."""
        sizes = [-(-shard.body_bytes // PAGE_BYTES) * PAGE_BYTES for shard in plan.shards]
        start_s = self._clock.monotonic_s()
        try:
            block = self._pool.acquire(
                max(PAGE_BYTES, sum(sizes)), timeout_s=self._options.progress_timeout_s
            )
        finally:
            self.stall_s["back_pressure"] += self._clock.monotonic_s() - start_s
        start_s = self._clock.monotonic_s()
        try:
            staged, position = [], 0
            for shard, body, size in zip(plan.shards, self._bodies(plan), sizes, strict=True):
                part = block.tensor[position : position + size]
                staged.append(stage(body, shard.body_bytes, part))
                position += size
        except BaseException:
            self._pool.release(block)
            raise
        finally:
            self.stall_s["capture"] += self._clock.monotonic_s() - start_s
        save.staged.set_result(None)
        # The plan keeps the descriptions; the live tensors are no longer needed.
        captured = BasePlan(plan.identity, plan.shards, {})
        pool = self._pool
        assert self._keeper is not None
        self._keeper.submit(captured, staged, save, lambda: pool.release(block))

    def _bodies(self, plan: BasePlan) -> list[Body]:
        timeout_s = self._options.progress_timeout_s
        return [
            LiveBody(shard.placed, plan.tensors, self._lane, timeout_s=timeout_s)
            for shard in plan.shards
        ]


def _failed(save: Save) -> bool:
    future = save.durable
    return future.done() and (future.cancelled() or future.exception() is not None)
