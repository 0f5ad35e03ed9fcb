"""Options of every public class: unknown names and wrong values are refused when they are given."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.config.given import checked, named, plain
from everstep.errors import OptionError, StateError
from everstep.options import Budget, Every, KeeperOptions, LogOptions, Method, Preemption
from everstep.tiers.options import PeerOptions, TierOptions, split_peers, validate_tiers

CLASSES: list[Any] = [
    Budget,
    Every,
    KeeperOptions,
    LogOptions,
    Method,
    PeerOptions,
    Preemption,
    TierOptions,
]
THREAD = KeeperOptions(process=False)

# What a caller may give to each field, beside what it is by default; all else of ODD is refused.
FITS: dict[str, tuple[Any, ...]] = {
    "Budget.host_bytes": (None, 5),
    "Budget.disk_bytes": (None, 5),
    "Budget.write_bytes_per_day": (None, 5),
    "Budget.device_bytes": (5, 0),
    "Budget.overhead": (None, 0.5),
    "Every.steps": (None, 5),
    "Every.seconds": (None, 5, 0.5),
    "Every.auto": (True, False),
    "Every.mtbf_s": (None,),
    "KeeperOptions.process": (True, False),
    "KeeperOptions.cores": (None, (1,), [1], {1}),
    "KeeperOptions.threads": (5,),
    "KeeperOptions.linger_s": (5, 0, 0.5),
    "LogOptions.to": (),
    "LogOptions.batch_steps": (None, 5),
    "LogOptions.history": (),
    "LogOptions.watch": (True, False),
    "LogOptions.lag_steps": (None,),
    "LogOptions.in_flight_steps": (5, 0),
    "LogOptions.audit": (None, True, False),
    "LogOptions.ratio": (0.5,),
    "Method.base": (),
    "Method.log": (),
    "Method.apply": (),
    "Method.tiers": (),
    "Method.disk_every": (),
    "Method.parts": (),
    "Method.overlap_forward": (False,),
    "Method.held_steps": (),
    "Method.chunk_bytes": (),
    "Method.plan": (None,),
    "Method.rebuild": (),
    "PeerOptions.bytes_per_s": (None, 5, 0.5),
    "PeerOptions.host_bytes": (None, 5),
    "PeerOptions.emulated_node": (None, "x", "10 min"),
    "PeerOptions.if_there": (True, False),
    "PeerOptions.log": (),
    "PeerOptions.log_ratio": (0.5,),
    "PeerOptions.log_int8_below": (5, 0),
    "Preemption.signals": (),
    "Preemption.grace_s": (5, 0.5),
    "Preemption.agree_steps": (5,),
    "TierOptions.where": ("x", "10 min", Path("x")),
    "TierOptions.every_s": (5, 0, 0.5),
    "TierOptions.keep": (None, 5),
    "TierOptions.log": (),
    "TierOptions.log_steps": (5,),
    "TierOptions.log_ratio": (0.5,),
    "TierOptions.log_int8_below": (5, 0),
    "TierOptions.opens": ("", "x", "10 min"),
    "TierOptions.module_dir": ("", "x", "10 min"),
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 5, -1, 0.5, -0.5, math.nan, math.inf, -math.inf, 10**400),
    *("", "x", "10 min", b"x", Path("x"), object),
    *([], (), {}, [1], (1,), {1}, (True,), [None], {"a": 1}),
    *(np.int64(5), np.bool_(True), np.arange(3)),
)


@pytest.mark.parametrize("field", FITS)
def test_each_field_takes_what_fits_and_refuses_all_else(field: str) -> None:
    """With one kind of error, which names class and field or what the field means."""
    kind, _, name = field.partition(".")
    make = next(one for one in CLASSES if one.__name__ == kind)
    needed = {"where": "/copies"} if make is TierOptions and name != "where" else {}
    for value in ODD:
        if any(repr(plain(value)) == repr(one) for one in FITS[field]):
            make(**needed, **{name: value})
            continue
        with pytest.raises(OptionError) as caught:
            make(**needed, **{name: value})
        parts = value if isinstance(value, (tuple, list)) else ()
        said = [name, *map(repr, (plain(value), *parts))]
        assert any(words in caught.value.message for words in said)


def test_no_field_is_forgotten() -> None:
    fields = {
        f"{one.__name__}.{field.name}" for one in CLASSES for field in dataclasses.fields(one)
    }
    assert fields == set(FITS)


@pytest.mark.parametrize("make", CLASSES, ids=lambda one: one.__name__)
def test_unknown_missing_and_surplus_arguments(make: Any) -> None:
    first = dataclasses.fields(make)[0].name
    with pytest.raises(OptionError, match=f"{make.__name__} has no option '{first}x'") as caught:
        make(**{f"{first}x": 1})
    assert caught.value.hint == f"did you mean {first!r}?"
    with pytest.raises(OptionError, match=f"{make.__name__}: too many positional arguments"):
        make(*range(20))


@pytest.mark.parametrize("make", CLASSES, ids=lambda one: one.__name__)
def test_a_checked_class_is_still_a_frozen_dataclass(make: Any) -> None:
    made = make("/copies") if make is TierOptions else make()
    assert dataclasses.replace(made) == made
    assert make.__init__.__wrapped__.__name__ == "__init__"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(make)[0].name, None)


def test_a_fault_of_the_class_itself_is_not_hidden() -> None:
    @checked
    @dataclasses.dataclass(frozen=True)
    class Faulty:
        size: int = 1

        def __post_init__(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Faulty(2)
    with pytest.raises(OptionError, match=r"Faulty\.size must be a whole number, not 'x'"):
        Faulty("x")  # type: ignore[arg-type]


def test_a_named_function_speaks_for_itself() -> None:
    @named("send")
    def send(what: str, *, twice: bool = False) -> str:
        """Sends."""
        return what * (1 + twice)

    assert send("a", twice=True) == "aa"
    assert send.__doc__ == "Sends."
    with pytest.raises(OptionError, match="missing a required argument: 'what'"):
        send()  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="too many positional") as caught:
        send("a", True)  # type: ignore[misc]
    assert caught.value.hint == "by name: twice="
    with pytest.raises(OptionError, match="did you mean 'twice'"):
        send("a", twce=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ration": 0.1}, "did you mean 'ratio'"),
        ({"ratio": "1%"}, "ratio must be in (0, 1], not '1%'"),
        ({"ratio": True}, "ratio must be in (0, 1], not True"),
        ({"ratio": math.nan}, "ratio must be in (0, 1], not nan"),
        ({"kind": 5}, "Compressor(kind=) must be a string, not 5"),
        ({"kind": "topkk"}, "did you mean 'topk'"),
        ({"dense_below": 1.5}, "Compressor(dense_below=) must be a whole number, not 1.5"),
        ({"dense_below": -1}, "dense_below must be at least 0"),
        ({"error_feedback": "no"}, "(error_feedback=) must be True or False, not 'no'"),
        ({"optimizer": None}, "Compressor(optimizer=) must be an Optimizer, not None"),
    ],
)
def test_compression_is_asked_for_in_the_same_way(options: dict[str, Any], said: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(OptionError) as caught:
        everstep.compress.Compressor(**{"optimizer": optimizer, **options})
    assert said in str(caught.value)


def test_lists_and_sets_do_where_an_order_or_a_choice_is_meant() -> None:
    assert KeeperOptions(cores={3, 1}).cores == (1, 3)  # type: ignore[arg-type]
    assert KeeperOptions(cores=range(2)).cores == (0, 1)  # type: ignore[arg-type]
    assert Preemption(signals=["SIGUSR1"]).signals == ("SIGUSR1",)  # type: ignore[arg-type]
    assert Method(tiers=["disk"]) == Method()  # type: ignore[arg-type]


class ListConfig(Sequence[Any]):
    """A sequence that is no list, as configuration libraries make them (OmegaConf)."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def test_any_sequence_is_taken_where_a_list_is(run_folder: Path, tmp_path: Path) -> None:
    made: Any = ListConfig
    assert KeeperOptions(cores=made(np.int64(0), 1)).cores == (0, 1)
    assert Preemption(signals=made("SIGTERM", "SIGUSR1")).signals == ("SIGTERM", "SIGUSR1")
    assert Method(tiers=made("disk")) == Method()
    places = [str(tmp_path / "copies"), TierOptions("/mnt/copies")]
    assert split_peers(made(*places)) == split_peers(places)
    given = {"declared": made(), "static": made("model/*"), "tiers": made(places[0])}
    state = {"model": torch.nn.Linear(1, 1)}
    with everstep.Checkpointer(run_folder, state, every=None, **given) as ckpt:
        ckpt.resume()


