"""The demo: its plan, its witnesses (each must be able to go red), its supervisor, its verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import everstep
from everstep.cli import app
from everstep.demo import child, supervisor
from everstep.demo.plan import (
    AFTER_CAPTURED,
    BEFORE_MANIFEST,
    BEFORE_RENAME,
    RANDOM_MOMENT,
    DemoPlan,
    KeeperKind,
    Kill,
    demo_plan,
    keeper_of,
    planned_kills,
)
from everstep.demo.report import (
    DemoReport,
    KillReport,
    StoredEntry,
    Survey,
    broken_promises,
    compare_entries,
    final_base,
    read_base,
    survey,
)
from everstep.demo.show import Position, introduce, present
from everstep.demo.supervisor import CHILD_COMMAND, Child, DemoError, run_demo
from everstep.errors import FormatError, KeeperError, OptionError, RecoveryError
from everstep.workloads import Training
from everstep.workloads.comparison import (
    Difference,
    JournalReader,
    JournalWriter,
    compare_fingerprints,
    compare_losses,
    fingerprint,
)
from tests.support.leftovers import MARK, processes_marked
from tests.support.trainers import start_trainer

MakeTraining = Callable[[int], Training]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gives the process its own settings back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


class Quiet:
    """A display that remembers; can be made to interrupt as Ctrl-C does."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.events: list[str] = []
        self.furthest = 0
        self._interrupt_at = interrupt_at

    def event(self, text: str) -> None:
        self.events.append(text)

    def progress(self, alone: Position, victim: Position) -> None:
        self.furthest = max(self.furthest, alone[0], victim[0])
        if self._interrupt_at is not None and self.furthest >= self._interrupt_at:
            raise KeyboardInterrupt


class TestPlan:
    @given(
        every=st.integers(1, 30),
        saves=st.integers(9, 60),
        rest=st.integers(0, 29),
        seed=st.integers(0, 2**32 - 1),
        keeper=st.sampled_from(["process", "thread", "none"]),
    )
    def test_kills_are_apart_and_inside_the_run(
        self, every: int, saves: int, rest: int, seed: int, keeper: KeeperKind
    ) -> None:
        steps = saves * every + rest % every
        *inside, moment = planned_kills(steps=steps, every=every, seed=seed, keeper=keeper)
        assert len(inside) == (3 if keeper == "process" else 2)
        assert all(kill.step % every == 0 for kill in inside)
        assert 0 <= moment.fraction < 1
        # A base is on disk before the first kill, and what comes back after a kill leaves at
        # least one base of its own before the next one.
        share = saves // (len(inside) + 1)
        assert inside[0].step >= 2 * every
        for number, kill in enumerate(inside):
            assert number * share * every < kill.step <= (number + 1) * share * every
        assert inside[-1].step + every <= moment.step
        assert moment.step + every <= steps, "no time for the last kill to arrive"

    def test_what_dies_depends_on_the_keeper(self) -> None:
        def planned(keeper: KeeperKind) -> list[tuple[str, str, str]]:
            kills = planned_kills(steps=120, every=10, seed=0, keeper=keeper)
            return [(kill.where, kill.keeper, kill.died) for kill in kills]

        assert planned("process") == [
            (BEFORE_RENAME, "dies", "trainer + keeper"),
            (BEFORE_MANIFEST, "dies", "trainer + keeper"),
            (AFTER_CAPTURED, "spared", "trainer"),
            (RANDOM_MOMENT, "spared", "trainer"),
        ]
        for keeper, fate, died in (
            ("thread", "dies", "trainer + keeper"),
            ("none", "none", "trainer"),
        ):
            wheres = (BEFORE_RENAME, BEFORE_MANIFEST, RANDOM_MOMENT)
            assert planned(keeper) == [(where, fate, died) for where in wheres]

    def test_the_keeper_of_a_method(self, monkeypatch: pytest.MonkeyPatch) -> None:
        methods = ("sync", "async", "lazy", "checkfreq")
        monkeypatch.setattr("sys.platform", "linux")
        assert [keeper_of(name) for name in methods] == ["none", *["process"] * 3]
        monkeypatch.setattr("sys.platform", "darwin")
        assert [keeper_of(name) for name in methods] == ["none", *["thread"] * 3]

    def test_the_seed_moves_the_kills(self) -> None:
        def kills(seed: int) -> tuple[Kill, ...]:
            return planned_kills(steps=150, every=10, seed=seed, keeper="process")

        drawn = {kills(seed) for seed in range(20)}
        assert len(drawn) == 20
        assert kills(5) in drawn

    def test_quick_and_full_can_be_changed(self) -> None:
        assert demo_plan().model.params > 800_000
        assert demo_plan(quick=True).model.params < 200_000
        assert demo_plan().method == "logged"
        plan = demo_plan(steps=99, every=4, method="sync", seed=7, quick=True)
        assert (plan.training.steps, plan.training.seed) == (99, 7)
        assert (plan.every, plan.method) == (4, "sync")
        lines = introduce(plan)
        assert any("seed 7" in line for line in lines)
        assert lines[-1].endswith(": the trainer dies")

    def test_the_introduction_says_what_dies(self) -> None:
        plan = dataclasses.replace(
            demo_plan(),
            kills=planned_kills(steps=120, every=10, seed=0, keeper="process"),
        )
        *together, captured, moment = introduce(plan)[-4:]
        assert "save.before_rename, base " in together[0]
        assert "save.before_manifest, base " in together[1]
        die = ": trainer and keeper die, as with their machine"
        assert all(line.endswith(die) for line in together)
        alone = (captured, moment)
        assert all(line.endswith(": the trainer dies, its keeper lives") for line in alone)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"steps": 79, "every": 10}, "too few for the kills"),
            ({"every": 0}, "at least one step"),
            ({"method": "asink"}, "no method 'asink'"),
            ({"seed": -1}, "seed must be"),
        ],
    )
    def test_what_cannot_work_is_refused(self, options: dict[str, int], words: str) -> None:
        with pytest.raises(OptionError, match=words):
            demo_plan(**options)  # type: ignore[arg-type]


