"""Chooses the options that keep a promise (``lose_at_most=``, ``even_if=``), and the method of
``method="auto"``.

A step is safe from a failure when the log leads to it, or a base of it is there, in a place that
survives the failure:

| ``even_if`` | dies | place that holds the step |
|---|---|---|
| ``"process"`` | the processes of training | memory of the keeper |
| ``"power"`` | all machines, with their memory | disk of the run folder |
| ``"node"`` | a machine, with its disks | memory of another node, or a store |
| ``"rack"`` | several machines, with their disks | a store |

A run folder on a network file system counts as a store.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

from everstep.config.method import AUTO, Method, presets
from everstep.config.options import (
    DEFAULT_EVERY,
    Every,
    LogOptions,
    Options,
    Prediction,
    validate_options,
)
from everstep.config.promise import Promise
from everstep.errors import EverstepError, OptionError
from everstep.events import read_events
from everstep.events.stream import parse_listeners
from everstep.link.registry import list_keepers
from everstep.plan.auto import FIRST, HELD, LOGGED, Observed, choose
from everstep.seams.machine import (
    is_in_memory,
    is_on_network,
    memory_available_bytes,
    mounted_as,
)
from everstep.seams.progress import log_or_print
from everstep.state.training_state import State
from everstep.tiers import PeerOptions
from everstep.tiers.options import PEER, Place, as_options, split_peers, survival_of
from everstep.trainer.job.place import RunPlace, with_log_in_store

_BATCH_STEPS_MAX = 10


_TIMELINES_MAX = 30  # of which "auto" reads measurements
_EVERY = 100  # steps between bases, if the method is given and the interval is not


class PromisedOptions(NamedTuple):
    """Options that keep a promise.

    Attributes:
        promise: the promise, with the place that has to hold a step.
        log: options of the log; None if bases alone keep the promise.
    """

    promise: Promise
    method: str | Method
    every: int | str | Every | None
    log: LogOptions | None
    tiers: Sequence[Place]


def options_of(
    run: PurePath,
    lose_at_most: str | None,
    even_if: str | None,
    *,
    method: str | Method | None,
    every: int | str | Every | None,
    log: LogOptions | None,
    tiers: Sequence[Place],
    on_event: object,
    **others: Any,
) -> tuple[Options, Sequence[Place]]:
    """Validate the arguments of a Checkpointer, after a promise has chosen some of them.

    Args:
        on_event: function that is called with each event, or several.
        others: further arguments of :func:`~everstep.config.options.validate_options`.

    Returns:
        The options, and the places for copies.

    Raises:
        OptionError: an argument is invalid, or the promise cannot be kept.
    """
    promise = Promise.parse(lose_at_most, even_if)
    # Without an interval the program takes all bases; a log would need others.
    chooses = method is None and every is not None and log is None
    is_auto = promise is None and (chooses or method == AUTO)
    method = None if method == AUTO else method
    if is_auto and isinstance(log, LogOptions):
        _refuse_log_of_auto()
    if every == DEFAULT_EVERY:
        every = "auto" if is_auto else _EVERY
    if promise is not None:
        found = promised_options(promise, run, method=method, every=every, log=log, tiers=tiers)
        promise, method, every, log, tiers = found
    method = FIRST if method is None else method
    options = validate_options(method=method, every=every, log=log, **others)
    listeners = parse_listeners(on_event)
    auto = Prediction() if is_auto else None
    return replace(options, promise=promise, on_event=listeners, auto=auto), tiers


def _refuse_log_of_auto() -> None:
    raise OptionError(
        "log= and method='auto' exclude each other: each start chooses if there is a log",
        hint="method='logged' with log=; or lose_at_most= and even_if=",
    )


def promised_options(
    promise: Promise,
    run: PurePath,
    *,
    method: str | Method | None,
    every: int | str | Every | None,
    log: LogOptions | None,
    tiers: Sequence[Place],
) -> PromisedOptions:
    """Choose the options that keep a promise.

    Args:
        run: run folder.
        method: the user's method. None: one with a dense log. Without a log bases keep the promise.
        every: interval between bases. With a log it only bounds the time that a resume takes.
        log: the user's options of the log, which the promise decides on: only ``history`` and
            ``watch`` may be set.
        tiers: the user's places for copies.

    Raises:
        OptionError: the promise cannot be kept; says what is missing.
    """
    chosen = _method_of(promise, method)
    _refuse_contradictions(log)
    promise, tiers = _with_holder(promise, run, tiers, logs=chosen.log != "none")
    named = "logged" if method is None else method
    if chosen.log == "none":
        bases = _bases_every(promise, every)
        return PromisedOptions(promise, named, bases, None, tiers)
    return PromisedOptions(promise, named, every, _log_options(promise, log), tiers)


def _method_of(promise: Promise, method: str | Method | None) -> Method:
    if method is None:
        return presets["logged"]
    chosen = presets.get(method) if isinstance(method, str) else method
    if not isinstance(chosen, Method):
        raise OptionError(
            f"method={method!r} is no method", hint="omit it: lose_at_most= chooses one"
        )
    if chosen.log == "adaptive":
        raise _refusal(
            promise,
            f"method={method!r} records approximate gradients, so a step that comes back is not "
            "the one that was lost",
            "omit method=",
        )
    if chosen.base in ("multistep", "scheduled"):
        raise _refusal(
            promise,
            f"no step can wait for a base of method={method!r}, which is complete only after "
            "further steps",
            "omit method=",
        )
    if chosen.in_memory:
        raise _refusal(promise, f"method={method!r} keeps most bases in memory", "omit method=")
    return chosen


def _refuse_contradictions(log: LogOptions | None) -> None:
    plain = LogOptions()
    given = log or plain
    decided = [
        name
        for name in ("to", "lag_steps", "in_flight_steps", "batch_steps")
        if getattr(given, name) != getattr(plain, name)
    ]
    # A history needs to="disk" to be accepted at all.
    if decided == ["to"] and given.history != plain.history:
        return
    if decided:
        raise OptionError(
            f"LogOptions.{decided[0]} and lose_at_most= exclude each other: the promise decides "
            "where the log is, and how far it may lag",
            hint="omit one of them",
        )


def _with_holder(
    promise: Promise, run: PurePath, tiers: Sequence[Any], *, logs: bool
) -> tuple[Promise, Sequence[Any]]:
    """Return the promise with the places that survive the failure, and the places for copies with
    what it needs."""
    kind = mounted_as(run)
    if promise.even_if == "process":
        return replace(promise, holder="keeper"), tiers
    if promise.even_if == "power" or is_on_network(kind):
        if is_in_memory(kind):
            why = f"{run} is in memory ({kind}), and lost with the machine"
            raise _refusal(promise, why, "put the run folder on a disk")
        return replace(promise, holder="disk"), tiers
    places, peers = split_peers(tiers)
    if any(_is_store(one) for one in places):
        whole = _with_logs(places, _half(promise.steps or 1)) if logs else places
        found = replace(promise, holder="store", places=_surviving(promise, places, peers))
        return found, [*whole, *([] if peers is None else [peers])]
    if promise.even_if == "node" and (peers is not None or _nodes() > 1):
        promise = replace(promise, holder="peer", places=(PEER,))
        return promise, [*places, _checked_peers(promise, peers or PeerOptions(), logs=logs)]
    where = "" if kind is None else f" ({kind})"
    why = f"{run} is on this machine{where}, and no place for copies survives it"
    hint = 'tiers=["s3://bucket/prefix"]; or a run folder on a network file system'
    raise _refusal(promise, why, hint + "; or several nodes" * (promise.even_if == "node"))


def _surviving(
    promise: Promise, places: Sequence[Any], peers: PeerOptions | None
) -> tuple[str, ...]:
    """Return the names of the places with an exact log that survive the failure."""
    stores = tuple(as_options(one).where for one in places if _is_store(one))
    # The peers of a rack may die with it.
    survives = peers is not None and promise.even_if == "node" and peers.log == "whole"
    return stores + (PEER,) * survives


def _checked_peers(promise: Promise, peers: PeerOptions, *, logs: bool) -> PeerOptions:
    if logs and peers.log != "whole":
        why = f"PeerOptions.log={peers.log!r} does not send the exact log"
        raise _refusal(promise, why, 'PeerOptions(log="whole")')
    return peers


def _refusal(promise: Promise, why: str, hint: str) -> OptionError:
    return OptionError(f"it cannot be promised that {promise.in_words}: {why}", hint=hint)


def _is_store(place: Any) -> bool:
    if isinstance(place, PeerOptions) or place == "peer":
        return False
    return survival_of(as_options(place).where) == "rack"


def _with_logs(places: Sequence[Any], steps: int) -> list[Any]:
    """Return the places; each store gets the log, so many steps at a time at most."""
    found = []
    for one in places:
        if _is_store(one):
            options = as_options(one)
            one = replace(options, log="whole", log_steps=min(options.log_steps, steps))
        found.append(one)
    return found


def _nodes() -> int:
    """Return the number of nodes that a launcher has announced; 1 without one."""
    try:
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError, ZeroDivisionError):
        return 1


def _log_options(promise: Promise, log: LogOptions | None) -> LogOptions:
    given = log or LogOptions()
    if promise.holder != "disk":
        return given
    if promise.steps is not None:
        batch_steps = min(_BATCH_STEPS_MAX, _half(promise.steps))
        return replace(given, to="disk", lag_steps=promise.steps - 1, batch_steps=batch_steps)
    # One at a time: a segment of several steps might take longer than the time to fill.
    return replace(given, to="disk", batch_steps=1)


def _half(steps: int) -> int:
    """Return the steps between two writes: each has the time of as many steps before training has
    to wait for it."""
    return max(1, steps // 2)


def _bases_every(promise: Promise, every: int | str | Every | None) -> Every:
    """Return an interval at which a base is safe before the next but one would be needed."""
    given = Every.parse(every)
    if promise.steps is not None:
        most = _half(promise.steps)
        return Every(steps=most if given.steps is None else min(most, given.steps))
    assert promise.seconds is not None
    most_s = promise.seconds / 2
    if given.steps is not None and given.steps == 1:
        return given
    return Every(seconds=most_s if given.seconds is None else min(most_s, given.seconds))


# --- Chosen by measurements -------------------------------------------------------------


def with_chosen_method(
    options: Options,
    place: RunPlace,
    state: State,
    refusal_of: Callable[[Options, RunPlace, State], str],
    path: str | os.PathLike[str],
    tiers: Sequence[Place],
) -> tuple[Options, RunPlace]:
    """Return the options with the method that ``method="auto"`` chooses; others as they are.

    Which entries a rank writes, and what copies hold, depends on the method: place and state follow
    it. Of several ranks rank 0 chooses, as all have to use the same. Prints the choice.

    Args:
        refusal_of: returns why options cannot be chosen; empty if they can.
        path: run folder or URL, as the user has given it.
        tiers: places for copies, as the user has given them.

    Raises:
        DeadlineError: another rank does not construct its Checkpointer.
    """
    if options.auto is None:
        return options, place
    options = _with_choice(options, place, lambda found: refusal_of(found, place, state))
    place = place.for_options(options, with_log_in_store(path, options, tiers))
    state.become(place.ranks)
    return options, place


def _with_choice(
    options: Options, place: RunPlace, refusal_of: Callable[[Options], str]
) -> Options:
    observed = _observed(place, options.every)
    refused = _refused(options, refusal_of)
    choice = choose(
        observed,
        host_bytes=options.budget.host_bytes or memory_available_bytes() // 2,
        overhead=options.budget.overhead,
        refused=refused,
        why_not_on_disk=_why_not_on_disk(options),
    )
    found = choice.candidate
    why_not_logged = (observed or Observed()).why_not_logged
    decision = _Decision(
        choice.method,
        choice.why,
        log_to="" if found is None else found.log_to,
        wasted=None if found is None else found.wasted,
        interval_steps=None if found is None else found.interval_steps,
        base_cost_s=None if found is None else found.base_cost_s,
        base_write_s=None if found is None else found.base_write_s,
        refused={one: why or why_not_logged for one, why in refused.items()},
    )
    if place.job is not None:
        decision = _agreed(place.job.exchange("choose a method", decision._asdict()))
    level = logging.INFO if place.ranks.rank == 0 else logging.DEBUG
    log_or_print(f"{place.run}: auto: {decision.method}: {decision.why}", level=level)
    chosen = _with_method(options, decision.method, decision.log_to)
    found_by_earlier = "" if observed is None or observed.is_unchecked else why_not_logged
    auto = Prediction(
        decision.wasted,
        decision.interval_steps,
        decision.base_cost_s,
        decision.base_write_s,
        found_by_earlier,
    )
    return replace(chosen, auto=auto)


def _with_method(options: Options, method: str, log_to: str = "") -> Options:
    log = LogOptions(to=log_to) if log_to else options.log
    return replace(options, method=presets[method], method_name=method, log=log)


def _refused(options: Options, refusal_of: Callable[[Options], str]) -> dict[str, str]:
    """Return why methods other than the first one would be refused, by method."""
    found = {one: refusal_of(_with_method(options, one)) for one in (HELD, LOGGED)}
    if not options.keeper.process:
        found[LOGGED] = "KeeperOptions(process=False): a log in memory dies with training"
    return found


class _Decision(NamedTuple):
    """Choice of one rank, as the ranks exchange it."""

    method: str
    why: str
    log_to: str
    wasted: float | None
    interval_steps: int | None
    base_cost_s: float | None
    base_write_s: float | None
    refused: dict[str, str]


def _agreed(votes: Sequence[dict[str, Any]]) -> _Decision:
    """Return the choice of rank 0, unless another rank would refuse it."""
    decision = _Decision(**votes[0])
    for vote in votes:
        if why := vote["refused"].get(decision.method):
            return _Decision(FIRST, why, "", None, None, None, None, {})
    return decision


def _observed(place: RunPlace, every: Every) -> Observed | None:
    if place.seams.events is None:
        return None
    # A log that cannot be read is no reason not to start.
    with contextlib.suppress(OSError):
        events = read_events(
            place.run, rank=place.ranks.rank, filesystem=place.seams.events, newest=_TIMELINES_MAX
        )
        found = Observed.of(events)
        if found is None:
            return None
        found.given_mtbf_s = every.mtbf_s
        found.given_interval_s = every.seconds
        if every.steps is not None and found.step_s is not None:
            found.given_interval_s = every.steps * found.step_s
        return found.followed_by(keeper_lives=_keeper_lives(place.run))
    return None


def _keeper_lives(run: PurePath) -> bool:
    """Return True if a keeper of the last start has outlived it."""
    try:
        return any(info.run == str(run) for info in list_keepers())
    except EverstepError:
        return False


def _why_not_on_disk(options: Options) -> str:
    for name in ("disk_bytes", "write_bytes_per_day"):
        if getattr(options.budget, name) is not None:
            return f"with Budget({name}=) no log is written to disk"
    return ""