@pytest.mark.parametrize("text", ["SIGTERM", b"SIGTERM", bytearray(b"SIGTERM")], ids=repr)
def test_a_string_is_no_sequence(text: Any, run_folder: Path) -> None:
    with pytest.raises(OptionError, match="must be a list of names of signals"):
        Preemption(signals=text)
    with pytest.raises(OptionError, match=r"KeeperOptions\.cores must be a list"):
        KeeperOptions(cores=text)
    with pytest.raises(OptionError, match="must be a list of places"):
        everstep.Checkpointer(run_folder, {"n": 1}, tiers=text)
    assert not run_folder.exists()


def test_signals_may_be_those_of_python() -> None:
    given: Any = [signal.SIGTERM, "SIGUSR1"]
    assert Preemption(signals=given).signals == ("SIGTERM", "SIGUSR1")


def test_numbers_of_numpy_are_numbers() -> None:
    seconds: Any = np.float32(2.5)
    made = KeeperOptions(linger_s=seconds).linger_s
    assert (type(made), made) == (float, 2.5)


def test_a_thread_has_no_cores_of_its_own() -> None:
    """They were ignored: who gave them believed that training had its cores to itself."""
    with pytest.raises(OptionError, match=r"cores=\(1, 3\) needs a keeper process") as caught:
        KeeperOptions(process=False, cores=(1, 3))
    assert caught.value.hint == "omit cores=, or use process=True"
    assert KeeperOptions(cores=(1, 3)).process


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_whole_numbers_of_numpy_are_whole_numbers(kind: Any, run_folder: Path) -> None:
    """As Python's own from there on: records and messages take nothing else."""
    five: Any = kind(5)
    made = (
        Every(steps=five),
        Budget(host_bytes=five),
        TierOptions("/c", keep=five),
        Method(base="multistep", parts=five),
    )
    for one in (Every.parse(five).steps, made[0].steps, made[1].host_bytes, made[2].keep):
        assert (type(one), one) == (int, 5)
    assert type(made[3].parts) is int
    cores = KeeperOptions(cores=(five, kind(3))).cores
    assert (cores, {type(core) for core in cores or ()}) == ((5, 3), {int})
    with everstep.Checkpointer(
        run_folder, {"n": 1}, keeper=THREAD, method="sync", every=five, keep=kind(2)
    ) as ckpt:
        for _ in range(5):
            ckpt.step()
        ckpt.wait(kind(60))
    with everstep.Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=None) as ckpt:
        assert ckpt.resume(step=five).step == 5