class TestJournal:
    def test_a_reader_follows_and_leaves_a_torn_line_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        reader = JournalReader(path)
        assert reader.read_new() == []
        writer = JournalWriter(path)
        writer.write("step", step=1, loss=(0.1).hex())
        assert [(e["event"], e["step"], e["loss"]) for e in reader.read_new()] == [
            ("step", 1, (0.1).hex())
        ]
        assert reader.read_new() == []
        with path.open("ab") as file:
            file.write(b'{"event": "st')
        assert reader.read_new() == []
        with path.open("ab") as file:
            file.write(b'ep", "step": 2}\n{"event"')
        assert reader.read_new() == [{"event": "step", "step": 2}]
        writer.close()

    def test_an_older_journal_is_never_overwritten(self, tmp_path: Path) -> None:
        JournalWriter(tmp_path / "j").close()
        with pytest.raises(FileExistsError):
            JournalWriter(tmp_path / "j")


class TestEvidence:
    def lay_out(self, run: Path, *files: str) -> None:
        for name in files:
            path = run / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def test_survey(self, tmp_path: Path) -> None:
        assert survey(tmp_path / "none") == Survey(0, None, ())
        assert survey(tmp_path / "none").describe() == "no base on disk"
        base = "timeline-00001/base/0000000000"
        data, marker = "rank-00000.safetensors", "rank-00000.done"
        self.lay_out(tmp_path, f"{base}10/{data}", f"{base}10/{marker}", f"{base}10/manifest.json")
        assert survey(tmp_path) == Survey(10, None, ())
        self.lay_out(tmp_path, f"{base}20/{data}.tmp")
        found = survey(tmp_path)
        assert found == Survey(10, 20, (f"{data}.tmp",))
        assert found.describe() == "base 10 on disk; base 20: temporary file, no manifest"
        later = base.replace("00001", "00002")
        self.lay_out(tmp_path, f"{later}30/{data}", f"{later}30/{marker}")
        found = survey(tmp_path)
        assert (found.committed, found.unfinished) == (10, 30)
        assert found.describe() == "base 10 on disk; base 30: data, marker, no manifest"

    @pytest.mark.parametrize(
        ("files", "described"),
        [
            ((), "no base on disk; base 20 in memory"),
            (("rank-00000.safetensors.tmp",), "no base on disk; base 20 in memory"),
            (("rank-00000.safetensors", "rank-00000.done"), "no base on disk; base 20 in memory"),
            (
                ("rank-00000.safetensors", "rank-00000.done", "manifest.json"),
                "base 20 on disk; base 20 in memory",
            ),
        ],
    )
    def test_of_a_captured_base_anything_may_be_on_disk(
        self, tmp_path: Path, files: tuple[str, ...], described: str
    ) -> None:
        """The keeper that was spared writes on while we look."""
        self.lay_out(tmp_path, *(f"timeline-00001/base/000000000020/{name}" for name in files))
        found = survey(tmp_path, held=20)
        assert found.held == 20
        assert found.describe() == described

    def test_a_base_in_memory_is_named_beside_a_newer_unfinished_one(self) -> None:
        begun = Survey(10, 30, ("rank-00000.safetensors.tmp",), held=20)
        assert begun.describe() == (
            "base 10 on disk; base 30: temporary file, no manifest; base 20 in memory"
        )

    def test_a_base_that_is_being_deleted_is_none_that_is_being_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = tmp_path / "timeline-00001/base"
        self.lay_out(base, "000000000020/manifest.json", "000000000010/rank-00000.done")
        assert survey(tmp_path) == Survey(20, None, ())
        # And one that goes between two looks is no longer there.
        (base / "000000000015").mkdir()
        look = Path.iterdir

        def deleted_meanwhile(path: Path) -> Iterator[Path]:
            if path.name == "000000000015":
                path.rmdir()
            return look(path)

        monkeypatch.setattr(Path, "iterdir", deleted_meanwhile)
        assert survey(tmp_path) == Survey(20, None, ())
        assert not (base / "000000000015").exists()

    def test_a_condemned_base_promises_nothing(self, tmp_path: Path) -> None:
        base = tmp_path / "timeline-00001/base/000000000010"
        self.lay_out(base, "manifest.condemned", "rank-00000.done")
        assert survey(tmp_path) == Survey(0, None, ())

    def test_the_final_base_is_committed_and_in_the_newest_timeline(self, tmp_path: Path) -> None:
        for timeline in (1, 2):
            base = tmp_path / f"timeline-0000{timeline}/base/000000000040"
            self.lay_out(base, "manifest.json")
        self.lay_out(tmp_path, "timeline-00003/base/000000000040/rank-00000.done")
        assert final_base(tmp_path, 40).parts[-3] == "timeline-00002"
        with pytest.raises(RecoveryError, match="no committed base of step 50"):
            final_base(tmp_path, 50)


