"""What a user may choose, and what is refused with the nearest thing that was meant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everstep
from everstep.config.given import nearest
from everstep.errors import EverstepError, OptionError
from everstep.options import Every, Method, presets
from tests.support.given import options


@pytest.mark.parametrize("name", presets)
def test_presets(name: str) -> None:
    chosen = options(method=name)
    assert (chosen.method, chosen.method_name) == (presets[name], name)
    # The first name of those that stand for the same.
    assert presets[options(method=presets[name]).method_name] == presets[name]


def test_a_preset_cannot_be_changed_by_anybody() -> None:
    with pytest.raises(TypeError):
        presets["sync"] = Method()  # type: ignore[index]
    with pytest.raises(AttributeError):
        presets["sync"].base = "async"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "asink"}, "did you mean 'async'"),
        ({"method": "Sync"}, "did you mean 'sync'"),
        ({"method": "zzz"}, "there are: sync, async"),
        ({"method": None}, "a preset's name or a Method"),
        ({"method": ["sync"]}, "a preset's name or a Method"),
        ({"keep": 0}, "a whole number of bases, from 1, not 0"),
        ({"keep": -1}, "a whole number of bases, from 1, not -1"),
        ({"keep": 2.0}, "a whole number of bases, from 1, not 2.0"),
        ({"keep": None}, "a whole number of bases, from 1, not None"),
        ({"keep": True}, "a whole number of bases, from 1, not True"),
        ({"keep": "3"}, "a whole number of bases, from 1, not '3'"),
        ({"on_failure": "rise"}, "did you mean 'raise'"),
        ({"on_failure": None}, "there are: raise, warn"),
        ({"budget": 1 << 30}, "an everstep.Budget"),
        ({"budget": {"host_bytes": 5}}, "an everstep.Budget"),
        ({"every": 0}, "at least one step"),
        ({"every": -5}, "at least one step"),
        ({"every": True}, "not an interval"),
        ({"every": 1.5}, "not an interval"),
        ({"every": ""}, "not an interval"),
        ({"every": "0min"}, "not an interval"),
        ({"every": "-2s"}, "not an interval"),
        ({"every": "5 parsecs"}, "not an interval"),
        ({"every": "1e3s"}, "not an interval"),
        ({"every": "10"}, "not an interval"),
        ({"every": "nans"}, "not an interval"),
        ({"every": "1s 2s"}, "not an interval"),
        ({"every": "atuo"}, "not an interval"),
        (
            {"progress_timeout_s": 0},
            "progress_timeout_s=0 must be a number of seconds, more than 0",
        ),
        ({"progress_timeout_s": -1}, "progress_timeout_s=-1"),
        ({"progress_timeout_s": math.nan}, "progress_timeout_s=nan"),
        ({"progress_timeout_s": math.inf}, "progress_timeout_s=inf"),
        ({"progress_timeout_s": "10"}, "progress_timeout_s='10'"),
        ({"progress_timeout_s": None}, "progress_timeout_s=None"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        options(**changes)
    assert said in str(error.value)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, EverstepError)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base": "asynch"}, "did you mean 'async'"),
        ({"base": "fuzzy"}, "there are: sync, async"),
        ({"base": "multistp"}, "did you mean 'multistep'"),
        ({"base": "multistep", "parts": 0}, '"auto" or 1 to 24, not 0'),
        ({"base": "multistep", "parts": 25}, '"auto" or 1 to 24, not 25'),
        ({"base": "multistep", "parts": True}, '"auto" or 1 to 24, not True'),
        ({"base": "multistep", "parts": "seven"}, "\"auto\" or 1 to 24, not 'seven'"),
        ({"base": "multistep", "overlap_forward": 1}, "must be True or False, not 1"),
        ({"base": "multistep", "overlap_forward": True, "held_steps": 9}, "must be 1 to 8, not 9"),
        ({"base": "multistep", "overlap_forward": True, "held_steps": 0}, "must be 1 to 8, not 0"),
        ({"base": "multistep", "held_steps": 2}, "held_steps needs overlap_forward=True"),
        ({"base": "multistep", "chunk_bytes": 0}, '"auto" or at least 4096, not 0'),
        ({"base": "multistep", "chunk_bytes": "4MB"}, "\"auto\" or at least 4096, not '4MB'"),
        ({"chunk_bytes": 8192}, "need base='multistep', not base='lazy'"),
        ({"base": "multistep", "log": "adaptive"}, "lossy gradients"),
        ({"base": "multistep", "log": "dense", "apply": "replica"}, "would capture none"),
        ({"base": "multistep", "log": "dense", "overlap_forward": True}, "an update ends when"),
        ({"base": "multistep", "log": "topk", "rebuild": "recovery"}, "written twice"),
        ({"parts": 7}, "need base='multistep', not base='lazy'"),
        ({"overlap_forward": True}, "need base='multistep', not base='lazy'"),
        ({"log": "adaptiv"}, "did you mean 'adaptive'"),
        ({"apply": "replica"}, "needs a log to apply"),
        ({"tiers": ("disk", "s3")}, "no tier 's3'"),
        ({"tiers": ()}, "tiers must be"),
        ({"tiers": ("disk", "disk")}, "tiers must be"),
    ],
)
def test_methods_that_do_not_exist_yet(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        Method(**fields)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "log", "why"),
    [
        ({}, {"to": "disk"}, None),
        ({}, {"to": "memory"}, "the log is in memory only"),
        ({"keep": 1}, {"to": "disk"}, "no base before the newest one is kept"),
        (
            {"keeper": everstep.KeeperOptions(process=False)},
            {"to": "disk"},
            "the keeper is a thread of the training process",
        ),
    ],
    ids=["on disk", "in memory", "one base", "a thread"],
)
def test_background_audits(changes: dict[str, Any], log: dict[str, Any], why: str | None) -> None:
    """Where they can be, unless they are not wanted; refused where they cannot be and are."""
    changes = {"method": "logged", **changes}
    assert options(**changes, log=everstep.LogOptions(**log)).audits == (why is None)
    assert not options(**changes, log=everstep.LogOptions(**log, audit=False)).audits
    wanted = everstep.LogOptions(**log, audit=True)
    if why is None:
        assert options(**changes, log=wanted).audits
        assert not options(**{**changes, "method": "lazy"}).audits
        return
    with pytest.raises(OptionError, match=why):
        options(**changes, log=wanted)


def test_an_audit_is_wanted_or_not() -> None:
    with pytest.raises(OptionError, match=r"LogOptions\.audit"):
        everstep.LogOptions(audit="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1GB", math.inf])
@pytest.mark.parametrize("name", ["host_bytes", "disk_bytes", "write_bytes_per_day"])
def test_budgets_are_positive_numbers_of_bytes(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"Budget.{name}"):
        everstep.Budget(**{name: value})


@given(
    number=st.decimals("0.001", 10**6, places=3),
    unit=st.sampled_from(["s", "sec", "m", "min", "h", "d"]),
    space=st.sampled_from(["", " "]),
)
def test_intervals_of_time(number: Any, unit: str, space: str) -> None:
    every = Every.parse(f"{number}{space}{unit}")
    factor = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[unit]
    assert every.steps is None
    assert every.seconds is not None
    assert math.isclose(every.seconds, float(number) * factor)
    assert every.due(1, every.seconds)
    assert not every.due(1, every.seconds * 0.999)


@given(steps=st.integers(1, 10**9), step=st.integers(1, 10**9))
def test_intervals_of_steps(steps: int, step: int) -> None:
    assert Every.parse(steps).due(step, 1e9) == (step % steps == 0)


def test_automatic_intervals() -> None:
    assert Every.parse(" auto ") == Every(auto=True)
    assert not Every.parse("auto").due(100, 1e9), "whoever measures decides"
    given = Every(auto=True, mtbf_s=4 * 3600)
    assert Every.parse(given) is given


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"auto": True, "steps": 5}, "exclude each other"),
        ({"seconds": 3.0, "steps": 5}, "exclude each other"),
        ({"mtbf_s": 3600}, "auto=True only"),
        ({"auto": True, "mtbf_s": 0}, "auto=True only"),
        ({"auto": True, "mtbf_s": math.nan}, "auto=True only"),
        ({"auto": True, "mtbf_s": "4h"}, "auto=True only"),
        ({"steps": 0}, "at least one step"),
        ({"steps": 1.5}, "at least one step"),
        ({"seconds": 0}, "more than 0"),
    ],
)
def test_intervals_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Every(**fields)


@pytest.mark.parametrize("share", [0, 1, -0.1, math.nan, "1%", True])
def test_a_share_of_the_time_that_cannot_be(share: Any) -> None:
    with pytest.raises(OptionError, match=r"Budget\.overhead must be a share"):
        everstep.Budget(overhead=share)


def test_on_demand() -> None:
    assert not Every.parse(None).due(100, 1e9)


@given(value=st.one_of(st.text(max_size=8), st.integers(), st.floats(), st.binary(max_size=3)))
def test_an_interval_is_understood_or_refused(value: Any) -> None:
    try:
        every = Every.parse(value)
    except OptionError:
        return
    assert (every.steps or 0) >= 1 or (every.seconds or 0) > 0


def test_the_nearest_name() -> None:
    assert nearest("evrey", ["every", "keep"]) == "every"
    assert nearest("zzz", ["every", "keep"]) is None


@pytest.mark.parametrize(
    ("option", "meant"),
    [("evry", "every"), ("kepp", "keep"), ("onfailure", "on_failure"), ("methods", "method")],
)
def test_unknown_options_are_refused_with_the_nearest(
    option: str, meant: str, run_folder: Path
) -> None:
    with pytest.raises(OptionError, match=f"did you mean '{meant}'"):
        everstep.Checkpointer(run_folder, {"n": 1}, **{option: 1})
    assert not run_folder.exists()


@pytest.mark.parametrize(
    "path",
    [
        "memory://x",
        "file:///tmp/x",
        Path("s3://bucket/run"),
        "",
        "a\0b",
        b"bytes",
        None,
        5,
        Path,
    ],
    ids=repr,
)
def test_paths_that_are_no_folders(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError):
        everstep.Checkpointer(path, {"n": 1})
    assert list(tmp_path.iterdir()) == []


def test_paths_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("a", "b/c/d", Path("e"), tmp_path / "f:g", "ü ñ"):
        with everstep.Checkpointer(path, {"n": 1}, method="sync", every=None) as ckpt:
            ckpt.save()
        assert (tmp_path / path / "run.json").is_file()


def test_a_run_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with everstep.Checkpointer("run", {"n": 1}, method="async", every=None) as ckpt:
        monkeypatch.chdir(tmp_path / "elsewhere")
        ckpt.step()
        ckpt.save()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "run" / "timeline-00001").is_dir()


@pytest.mark.parametrize("given", ["5 parsecs", "10mins", "", 1.5, "nans", "10"])
def test_what_is_no_interval(given: object) -> None:
    with pytest.raises(OptionError) as caught:
        Every.parse(given)  # type: ignore[arg-type]
    assert "10min" in str(caught.value.hint)


def test_numbers_that_no_message_could_carry(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd: list[dict[str, Any]] = [{"keep": 2**70}, {"every": "9" * 20 + "h"}]
    for odd_options in odd:
        with pytest.raises(OptionError, match=r"at most|less than"):
            everstep.Checkpointer(run_folder, {"n": 1}, **odd_options)
    with pytest.raises(OptionError) as caught:
        everstep.Checkpointer(run_folder, {"n": 1}, every="0min")
    assert "did you mean" not in str(caught.value.hint)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(OptionError, match="the working directory was removed"):
        everstep.Checkpointer("run", {"n": 1})


def test_an_absolute_path_works_where_the_working_directory_was_removed(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for began_at in (0, 3):
        with everstep.Checkpointer(run_folder, {"n": 1}, every=1) as ckpt:
            assert ckpt.resume().step == began_at
            for _ in range(3):
                ckpt.step()
