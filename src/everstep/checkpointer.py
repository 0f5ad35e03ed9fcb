"""The public :class:`Checkpointer`: the facade of the training process.

Each call is checked here, and passed to the :class:`~everstep.trainer.session.session.Session`,
which does the work. It runs in the training process; the keeper process writes to disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from everstep.config import EventListeners, Every, FailurePolicy, KeeperOptions, Method, named
from everstep.config.keep import KeepPolicy
from everstep.config.options import (
    DEFAULT_EVERY,
    Budget,
    LogOptions,
    Preemption,
    is_disabled,
)
from everstep.errors import EverstepError, OptionError, StateError
from everstep.link import Save
from everstep.restore.start import Recovery
from everstep.seams import Seams
from everstep.seams.garbage import collection_paused
from everstep.seams.group import own_rank
from everstep.seams.progress import log_or_print
from everstep.state.ownership import DeclaredUpdate, OwnershipRules
from everstep.state.training_state import State
from everstep.tiers.options import Place
from everstep.trainer.job import (
    RunPlace,
    checked_places,
    options_of,
    place_of_run,
    with_chosen_method,
    with_log_in_store,
)
from everstep.trainer.session.calls import (
    CallGuard,
    arguments_of,
    check_platform,
    check_resume,
    check_timeout,
    check_usable,
    checked_metrics,
    checked_note,
    exclusive,
    refuse_pickling,
)
from everstep.trainer.session.disabled import DisabledSession
from everstep.trainer.session.footprint import refusal_of
from everstep.trainer.session.preemption import PreemptionHandler, rank_vote
from everstep.trainer.session.session import Session
from everstep.trainer.session.stats import Stats

_Result = TypeVar("_Result")
_live = weakref.WeakValueDictionary[tuple[PurePath, int], "Checkpointer"]()


class Checkpointer:
    """Checkpoints a training run, and resumes it.

    A Checkpointer takes a *base* (a snapshot of the complete state) every few steps. With a method
    that has a gradient log, it also records the gradients of every step, so that no step is lost
    between two bases. A separate *keeper* process writes both to disk while training goes on, and
    it survives a crash of the training process.

    Call :meth:`resume` once before the training loop, and :meth:`step` at the end of each step::

        with everstep.Checkpointer("runs/a", {"model": model, "optimizer": optimizer}) as ckpt:
            ckpt.resume()
            for batch in loader:
                ...
                optimizer.step()
                ckpt.step()

    In a job of several ranks, every rank makes a Checkpointer with the same options and calls the
    same methods at the same steps.

    With ``EVERSTEP_DISABLE=1`` in the environment of all ranks, a Checkpointer validates its
    options and does nothing else: :meth:`resume` begins at step 0, and nothing is saved.

    Args:
        path: run folder. It is created if it does not exist. A folder with other contents is
            refused. Or the URL of a place in a store (``"s3://bucket/run"``): training then writes
            to a folder below ``EVERSTEP_CACHE`` (``~/.cache/everstep``), the keeper copies bases,
            and a log that goes to disk, to the store, and a machine without the folder resumes from
            there.
        state: objects to save, by name: modules, optimizers, any object with ``state_dict`` and
            ``load_state_dict``, or plain data. Plain data is read from this mapping at each save
            and written back to it at a resume. RNG states are always saved, too.
        method: name of a preset (:data:`everstep.presets`), a :class:`Method`, or ``"auto"``, the
            default: chosen at each start from what earlier starts of this run have measured; the
            first one takes lazy bases. Default with ``lose_at_most``: ``"logged"``; with
            ``every=None``: ``"lazy"``.
        every: interval between the bases that :meth:`step` takes: a number of steps, a time such as
            ``"10min"``, ``"auto"`` (the interval that wastes the least training time according to
            measurements), or None to take bases only in :meth:`save`. Default: ``"auto"``, or 100
            steps if ``method`` is given.
        lose_at_most: most training that a failure may cost: ``"1 step"`` (the one in flight),
            ``"10 steps"``, or training time such as ``"30s"``. The log and its place, or with a
            method without a log the interval between bases, are chosen accordingly, and
            :meth:`step` waits where the promise needs it. What is promised is printed.
        even_if: the failure: ``"process"`` (processes of training die; the default), ``"power"``
            (all machines lose their memory), ``"node"`` (a machine is lost with its disks), or
            ``"rack"`` (several machines).
        keep: number of newest bases to keep; or policies (:class:`~everstep.options.KeepNewest`,
            :class:`~everstep.options.KeepEvery`, :class:`~everstep.options.KeepBest`), one or
            several. Pinned bases (``everstep pin``) are always kept.
        budget: upper bounds for host memory, disk space, and bytes written per day.
        on_failure: policy for errors in the background: ``"raise"`` them at the next call,
            ``"warn"``, or a function to call with the error.
        on_event: function that is called with each :class:`~everstep.events.Event` of this rank, in
            a thread of its own; or several: functions and sinks of :mod:`everstep.events`. One that
            is slow or raises an error does not delay training.
        progress_timeout_s: seconds without any progress after which an operation counts as hung.
            Time during which the whole job is paused does not count.
        keeper: options of the keeper process: where it runs, and how long it stays after training.
        log: options of the gradient log. Only for methods that have one.
        declared: patterns (``"ema/*"``) of entries that change only between
            :meth:`before_update` and :meth:`after_update`. A mapping may give, for each pattern,
            the function that makes the change: the log then omits these entries, and replay calls
            the function. It takes no arguments, reads only parameters, buffers and the entries that
            it covers, and is deterministic.
        static: patterns of entries that never change. A change is an error.
        tiers: additional places for copies of the bases: URLs (``"s3://bucket/prefix"``,
            ``"gs://..."``, ``"az://..."``), directories on other disks, tiers of your own, or
            :class:`~everstep.TierOptions`. With several ranks also ``"peer"`` or
            :class:`~everstep.PeerOptions`: the memory of the keeper of the same local rank on the
            next node. The keeper makes the copies in the background. :meth:`resume` reads from them
            if the run folder lacks a base.
        preempt: handling of the signals that announce the end of a job: True (``Preemption()``) or
            a :class:`~everstep.config.options.Preemption` takes a last base at the next
            :meth:`step` and then sets :attr:`preempted`. False leaves signals alone.
        seams: file system, clock and other interfaces to the world. For tests.

    Raises:
        OptionError: An argument is invalid.
        UnsupportedStateError: Some entries of the state cannot be stored. The error lists them.
        StorageError: The run folder cannot be used.
        StateError, DeadlineError: The other ranks of the job are unknown, or do not arrive in time.
    """

    @named("Checkpointer")
    @collection_paused()
    def __init__(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        method: str | Method | None = None,
        every: int | str | Every | None = DEFAULT_EVERY,
        lose_at_most: str | None = None,
        even_if: str | None = None,
        keep: int | KeepPolicy | Sequence[KeepPolicy] = 3,
        budget: Budget | None = None,
        on_failure: FailurePolicy = "raise",
        on_event: EventListeners = None,
        progress_timeout_s: float = 120.0,
        keeper: KeeperOptions | None = None,
        log: LogOptions | None = None,
        declared: Sequence[str] | Mapping[str, DeclaredUpdate | None] = (),
        static: Sequence[str] = (),
        tiers: Sequence[Place] = (),
        preempt: bool | Preemption = False,
        seams: Seams | None = None,
    ) -> None:
        check_platform()
        self._pid = os.getpid()
        run, tiers = place_of_run(path, tiers)
        options, tiers = options_of(
            run,
            lose_at_most,
            even_if,
            method=method,
            every=every,
            keep=keep,
            budget=budget,
            on_failure=on_failure,
            on_event=on_event,
            progress_timeout_s=progress_timeout_s,
            keeper=keeper,
            log=log,
            tiers=tiers,
        )
        tiers = with_log_in_store(path, options, tiers)
        world = Seams.parse(seams)
        wanted = Preemption.parse(preempt)
        self._calls = CallGuard(progress_timeout_s)
        self._session: Session | DisabledSession
        if is_disabled():
            checked_places(options, tiers)
            OwnershipRules.of(declared, static)
            self._live_key = (run, own_rank())
            self._session = DisabledSession(run, state)
            return
        ending = PreemptionHandler(wanted, world.clock, rank_vote())
        place = RunPlace.find(options, run, tiers, world)
        saved = State(state, declared=declared, static=static, ranks=place.ranks)
        self._live_key = (run, place.ranks.rank)
        # Before a keeper is attached: an earlier Checkpointer of this run still holds it (a
        # notebook's cell is executed again).
        _close_earlier(self._live_key)
        options, place = with_chosen_method(options, place, saved, refusal_of, path, tiers)
        # Last: a constructor that fails leaves no Checkpointer that could be closed or used.
        self._session = Session(options, place, saved, ending, self._calls)
        _live[self._live_key] = self

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], state: MutableMapping[str, Any], **options: Any
    ) -> Checkpointer:
        """Create a Checkpointer from a configuration, as of YAML, OmegaConf or Hydra.

        Args:
            config: arguments of the constructor by name, ``path`` among them. ``method``,
                ``every``, ``budget``, ``keeper``, ``log`` and ``preempt`` may be mappings of the
                fields of their classes, and each item of ``tiers``: ``{"where": "s3://..."}`` or
                ``{"peer": {}}``. ``EVERSTEP_DIR``, ``EVERSTEP_METHOD``, ``EVERSTEP_EVERY`` and
                ``EVERSTEP_KEEP`` in the environment replace ``path``, ``method``, ``every`` and
                ``keep``.
            state: as of the constructor.
            options: arguments that replace those of the configuration and the environment.

        Raises:
            OptionError: An unknown or invalid option, or no path; otherwise as the constructor.
        """
        given = {**arguments_of(config), **options}
        return cls(given.pop("path"), state, **given)

    __reduce__ = refuse_pickling

    def __repr__(self) -> str:
        if not hasattr(self, "_session"):  # the constructor has raised an error
            return "<Checkpointer, not made>"
        closed = "" if self._session.is_open else ", closed"
        return f"<Checkpointer of {self._live_key[0]}: {self._session.in_words}{closed}>"

    @named("resume", strict=bool)
    @exclusive("resume")
    @collection_paused()
    def resume(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        initial: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        only: Sequence[str] | None = None,
    ) -> Recovery:
        """Restore the newest intact base, replay the log after it, and take over the run.

        Every byte of a base is verified; a damaged base is skipped in favor of the previous one.
        The resume opens a new timeline: any other process that still works on this run can no
        longer commit or delete anything.

        Args:
            step: step to return to instead of the newest one. A step that only an abandoned branch
                of the run's history contains is found, too, and ``notes`` mentions it. 0 starts
                from scratch.
            strict: refuse a base whose names, shapes or dtypes differ from the live state. With
                False, load the matching entries and report the differences.
            initial: weights to begin with if the run has nothing to restore: a file of
                ``torch.save`` or safetensors, a Hugging Face folder, a folder of
                ``torch.distributed.checkpoint``, another run, or a state dict. With ``strict``,
                missing, unexpected and misshapen tensors are refused.
            only: parts of the state to take from ``initial``; None: all that both have.

        Returns:
            The step that training continues from, and how it was reached.

        Raises:
            RecoveryError: No base can be used although the run has had some, or no base and log
                lead to ``step``.
            MismatchError: The base belongs to a different model. The live state is unchanged.
            StateError: The Checkpointer is closed, or another call is in progress.
            KeeperError: The keeper cannot be started or reached.
            DeadlineError: Another rank does not answer in time.
            StorageError: The run folder or a place of ``tiers`` cannot be read or written.
        """
        self._check_open()
        check_resume(step)
        begin = None
        if initial is not None:
            # Imported when it is used: it takes all of torch.distributed.checkpoint.
            from everstep.convert.initial import InitialState

            begin = InitialState(initial, only)
        elif only is not None:
            raise OptionError("resume(only=...) selects parts of initial=, which is not given")
        return self._session.resume(step, strict=strict, initial=begin)

    @named("rewind", step=int)
    def rewind(self, step: int) -> Recovery:
        """Return to an earlier step within this process, for example after a NaN or a loss spike.

        Equivalent to ``resume(step)``: the state is restored as it was at the end of ``step``, and
        later steps are no longer part of the run's history.

        Raises:
            RecoveryError: No base and log lead to ``step``.
        """
        return self.resume(step)

    @named("step")
    @exclusive("step")
    def step(self, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Mark the end of a training step, and take a base if one is due.

        Call it after ``optimizer.step()`` and ``zero_grad()``, where all gradients have been
        consumed. Gradients that are still being accumulated are not part of the state; a resume
        would lose them.

        Args:
            metrics: numbers by name, for the base of this step if one is taken (``everstep ls``,
                :class:`~everstep.options.KeepBest`). Values that are not finite are left out. Of
                several ranks, those of rank 0 count. Reading a tensor on a GPU waits for the GPU.

        Raises:
            OptionError: A metric is not a number. The step counts nevertheless.
            EverstepError: An operation in the background has failed since the last call, and the
                policy is to raise.
        """
        self._check_open()
        try:
            numbers = checked_metrics(metrics)
        except OptionError:
            # The step counts: the other ranks end it, too.
            self._session.step({})
            raise
        self._session.step(numbers)

    @named("steps", until=int)
    def steps(self, until: int) -> Iterator[int]:
        """Iterate over the steps that are still to train; the body of the loop trains one.

        ::

            ckpt = everstep.Checkpointer("runs/a", {"model": model, "optimizer": optimizer})
            for step in ckpt.steps(1000):
                ...
                optimizer.step()
                optimizer.zero_grad()

        Calls :meth:`resume` before the first step, unless the program has; :meth:`step` when the
        loop asks for the next step; and :meth:`close` after the last one. Ends early once
        :attr:`preempted` is true. After a :meth:`rewind` the body has to ``continue``: that step is
        not marked, and the loop goes on from the restored one. A loop that is left by ``break`` or
        an exception neither marks its step nor closes.

        Args:
            until: number of steps of the whole training.

        Yields:
            The number of steps that were trained before: that of the resume first, ``until - 1``
            last.

        Raises:
            StateError: The body has called :meth:`step`.
            EverstepError: As :meth:`resume`, :meth:`step` and :meth:`close`.
        """
        at = self._session.at
        if not at.timeline:
            self.resume()
        while at.step < until and not self.preempted:
            step = at.step
            timeline = at.timeline
            yield step
            if at.timeline != timeline:
                continue  # rewound: nothing was trained since
            if at.step != step:
                raise StateError(
                    f"the loop over steps() has called step() itself, in step {step}",
                    hint="leave that call out: steps() marks the end of each step",
                )
            self.step()
        self.close()

    @property
    def preempted(self) -> bool:
        """True once a signal has announced the end and the last base was taken. Leave the loop."""
        return self._session.preemption.preempted

    @named("save")
    @exclusive("save")
    def save(self, *, metrics: Mapping[str, Any] | None = None, note: str | None = None) -> Save:
        """Take a base of the step that the last call of :meth:`step` has ended.

        Call it between two steps. Repeated calls for the same step return the same base. If the
        next step is already under way (the call comes from a signal handler, or after a
        ``KeyboardInterrupt``), the base holds the state of the last step mark if that is still
        known. Otherwise it holds the current state, is not called exact, and a warning is logged.

        Args:
            metrics: numbers by name, as of :meth:`step`. They are added to those of an earlier call
                for the same step, even if its base was taken already.
            note: text for people, shown by ``everstep ls``.

        Returns:
            The base, with futures for the end of the capture (``staged``) and of the write
            (``durable``). With ``EVERSTEP_DISABLE=1`` there is no base: ``disabled`` is True.

        Raises:
            StateError: The call comes between ``optimizer.step()`` and :meth:`step`, or before
                :meth:`resume`.
        """
        self._check_open()
        return self._session.save(checked_metrics(metrics), checked_note(note))

    @named("audited", fraction=float)
    def audited(self, compute: Callable[[], _Result], *, fraction: float = 0.001) -> _Result:
        """Run forward and backward, of a fraction of the steps twice, and compare the gradients.

        Finds a processor or accelerator that computes wrongly, where the program is deterministic::

            loss = ckpt.audited(lambda: forward_and_backward(batch))
            optimizer.step()

        In a sampled step ``compute`` is called a second time, with the same random numbers, buffers
        and gradients. If any bit of any gradient differs, a third time: training goes on with the
        gradients that two of three agree on, and the difference is reported as a failure. If all
        three differ, the program is not deterministic: it is warned, and audited no more.

        Args:
            compute: runs forward and backward of one step or microbatch, and nothing else: no
                optimizer, no ``zero_grad()``, no batch taken from a loader. With several ranks all
                of them call it at the same steps; the same steps are sampled on all.
            fraction: fraction of the steps that are sampled, from 0 to 1.

        Returns:
            The result of the first call of ``compute``.

        Raises:
            AuditError: Gradients differ, and the failure policy is to raise. Names step, rank and
                tensors.
        """
        self._check_open()
        if not 0 <= fraction <= 1:
            raise OptionError(f"audited(fraction={fraction!r}) must be from 0 to 1")
        return self._session.audited(compute, fraction)

    def before_update(self) -> None:
        """Announce a change of the state that no ``optimizer.step()`` makes.

        Call it before other code changes tensors that an optimizer owns, or entries that were
        ``declared``. Waits for copies of these tensors that are in flight (I1, I8). Call
        :meth:`after_update` when the change is complete.
        """
        self._check_open()
        self._session.watch.begin_change()

    def after_update(self, *declared: str) -> None:
        """End a change announced by :meth:`before_update`. It counts as one update.

        Args:
            declared: patterns whose registered functions have made the change, in the order of the
                calls, and nothing else has. A log then records only that they ran. Without
                arguments, any entry may have changed: no log can repeat that, so the next step
                takes a base.

        Raises:
            OptionError: No function is registered for one of the patterns.
        """
        self._check_open()
        self._session.watch.changed(declared)

    @named("wait")
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all bases taken so far are durable.

        Args:
            timeout_s: seconds to wait; None waits as long as there is progress.

        Raises:
            DeadlineError: A base is not durable after ``timeout_s``, or nothing makes progress.
            EverstepError: A base has failed, and the policy is to raise.
        """
        self._calls.refuse_within("wait")
        self._check_open()
        check_timeout(timeout_s)
        self._session.wait(timeout_s)

    def close(self) -> None:
        """Take a last base if steps would be lost otherwise, wait until all is durable, and end.

        Further calls have no effect.

        Raises:
            EverstepError: An operation in the background has failed, and the policy is to raise.
            StateError: The call comes from within :meth:`step` (in a signal handler), where it
                would deadlock.
        """
        self._calls.refuse_within("close")
        if not self._session.is_open or os.getpid() != self._pid:
            return
        try:
            self._session.close()
        finally:
            self._forget()

    def stats(self) -> Stats:
        """Return the costs and results of checkpointing since construction."""
        return self._session.stats()

    def __enter__(self) -> Checkpointer:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session = self._session
        own = session.is_open and os.getpid() == self._pid and not self._calls.over
        if error is None:
            self.close()
        elif own and session.keeper_is_needed:
            # Other ranks may have died: do not wait for them, and keep everything in memory.
            session.release(stay=True)
            self._forget()
        else:
            session.watch.abandon()
            with contextlib.suppress(EverstepError):  # do not hide the error in flight
                self.close()

    def _check_open(self) -> None:
        is_open = self._session.is_open
        if is_open and os.getpid() == self._pid:
            return  # the usual case; this runs at every step
        replaced = _live.get(self._live_key, self) is not self
        check_usable(is_open, self._pid, self._live_key[0], replaced)

    def _forget(self) -> None:
        """Note that this Checkpointer no longer has its run."""
        if _live.get(self._live_key) is self:
            del _live[self._live_key]


def _close_earlier(key: tuple[PurePath, int]) -> None:
    """Close the Checkpointer of this process for the same run and rank; log its error."""
    earlier = _live.get(key)
    if earlier is not None:
        try:
            earlier.close()
        except EverstepError as error:
            log_or_print(f"the earlier Checkpointer of {key[0]}: {error}", level=logging.WARNING)