def as_entries(raw: dict[str, bytes]) -> dict[str, StoredEntry]:
    return {name: StoredEntry("U8", (len(data),), data) for name, data in raw.items()}


class TestVerdict:
    """Whatever is changed, the comparison must see it, and nothing else."""

    @given(
        raw=st.dictionaries(st.text("abc/", min_size=1), st.binary(min_size=1), min_size=1),
        data=st.data(),
    )
    def test_one_flipped_bit_is_found_and_named(
        self, raw: dict[str, bytes], data: st.DataObject
    ) -> None:
        name = data.draw(st.sampled_from(sorted(raw)))
        bit = data.draw(st.integers(0, 8 * len(raw[name]) - 1))
        changed = bytearray(raw[name])
        changed[bit // 8] ^= 1 << bit % 8
        differences = compare_entries(as_entries(raw), as_entries({**raw, name: bytes(changed)}))
        assert [item.name for item in differences] == [name]
        assert f"element {bit // 8}:" in differences[0].detail
        assert compare_entries(as_entries(raw), as_entries(dict(raw))) == []

    def test_names_dtypes_and_shapes_count(self) -> None:
        a = {"x": StoredEntry("F32", (2, 1), b"12345678"), "y": StoredEntry("U8", (0,), b"")}
        b = {"x": StoredEntry("F32", (1, 2), b"12345678"), "z": StoredEntry("U8", (0,), b"")}
        found = {item.name: item.detail for item in compare_entries(a, b)}
        assert found == {
            "x": "F32 [2, 1] != F32 [1, 2]",
            "y": "only in the uninterrupted run",
            "z": "only in the killed run",
        }

    def test_elements_are_counted_and_shown_as_numbers(self) -> None:
        a = np.array([1.0, 2.0, 3.0, 4.0], dtype="<f4")
        b = a.copy()
        b[[1, 3]] = np.nextafter(b[[1, 3]], np.float32(9))
        entries = [{"w": StoredEntry("F32", (4,), x.tobytes())} for x in (a, b)]
        (difference,) = compare_entries(*entries)
        assert difference.detail == "2 of 4 elements; element 1: 0x40000000 != 0x40000001"

    @given(
        steps=st.integers(1, 12),
        cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3),
        data=st.data(),
    )
    def test_one_changed_loss_is_found_even_if_it_was_computed_twice(
        self, steps: int, cuts: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        expected = [(step, (1.0 / step).hex()) for step in range(1, steps + 1)]
        starts, begin = [], 0
        for reached, lost in cuts:
            end = max(begin, min(steps, reached))
            starts.append(expected[begin:end])
            begin = max(0, end - lost)
        starts.append(expected[begin:])
        assert compare_losses(steps, expected, starts) == []

        start = data.draw(st.sampled_from([i for i, part in enumerate(starts) if part]))
        at = data.draw(st.integers(0, len(starts[start]) - 1))
        step, loss = starts[start][at]
        other = float(np.nextafter(float.fromhex(loss), 2.0)).hex()
        changed = [list(part) for part in starts]
        changed[start][at] = (step, other)
        (difference,) = compare_losses(steps, expected, changed)
        assert difference.name == f"step {step}"
        assert other in difference.detail

    def test_a_step_that_is_missing_is_found(self) -> None:
        losses = [(1, "0x1p+0"), (2, "0x1p+1"), (3, "0x1p+2")]
        assert compare_losses(3, losses, [losses]) == []
        (difference,) = compare_losses(3, losses, [[losses[0], losses[2]]])
        assert "the first is 2" in difference.detail
        names = [item.name for item in compare_losses(3, losses[:2], [losses])]
        assert names == ["uninterrupted run", "step 3"]

    def test_fingerprints(self) -> None:
        found = compare_fingerprints({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
        assert [(item.name, item.detail) for item in found] == [
            ("b", "2 != 3"),
            ("c", "None != 4"),
        ]

    def test_a_damaged_or_empty_base_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="without entries"):
            read_base(tmp_path)
        (tmp_path / "rank-00000.safetensors").write_bytes(b"\0" * 64)
        with pytest.raises(FormatError, match="no safetensors file"):
            read_base(tmp_path)


class TestFingerprint:
    def test_one_flipped_bit_of_any_tensor_shows(self, make_training: MakeTraining) -> None:
        training = make_training(1)
        tensors = {f"model/{k}": v for k, v in training.model.state_dict().items()}
        for index, moments in training.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/state/{index}/{k}": v for k, v in moments.items()}
        assert len(tensors) > 20
        draw = random.Random(0)
        for name, tensor in tensors.items():
            before = fingerprint(training)
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            flat[draw.randrange(flat.numel())] ^= 1 << draw.randrange(8)
            changed = {item.name for item in compare_fingerprints(before, fingerprint(training))}
            # The head is the embedding: one memory under two names.
            tied = {"model/tokens.weight", "model/head.weight"}
            assert changed == (tied if name in tied else {name})

    @pytest.mark.parametrize(
        ("part", "change"),
        [
            ("rng/python", lambda t: random.random()),
            ("rng/numpy", lambda t: np.random.random_sample()),
            ("rng/torch", lambda t: torch.rand(())),
            ("loader/position", lambda t: t.loader.next_batch()),
            ("scheduler/", lambda t: t.scheduler.step()),
            ("progress/bytes_seen", lambda t: t.progress.update(bytes_seen=0)),
            ("optimizer/param_groups/1", lambda t: t.optimizer.param_groups[1].update(lr=0.5)),
        ],
    )
    def test_everything_else_shows_too(
        self, make_training: MakeTraining, part: str, change: Callable[[Training], object]
    ) -> None:
        training = make_training(1)
        before = fingerprint(training)
        assert compare_fingerprints(before, fingerprint(training)) == []
        change(training)
        changed = [item.name for item in compare_fingerprints(before, fingerprint(training))]
        assert any(name.startswith(part) for name in changed)


class TestRealCheckpoints:
    """The witnesses against the real Checkpointer, in one process."""

    def trained(
        self, make_training: MakeTraining, run: Path, *, steps: int, every: int | None
    ) -> tuple[dict[str, str], list[tuple[int, str]]]:
        training = make_training(2)
        with everstep.Checkpointer(run, training.state(), every=every) as checkpointer:
            recovery = checkpointer.resume()
            losses = []
            for step in range(recovery.step + 1, steps + 1):
                losses.append((step, training.step().hex()))
                checkpointer.step()
            checkpointer.save()
            return fingerprint(training), losses

    @pytest.mark.slow
    def test_stop_and_resume_is_identical(
        self, make_training: MakeTraining, tmp_path: Path
    ) -> None:
        whole, losses = self.trained(make_training, tmp_path / "a", steps=6, every=None)
        _, first = self.trained(make_training, tmp_path / "b", steps=3, every=2)
        resumed, second = self.trained(make_training, tmp_path / "b", steps=6, every=2)
        assert second[0][0] == 4
        assert compare_fingerprints(whole, resumed) == []
        assert compare_losses(6, losses, [first, second]) == []
        bases = [read_base(final_base(tmp_path / run, 6)) for run in ("a", "b")]
        assert compare_entries(*bases) == []
        assert {"everstep/rng/torch", "everstep/objects/everstep/rng"} <= set(bases[0])

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
    def test_a_generator_that_is_not_restored_is_found(
        self,
        make_training: MakeTraining,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        generator: str,
    ) -> None:
        whole, losses = self.trained(make_training, tmp_path / "a", steps=6, every=None)
        _, first = self.trained(make_training, tmp_path / "b", steps=3, every=2)
        setter = {
            "python": "random.setstate",
            "numpy": "numpy.random.set_state",
            "torch": "torch.set_rng_state",
        }[generator]
        monkeypatch.setattr(setter, lambda *_: None)
        resumed, second = self.trained(make_training, tmp_path / "b", steps=6, every=2)
        live = [item.name for item in compare_fingerprints(whole, resumed)]
        assert any(name.startswith(f"rng/{generator}") for name in live)
        assert compare_losses(6, losses, [first, second]) != []
        bases = [read_base(final_base(tmp_path / run, 6)) for run in ("a", "b")]
        stored = {item.name for item in compare_entries(*bases)}
        assert stored & {"everstep/rng/torch", "everstep/objects/everstep/rng"}

    def test_any_flipped_bit_of_a_real_file_is_found(
        self, make_training: MakeTraining, tmp_path: Path
    ) -> None:
        self.trained(make_training, tmp_path / "a", steps=1, every=None)
        folder = final_base(tmp_path / "a", 1)
        expected = read_base(folder)
        (shard,) = folder.glob("*.safetensors")
        data = shard.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__")
        draw = random.Random(0)
        copy = tmp_path / "copy"
        copy.mkdir()
        for name, entry in header.items():
            at, end = entry["data_offsets"]
            if at == end:
                continue
            bad = bytearray(data)
            bad[begin + draw.randrange(at, end)] ^= 1 << draw.randrange(8)
            (copy / shard.name).write_bytes(bad)
            found = [item.name for item in compare_entries(expected, read_base(copy))]
            assert found == [name]


# A child without torch, quick to start: it reports what it is told to, leaves the files that a
# save leaves, and obeys the failpoints. A file plays the memory of its keeper, if that is a
# process. WHAT says how it deviates.
SCRIPTED = """
import json, os, signal, sys, time
from pathlib import Path
order = json.loads(Path(sys.argv[1]).read_text())
what, run, moment = os.environ["WHAT"], Path(order["run"]), int(os.environ["MOMENT"])
newest = int(os.environ["LAST"])  # the timeline of the kill that falls at any moment
steps, every = order["training"]["steps"], order["every"]
killed, held = run.name == "killed", run.parent / "held"
has_memory = order["method"] != "sync" and order["keeper"] == "process"
journal = open(order["journal"], "x")
def say(event, at_s=0.0, **fields):
    at_s = at_s or time.monotonic()
    journal.write(json.dumps({"event": event, "at_s": at_s, **fields}) + "\\n")
    journal.flush()
if what == "dies" and killed:
    sys.exit("the reactor has melted")
if what == "hangs":
    signal.pause()
name, fails_at = order["failpoint"], order["fails_at"]
if what == "outruns":
    fails_at = 0
if what == "early" and fails_at:
    fails_at = every
done = [int(p.parent.name) for p in run.glob("timeline-*/base/*/rank-00000.done")]
disk, memory = max(done, default=0), int(held.read_text()) if killed and held.exists() else 0
start, source = (memory, "memory") if memory >= disk > 0 else (disk, "disk")
if what == "forgets":
    start = 0
say("resumed", step=start, exact=True, evidence="x", source=source, seconds=0.0)
timeline = len(list(run.glob("timeline-*"))) + 1
for step in range(start + 1, steps + 1):
    last = what == "quick" and timeline == newest and step == moment
    say("step", step=step, loss=float(step).hex(), at_s=time.monotonic() + last)
    if last:
        sys.exit(say("finished", step=steps, fingerprint={}))
    if killed and not name and timeline == newest and step == moment:
        signal.pause()  # until the supervisor has sent its kill
    if not every or step % every:
        continue
    if killed and has_memory:
        held.write_text(str(step))
    base = run / f"timeline-{timeline:05d}/base/{step:012d}"
    base.mkdir(parents=True)
    if step == fails_at and name == "capture.after_captured":
        os.kill(os.getpid(), signal.SIGKILL)
    temporary = base / "rank-00000.safetensors.tmp"
    temporary.touch()
    if name == "save.before_rename" and step == fails_at and what != "whole":
        os.kill(os.getpid(), signal.SIGKILL)
    temporary.rename(base / "rank-00000.safetensors")
    (base / "rank-00000.done").touch()
    if name == "save.before_manifest" and step == fails_at:
        os.kill(os.getpid(), signal.SIGKILL)
    (base / "manifest.json").touch()
    if what == "whole" and step == fails_at:
        os.kill(os.getpid(), signal.SIGKILL)
if what == "waits":
    signal.pause()
say("finished", step=steps, fingerprint={})
"""


def scripted_memory(run: Path) -> int | None:
    """What the keeper of a scripted child says that it holds."""
    held = run.parent / "held"
    return int(held.read_text()) if held.exists() else None


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The command of a scripted child that deviates as told."""
    monkeypatch.setattr(supervisor, "_SILENCE_S", 20.0)
    monkeypatch.setattr(supervisor, "held_step", scripted_memory)
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPTED)

    def command(what: str, plan: DemoPlan | None = None) -> list[str]:
        kills = (plan or TestSupervisor.PLAN).kills
        monkeypatch.setenv("WHAT", what)
        monkeypatch.setenv("MOMENT", str(kills[-1].step))
        monkeypatch.setenv("LAST", str(len(kills)))
        return [sys.executable, str(script)]

    return command


def nothing_remains(folder: Path) -> bool:
    return not any(folder.glob("everstep-demo-*"))


def no_keeper_remains(folder: Path) -> bool:
    """Whether no keeper of a run in ``folder`` is alive."""
    running = processes_marked(os.environ[MARK]).values()
    return not [one for one in running if "everstep.keeper" in one and str(folder) in one]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """All children that a demo starts."""
    started: list[Child] = []

    class Remembered(Child):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(supervisor, "Child", Remembered)
    return started


# What a child does, in a process that has loaded torch already; its parent is that which it was
# forked from.
FORKED = """
import os, sys
folder, log, *words = sys.argv[1:]
os.chdir(folder)
file = os.open(log, os.O_WRONLY)
os.dup2(file, 1)
os.dup2(file, 2)
from everstep.demo import child
sys.exit(child.main([words[0], str(os.getppid())]))
"""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """All children from now on are forked; the commands that would have started them."""
    commands: list[list[str]] = []
    with contextlib.ExitStack() as stack:

        class Forked(Child):
            def _start(
                self,
                command: Sequence[str],
                folder: Path,
                environment: Mapping[str, str],
                log: BinaryIO,
            ) -> Any:  # a Trainer is used as a Popen is
                commands.append([*command])
                words = (str(folder), log.name, *command[len(CHILD_COMMAND) :])
                trainer = start_trainer(FORKED, *words, new_session=True, **environment)
                return stack.enter_context(trainer)

        monkeypatch.setattr(supervisor, "Child", Forked)
        yield commands


def all_dead(children: Sequence[Child]) -> bool:
    for started in children:
        started.poll()
    return bool(children) and all(started.status is not None for started in children)


class TestSupervisor:
    KILLS = planned_kills(steps=120, every=5, seed=3, keeper="process")
    PLAN = dataclasses.replace(demo_plan(quick=True, seed=3), method="lazy", kills=KILLS)
    WITHOUT_KEEPER = demo_plan(quick=True, seed=3, method="sync")

    @pytest.fixture
    def no_bases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scripted children write none: there is nothing to compare but the losses."""
        empty = {"x": StoredEntry("U8", (0,), b"")}
        monkeypatch.setattr(supervisor, "read_base", lambda folder: empty)
        monkeypatch.setattr(supervisor, "final_base", lambda run, step: run)

    @pytest.mark.parametrize(
        ("what", "words"),
        [
            ("dies", r"killed-1 ended with status 1, against the plan.*the reactor has melted"),
            ("outruns", r"killed-1 ended with status 0, against the plan"),
            ("early", r"killed-1 died at step 5, against the plan \(save\.before_rename, base"),
            ("whole", r"killed-1 died at step \d+, against the plan .*left: base \d+ on disk$"),
            ("quick", r"killed-4 ended before it could be killed"),
        ],
    )
    def test_what_nobody_planned_is_reported(
        self,
        scripted: Callable[..., list[str]],
        temporary: Path,
        children: list[Child],
        what: str,
        words: str,
    ) -> None:
        with pytest.raises(DemoError, match=f"(?s){words}"):
            run_demo(self.PLAN, Quiet(), child_command=scripted(what))
        assert all_dead(children)
        assert nothing_remains(temporary)

    def test_a_keeper_that_was_to_live_and_does_not_is_reported(
        self,
        scripted: Callable[..., list[str]],
        temporary: Path,
        children: list[Child],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        command = scripted("")

        def gone(run: Path) -> int | None:
            raise KeeperError("nobody answers")

        monkeypatch.setattr(supervisor, "held_step", gone)
        with pytest.raises(KeeperError, match="nobody answers"):
            run_demo(self.PLAN, Quiet(), child_command=command)
        assert all_dead(children)
        assert nothing_remains(temporary)

    def test_a_child_that_hangs_is_killed_and_reported(
        self,
        scripted: Callable[..., list[str]],
        temporary: Path,
        children: list[Child],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(supervisor, "_SILENCE_S", 0.3)
        with pytest.raises(DemoError, match=r"reported nothing for 0\.3 s"):
            run_demo(self.PLAN, Quiet(), child_command=scripted("hangs"))
        assert all_dead(children)
        assert nothing_remains(temporary)

    def test_an_interrupt_ends_the_children_and_removes_the_folder(
        self, scripted: Callable[..., list[str]], temporary: Path, children: list[Child]
    ) -> None:
        with pytest.raises(KeyboardInterrupt):
            run_demo(self.PLAN, Quiet(interrupt_at=5), child_command=scripted("waits"))
        assert len(children) == 2
        assert all_dead(children)
        assert nothing_remains(temporary)

    def test_sigterm_is_an_interrupt_and_handlers_come_back(
        self, scripted: Callable[..., list[str]], temporary: Path, children: list[Child]
    ) -> None:
        class Terminated(Quiet):
            def progress(self, alone: Position, victim: Position) -> None:
                if alone[0] >= 5:
                    os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            run_demo(self.PLAN, Terminated(), child_command=scripted("waits"))
        assert signal.getsignal(signal.SIGTERM) is before
        assert all_dead(children)
        assert nothing_remains(temporary)

    def test_a_folder_that_holds_something_is_refused(
        self, tmp_path: Path, children: list[Child]
    ) -> None:
        (tmp_path / "mine").touch()
        with pytest.raises(OptionError, match="is not empty"):
            run_demo(self.PLAN, Quiet(), folder=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        assert children == []

    def test_the_kills_fall_where_planned(
        self,
        scripted: Callable[..., list[str]],
        temporary: Path,
        children: list[Child],
        no_bases: None,
    ) -> None:
        display = Quiet()
        sound = run_demo(self.PLAN, display, child_command=scripted(""))
        assert sound.differences == ()
        assert [row.kill for row in sound.kills] == list(self.PLAN.kills)
        rename, manifest, captured, moment = sound.kills
        every = self.PLAN.every
        assert (rename.reached, rename.recovered) == (rename.kill.step, rename.kill.step - every)
        assert (rename.source, rename.left.held) == ("disk", None)
        assert manifest.left.committed < manifest.recovered == manifest.kill.step, "rolled forward"
        assert (manifest.source, manifest.left.held) == ("disk", None)
        assert (captured.reached, captured.recovered) == (captured.kill.step, captured.kill.step)
        assert (captured.source, captured.left.held) == ("memory", captured.kill.step)
        assert captured.left.committed == captured.kill.step - every, "it is nowhere else"
        assert moment.reached == moment.kill.step
        assert moment.recovered == moment.left.held == (moment.kill.step - 1) // every * every
        killed = [event for event in display.events if event.startswith("killed")]
        assert [event.split(":")[0] for event in killed] == [
            "killed trainer + keeper",
            "killed trainer + keeper",
            "killed trainer",
            "killed trainer",
        ]
        assert f"; left: base {captured.left.committed} on disk; base" in killed[2]
        back = [event for event in display.events if event.startswith("back")]
        assert back[2] == f"back at step {captured.kill.step}, from memory"

    def test_without_a_keeper_all_comes_from_disk(
        self, scripted: Callable[..., list[str]], temporary: Path, no_bases: None
    ) -> None:
        plan = self.WITHOUT_KEEPER
        command = scripted("", plan)
        report = run_demo(plan, Quiet(), child_command=command)
        assert report.differences == ()
        assert [row.kill for row in report.kills] == list(plan.kills)
        rename, manifest, moment = report.kills
        assert rename.recovered == rename.kill.step - plan.every
        assert manifest.recovered == manifest.kill.step  # rolled forward from its marker
        assert manifest.left.committed < manifest.recovered
        assert moment.recovered == (moment.kill.step - 1) // plan.every * plan.every
        assert {row.source for row in report.kills} == {"disk"}
        assert {row.left.held for row in report.kills} == {None}

    def test_a_keeper_that_dies_with_its_trainer_is_a_thread_of_it(
        self,
        scripted: Callable[..., list[str]],
        temporary: Path,
        no_bases: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        started: dict[str, str] = {}

        class Noted(Child):
            def __init__(
                self, name: str, command: Sequence[str], folder: Path, order: Mapping[str, Any]
            ) -> None:
                started[name] = order["keeper"]
                super().__init__(name, command, folder, order)

        monkeypatch.setattr(supervisor, "Child", Noted)
        run_demo(self.PLAN, Quiet(), child_command=scripted(""))
        assert started == {
            "uninterrupted-1": "thread",
            "killed-1": "thread",
            "killed-2": "thread",
            "killed-3": "process",
            "killed-4": "process",
            "killed-5": "process",
        }

    def test_a_committed_base_that_does_not_come_back_is_a_difference(
        self, scripted: Callable[..., list[str]], temporary: Path, no_bases: None
    ) -> None:
        plan = dataclasses.replace(self.PLAN, kills=self.PLAN.kills[:1])
        report = run_demo(plan, Quiet(), child_command=scripted("forgets"))
        (difference,) = report.differences
        assert (difference.witness, difference.name) == ("recovery", "kill 1")
        committed = plan.kills[0].step - plan.every
        assert difference.detail == (
            f"base {committed} was committed, but step 0 came back, from disk"
        )

    def test_an_orphan_notices(self, tmp_path: Path, deterministic: None) -> None:
        text = tmp_path / "text"
        text.write_bytes(b"some text " * 1000)
        plan = demo_plan(quick=True)
        order = {
            "run": str(tmp_path / "run"),
            "text": str(text),
            "journal": str(tmp_path / "journal"),
            "model": {"layers": 1, "width": 16, "heads": 1, "context": 8},
            "training": dataclasses.asdict(plan.training),
            "method": "sync",
            "keeper": "thread",
            "every": None,
            "failpoint": None,
            "fails_at": None,
        }
        (tmp_path / "order").write_text(json.dumps(order))
        arguments = [str(tmp_path / "order"), str(os.getpid())]  # not the parent of this process
        assert child.main(arguments) == child.EXIT_ORPHANED
        events = [event["event"] for event in JournalReader(tmp_path / "journal").read_new()]
        assert events == ["resumed"]


class TestPromises:
    """What was committed, or captured with a keeper that lives, comes back from where it is."""

    SPARED = Kill(AFTER_CAPTURED, 60, keeper="spared")
    MOMENT = Kill(RANDOM_MOMENT, 65, 0.5, keeper="spared")
    TOGETHER = Kill(BEFORE_RENAME, 60, keeper="dies")

    def broken(
        self,
        kill: Kill,
        *,
        held: int | None,
        recovered: int,
        source: str,
        committed: int = 50,
        reached: int = 66,
    ) -> list[Difference]:
        left = Survey(committed, None, (), held)
        report = KillReport(kill, left, reached, recovered, 0.1, 1.0, True, "x", source)
        return broken_promises([report], "lazy")

    def test_kept(self) -> None:
        assert self.broken(self.SPARED, held=60, recovered=60, source="memory") == []
        assert self.broken(self.MOMENT, held=60, recovered=60, source="memory") == []
        # The keeper writes on: what comes back may be newer than what was seen.
        assert self.broken(self.MOMENT, held=None, recovered=60, source="disk") == []
        assert self.broken(self.TOGETHER, held=None, recovered=50, source="disk") == []
        fresh = self.broken(self.TOGETHER, held=None, recovered=0, source="fresh", committed=0)
        assert fresh == []

    @pytest.mark.parametrize(
        ("kill", "held", "recovered", "source", "words"),
        [
            (TOGETHER, None, 40, "disk", "base 50 was committed, but step 40 came back, from disk"),
            (TOGETHER, None, 50, "memory", "but no keeper had it in memory"),
            (TOGETHER, None, 70, "disk", "step 66 was the last, but step 70 came back"),
            (SPARED, 60, 50, "disk", "base 60 was in the memory of a keeper that survived, but"),
            # Even if it was on disk by then, too: memory is what this kill is about.
            (SPARED, 60, 60, "disk", "but step 60 came back, from disk"),
            (SPARED, 60, 50, "memory", "but step 50 came back, from memory"),
            (MOMENT, 60, 50, "disk", "base 60 was in the memory of a keeper that survived, but"),
        ],
    )
    def test_broken(
        self, kill: Kill, held: int | None, recovered: int, source: str, words: str
    ) -> None:
        (difference,) = self.broken(kill, held=held, recovered=recovered, source=source)
        assert (difference.witness, difference.name) == ("recovery", "kill 1")
        assert words in difference.detail


# A child whose resume is sound in every record and wrong in one unit in the last place.
SABOTEUR = """
import sys
import torch
import everstep
from everstep.demo import child
from everstep.testing import inspect

sound = everstep.Checkpointer.resume

def resume(self, *args, **kwargs):
    recovery = sound(self, *args, **kwargs)
    if recovery.step:
        tensors = inspect(self).state.survey().tensors
        weight = tensors["model/blocks.0.mlp_in.weight"].view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    return recovery

everstep.Checkpointer.resume = resume
sys.exit(child.main())
"""


def rendered(report: DemoReport) -> str:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    present(report, console)
    console.file.close()
    return console.export_text()


class TestEndToEnd:
    PLAN: DemoPlan = demo_plan(quick=True, seed=11)

    @pytest.mark.skipif(sys.platform != "linux", reason="keeper processes are for Linux")
    def test_killed_and_identical(self, temporary: Path, forked: list[list[str]]) -> None:
        display = Quiet()
        report = run_demo(self.PLAN, display)
        assert len(forked) == 2 + len(self.PLAN.kills)
        assert {tuple(command[: len(CHILD_COMMAND)]) for command in forked} == {CHILD_COMMAND}
        assert report.differences == ()
        assert [row.kill for row in report.kills] == list(self.PLAN.kills)
        *together, captured, moment = report.kills
        for row in together:
            assert row.kill.step - 1 <= row.recovered <= row.reached
            assert row.source == "disk"
        assert (captured.lost, captured.source) == (0, "memory")
        assert captured.left.held == captured.kill.step
        newest = max(moment.left.committed, moment.left.held or 0)
        assert newest <= moment.recovered <= moment.reached
        assert all(row.lost <= 1 for row in report.kills)
        assert all(row.exact for row in report.kills)
        assert report.loss_last < report.loss_first
        assert sum(event.startswith("killed") for event in display.events) == 4
        text = rendered(report)
        assert "capture.after_captured" in text
        assert "+ keeper" in text
        assert f"base {captured.kill.step} in memory" in text
        assert text.rstrip().splitlines()[-1].startswith("IDENTICAL: ")
        data = json.loads(json.dumps(report.as_json()))
        assert data["identical"] is True
        assert [kill["died"] for kill in data["kills"]] == [
            "trainer + keeper",
            "trainer + keeper",
            "trainer",
            "trainer",
        ]
        assert [kill["recovered_step"] for kill in data["kills"]] == [
            row.recovered for row in report.kills
        ]
        assert data["kills"][2]["held_step"] == captured.kill.step
        assert nothing_remains(temporary)
        assert no_keeper_remains(temporary)

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["sync", "async", "checkfreq"])
    def test_other_methods(self, temporary: Path, method: str) -> None:
        plan = demo_plan(quick=True, seed=12, method=method)
        report = run_demo(plan, Quiet())
        assert report.differences == ()
        assert [row.kill for row in report.kills] == list(plan.kills)
        spared = keeper_of(method) == "process"
        sources = ["disk", "disk", *(["memory"] if spared else [])]
        assert [row.source for row in report.kills][:-1] == sources
        assert all(row.recovered == row.kill.step for row in report.kills[1:-1])
        text = rendered(report)
        assert ("in memory" in text) == spared
        assert ("a keeper that survives keeps writing" in text) == spared
        assert nothing_remains(temporary)
        assert no_keeper_remains(temporary)

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="keeper processes are for Linux")
    def test_an_interrupt_ends_a_keeper_that_was_spared(
        self, temporary: Path, children: list[Child]
    ) -> None:
        class Interrupted(Quiet):
            def event(self, text: str) -> None:
                super().event(text)
                if text.startswith("killed"):
                    assert not no_keeper_remains(temporary), "it is there, and alone"
                    raise KeyboardInterrupt

        plan = demo_plan(quick=True, steps=45, seed=11)
        plan = dataclasses.replace(plan, kills=plan.kills[2:3])
        display = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            run_demo(plan, display)
        assert display.events[-1].startswith("killed trainer: capture.after_captured")
        assert all_dead(children)
        assert no_keeper_remains(temporary)
        assert nothing_remains(temporary)

    @pytest.mark.slow
    def test_one_unit_in_the_last_place_is_different(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrapper = tmp_path / "saboteur.py"
        wrapper.write_text(SABOTEUR)
        kept = tmp_path / "kept"

        def sabotaged(plan: DemoPlan, display: Quiet, *, folder: Path | None) -> DemoReport:
            command = [sys.executable, str(wrapper)]
            plan = dataclasses.replace(plan, kills=plan.kills[1:2])  # one resume is enough
            return run_demo(plan, display, folder=folder, child_command=command)

        monkeypatch.setattr(supervisor, "run_demo", sabotaged)
        done = CliRunner().invoke(
            app, ["demo", "--quick", "--seed", "11", "--run", str(kept), "--json"]
        )
        assert done.exit_code == 1, done.output
        report = json.loads(done.stdout)
        assert report.get("identical") is False, done.output
        witnesses = {item["witness"] for item in report["differences"]}
        assert witnesses == {"checkpoint", "live state", "loss"}
        names = [item["name"] for item in report["differences"]]
        assert "model/blocks.0.mlp_in.weight" in names
        assert (kept / "killed").is_dir()
        assert no_keeper_remains(kept)
        shutil.rmtree(kept)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "status", "words"),
        [
            (["--steps", "10"], 2, "too few for the kills"),
            (["--method", "asink"], 2, "did you mean 'async'"),
            (["--run", "{full}"], 2, "is not empty"),
        ],
    )
    def test_usage(self, tmp_path: Path, arguments: list[str], status: int, words: str) -> None:
        (tmp_path / "something").touch()
        filled = [argument.format(full=tmp_path) for argument in arguments]
        done = CliRunner().invoke(app, ["demo", *filled])
        assert done.exit_code == status
        assert words in done.output