@pytest.mark.parametrize(
    "odd",
    [np.bool_(True), np.float64(5.0), np.array([5]), np.array(5), torch.tensor(5), True, 5.0],
    ids=repr,
)
def test_what_only_looks_like_one_is_none(odd: Any, run_folder: Path) -> None:
    makes: list[Callable[[], object]] = [
        lambda: Every(steps=odd),
        lambda: Budget(host_bytes=odd),
        lambda: KeeperOptions(cores=(odd,)),
        lambda: everstep.Checkpointer(run_folder, {"n": 1}, every=odd),
        lambda: everstep.Checkpointer(run_folder, {"n": 1}, keep=odd),
    ]
    for make in makes:
        with pytest.raises(OptionError):
            make()
    assert not run_folder.exists()


def test_a_place_may_be_a_path() -> None:
    named, peers = split_peers([Path("/mnt/copies")])
    assert peers is None
    assert [one.where for one in validate_tiers(named, 3)] == ["/mnt/copies"]
    assert TierOptions(Path("/mnt/copies")).where == "/mnt/copies"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tiers", "hint"),
    [
        (None, 'tiers=["s3://bucket/prefix"]'),
        (5, 'tiers=["s3://bucket/prefix"]'),
        ({"/mnt"}, 'tiers=["s3://bucket/prefix"]'),
        ("peer", "tiers=['peer']"),
        (Path("/mnt"), "tiers=[PosixPath('/mnt')]"),
        (PeerOptions(), "tiers=[PeerOptions("),
    ],
    ids=repr,
)
def test_places_are_a_list(tiers: Any, hint: str) -> None:
    with pytest.raises(OptionError, match="must be a list of places") as caught:
        split_peers(tiers)
    assert hint in str(caught.value.hint)


def test_a_size_in_words_is_told_in_bytes() -> None:
    with pytest.raises(OptionError) as caught:
        Budget(host_bytes="1.5GB")  # type: ignore[arg-type]
    assert caught.value.hint == "did you mean 1500000000?"


def test_a_history_needs_a_log_on_disk() -> None:
    """Nothing would keep it: the log in memory goes back to the newest base."""
    with pytest.raises(OptionError, match="needs a log on disk") as caught:
        LogOptions(history="2h")
    assert caught.value.hint == "LogOptions(to=\"disk\", history='2h')"


@pytest.mark.parametrize("method", ["lazy", "sync", "gockpt", "gemini", Method(base="async")])
def test_a_log_is_refused_where_there_is_none(method: Any, run_folder: Path) -> None:
    """It was ignored: who asked for it believed that every step could be recovered."""
    for log in (LogOptions(), LogOptions(to="disk")):
        with pytest.raises(OptionError, match="needs a method with a gradient log") as caught:
            everstep.Checkpointer(run_folder, {"n": 1}, method=method, log=log)
        assert "method='logged'" in str(caught.value.hint)
    assert not run_folder.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": None}, "must be a path"),
        ({"state": None}, "must be a dict of named values"),
        ({"seams": 5}, "seams must be everstep.seams.Seams"),
        ({"on_failure": 5}, "or a function of the error"),
        ({"tiers": None}, "must be a list of places"),
        ({"keeper": {"process": False}}, "keeper must be an everstep.KeeperOptions"),
        ({"log": True}, "log must be an everstep.LogOptions"),
    ],
)
def test_arguments_of_a_checkpointer(given: dict[str, Any], said: str, run_folder: Path) -> None:
    with pytest.raises(OptionError) as caught:
        everstep.Checkpointer(**{"path": run_folder, "state": {"n": 1}, **given})
    assert said in str(caught.value)
    assert not run_folder.exists()


def test_a_checkpointer_needs_its_first_two_arguments_and_names_for_the_rest(
    run_folder: Path,
) -> None:
    make: Any = everstep.Checkpointer
    with pytest.raises(OptionError, match="missing a required argument: 'path'"):
        make()
    with pytest.raises(OptionError, match="missing a required argument: 'state'"):
        make(run_folder)
    with pytest.raises(OptionError, match="too many positional") as caught:
        make(run_folder, {"n": 1}, "sync")
    assert "by name: method=, every=, lose_at_most=, even_if=, keep=" in str(caught.value.hint)
    assert not run_folder.exists()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda it: it.resume(stp=1), "did you mean 'step'"),
        (lambda it: it.resume(1.0), "step must be an integer >= 0"),
        (lambda it: it.resume(True), "step must be an integer >= 0"),
        (lambda it: it.resume(strict="no"), "resume(strict=) must be True or False, not 'no'"),
        (lambda it: it.resume(strict=0), "resume(strict=) must be True or False, not 0"),
        (lambda it: it.rewind(), "missing a required argument: 'step'"),
        (lambda it: it.rewind(-1), "step must be an integer >= 0"),
        (lambda it: it.rewind(None), "rewind(step=) must be a whole number, not None"),
        (lambda it: it.wait("10s"), "timeout_s='10s'"),
        (lambda it: it.wait(math.nan), "timeout_s=nan"),
        (lambda it: it.wait(-1), "timeout_s=-1"),
        (lambda it: it.wait(True), "timeout_s=True"),
        (lambda it: it.wait(timeout=1), "did you mean 'timeout_s'"),
    ],
)
def test_arguments_of_its_calls(call: Callable[[Any], Any], said: str, run_folder: Path) -> None:
    with everstep.Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=None) as ckpt:
        with pytest.raises(OptionError) as caught:
            call(ckpt)
        assert said in str(caught.value)
        assert ckpt.resume().step == 0  # it goes on


def test_a_closed_checkpointer_says_why_it_is(run_folder: Path) -> None:
    """By ``close()``, or by the same cell of a notebook, run again."""
    first = everstep.Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=None)
    second = everstep.Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=None)
    calls: list[Callable[[Any], Any]] = [
        lambda it: it.resume(),
        lambda it: it.rewind(1),
        lambda it: it.step(),
        lambda it: it.save(),
        lambda it: it.wait(),
        lambda it: it.before_update(),
        lambda it: it.__enter__(),
    ]
    for call in calls:
        with pytest.raises(StateError, match="a later one in this process has replaced it"):
            call(first)
    first.close()
    second.resume()
    second.close()
    second.close()
    for closed in (first, second):
        for call in calls:
            with pytest.raises(StateError, match="is closed") as caught:
                call(closed)
            assert "make a new one for the same run" in str(caught.value.hint)
            assert caught.value.path == str(run_folder)


def test_two_in_one_process_on_one_run_under_two_names(run_folder: Path) -> None:
    """They are one, by whatever links each was told of it."""
    alias = run_folder.with_name("alias")
    first = everstep.Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=1)
    first.resume()
    first.step()
    alias.symlink_to(run_folder)
    with everstep.Checkpointer(alias, {"n": 1}, keeper=THREAD, every=1) as second:
        with pytest.raises(StateError, match="a later one in this process has replaced it"):
            first.step()
        assert second.resume().step == 1
        second.step()
    first.close()
