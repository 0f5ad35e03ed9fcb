"""Signals that announce the end of a job: a last base at the step mark, and a way out."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import DeadlineError, EverstepError, OptionError, OutOfSpaceError
from everstep.options import Preemption
from everstep.seams import ManualClock
from everstep.seams.processes.signals import SAME_S, SignalWatch
from everstep.testing import inspect
from everstep.trainer.session.preemption import PreemptionHandler, any_rank, rank_vote
from tests.support.preempted import PRELUDE, saved_at
from tests.support.trainers import Trainer, finish_trainer, start_trainer
from tests.support.world import TIMEOUT_S, opened


def start(run: Path, body: str, **environment: str) -> Trainer:
    return start_trainer(PRELUDE + textwrap.dedent(body), str(run), **environment)


def finish(process: Trainer) -> tuple[int, str, str]:
    return finish_trainer(process, 3 * TIMEOUT_S)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(name) for name in names]
    yield
    after = [signal.getsignal(name) for name in names]
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)
    assert after == before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT does what it does in a program that a person has started: a shell's background jobs
    ignore it, and so would everything that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- Real trainers, real signals ----------------------------------------------------------


LOOP = """
ckpt = everstep.Checkpointer(run, state, method={method!r}, every=None, preempt=True,
    keeper=everstep.KeeperOptions(linger_s=3))
ckpt.resume()
while not ckpt.preempted and state["n"][0] < 1000:
    if state["n"][0] == 2:
        print("ready", flush=True)
        sys.stdin.readline()
    advance(ckpt)
print("left at", state["n"][0], ckpt.preempted, flush=True)
{ending}
"""
METHODS = ["lazy", "sync", "logged", "checkflow"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", METHODS)
def test_sigterm_ends_training_with_a_base_of_that_step(method: str, run_folder: Path) -> None:
    """Killed as soon as the loop is over: what step() waited for is on disk, without close()."""
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    trainer = start(run_folder, LOOP.format(method=method, ending=kill))
    assert trainer.stdout.readline() == "ready\n"
    os.kill(trainer.pid, signal.SIGTERM)
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    code, out, err = finish(trainer)
    assert (code, out) == (-signal.SIGKILL, "left at 3 True\n"), err
    assert "SIGTERM: step 3 is the last" in err
    manifests = [path.parent.name for path in run_folder.rglob("manifest.json")]
    assert f"{3:012}" in manifests
    assert saved_at(run_folder) == 3


def test_without_preempt_nothing_is_touched(run_folder: Path) -> None:
    body = LOOP.replace(", preempt=True", "").format(method="lazy", ending="")
    trainer = start(run_folder, body)
    assert trainer.stdout.readline() == "ready\n"
    os.kill(trainer.pid, signal.SIGTERM)
    code, out, _ = finish(trainer)
    assert (code, out) == (-signal.SIGTERM, "")


def test_a_signal_of_choice_and_the_handler_before(run_folder: Path) -> None:
    """As SLURM's --signal=USR1@60 sends it; the handler that was there still hears of it, and is
    in place again behind close()."""
    body = """
    heard = []
    def mine(number, frame): heard.append(number)
    signal.signal(signal.SIGUSR1, mine)
    wanted = Preemption(signals=("SIGTERM", "SIGUSR1"), grace_s=60)
    with everstep.Checkpointer(run, state, every=None, preempt=wanted) as ckpt:
        ckpt.resume()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        advance(ckpt)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] and not ckpt.preempted
        advance(ckpt)
        assert ckpt.preempted
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    """
    code, _, err = finish(start(run_folder, body))
    assert code == 0, err
    assert saved_at(run_folder) == 2


# Signals that the file system sends to its own process, from within the write of the last base.
FROM_WITHIN = """
from everstep.seams import PosixFileSystem, Seams
from everstep.seams.processes import signals
signals.SAME_S = {same_s}
class Sending(PosixFileSystem):
    def create(self, path, *, direct=False):
        if "000000000001" in str(path) and threading.current_thread() is threading.main_thread():
            print("saving", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.getsignal(signal.SIGTERM)  # handlers have run by now
        return super().create(path, direct=direct)
seams = Seams(filesystem=Sending())
keeper = everstep.KeeperOptions(process=False)
ckpt = everstep.Checkpointer(
    run, state, method="sync", every=None, preempt=True, seams=seams, keeper=keeper)
ckpt.resume()
os.kill(os.getpid(), signal.SIGTERM)
advance(ckpt)
print("left", ckpt.preempted, flush=True)
ckpt.close()
"""


def test_a_second_signal_during_the_save_kills_as_ever(run_folder: Path) -> None:
    code, out, err = finish(start(run_folder, FROM_WITHIN.format(same_s=0.0)))
    assert code == -signal.SIGTERM, err
    assert out.splitlines() == ["saving"]
    assert saved_at(run_folder) == 0


def test_a_signal_that_is_forwarded_comes_twice(run_folder: Path) -> None:
    """By a launcher whose processes have got it already."""
    code, out, err = finish(start(run_folder, FROM_WITHIN.format(same_s=3600.0)))
    assert code == 0, err
    assert out.splitlines()[-1] == "left True"
    assert saved_at(run_folder) == 1


def test_forked_processes_have_no_duty(run_folder: Path) -> None:
    """What ends the workers of a data loader still ends them."""
    body = """
    ckpt = everstep.Checkpointer(run, state, every=None, preempt=True)
    ckpt.resume()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    advance(ckpt)
    print(ckpt.preempted)
    ckpt.close()
    """
    code, out, err = finish(start(run_folder, body))
    assert (code, out.split()) == (0, ["-15", "False"]), err


def test_a_loader_with_workers_goes_on(run_folder: Path) -> None:
    body = """
    loader = torch.utils.data.DataLoader(torch.arange(40.0), num_workers=1, batch_size=4)
    with everstep.Checkpointer(run, state, every=None, preempt=True) as ckpt:
        ckpt.resume()
        for number, batch in enumerate(loader):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            advance(ckpt)
            if ckpt.preempted:
                break
    print(number)
    """
    code, out, err = finish(start(run_folder, body))
    assert (code, out.strip()) == (0, "2"), err
    assert saved_at(run_folder) == 3


# --- In this process ----------------------------------------------------------------------


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_end_is_at_a_step_mark_and_only_once(run_folder: Path) -> None:
    state: dict[str, Any] = {"n": [0], "t": torch.zeros(8)}
    with opened(run_folder, state, every=None, preempt=True) as ckpt:
        ckpt.resume()
        state["n"], state["t"] = [1], torch.ones(8)
        send()
        assert not ckpt.preempted
        assert not ckpt.stats().saves
        ckpt.step()
        assert ckpt.preempted
        state["n"], state["t"] = [2], torch.full((8,), 2.0)
        ckpt.step()  # a loop that goes on may
    assert saved_at(run_folder) == 1


def test_the_base_that_is_due_is_the_last_one(run_folder: Path) -> None:
    state: dict[str, Any] = {"n": [1], "t": torch.ones(8)}
    with opened(run_folder, state, every=1, preempt=True) as ckpt:
        ckpt.resume()
        send()
        ckpt.step()
        assert ckpt.stats().saves == 1


def test_nested_checkpointers(tmp_path: Path) -> None:
    """Closed in any order, each lets go of its own."""
    for order in ((0, 1), (1, 0)):
        both = []
        for name in ("a", "b"):
            state: dict[str, Any] = {"t": torch.ones(8)}
            both.append(opened(tmp_path / f"{name}{order[0]}", state, every=None, preempt=True))
        ckpts = [context.__enter__() for context in both]
        for ckpt in ckpts:
            ckpt.resume()
        send()
        for ckpt in ckpts:
            ckpt.step()
        assert [ckpt.preempted for ckpt in ckpts] == [True, True]
        for number in order:
            both[number].__exit__(None, None, None)
        # The outer one was closed first and could not take its handler from under the other's.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_of_later_is_left_in_place(run_folder: Path) -> None:
    with opened(run_folder, {"t": torch.ones(8)}, every=None, preempt=True) as ckpt:
        ckpt.resume()
        earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert callable(earlier)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_another_thread_is_refused_before_anything_is_done(run_folder: Path) -> None:
    found: list[BaseException] = []

    def make() -> None:
        try:
            with opened(run_folder, {"t": torch.ones(8)}, preempt=True):
                pass
        except OptionError as error:
            found.append(error)

    thread = threading.Thread(target=make, name="loop")
    thread.start()
    thread.join(TIMEOUT_S)
    assert "main thread only, and this is 'loop'" in str(found[0])
    assert not run_folder.exists()


def test_closed_from_another_thread(run_folder: Path) -> None:
    """It cannot put handlers back there: ours does what they did."""
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    watch = SignalWatch(["SIGUSR1"], ManualClock(), grace_s=9)
    watch.install()
    thread = threading.Thread(target=watch.close)
    thread.start()
    thread.join(TIMEOUT_S)
    assert signal.getsignal(signal.SIGUSR1) is not mine
    send(signal.SIGUSR1)
    send(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2
    assert watch.came is None
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.usefixtures("interruptible")
def test_a_keyboard_interrupt_is_noted_first_and_raised_the_second_time() -> None:
    clock = ManualClock()
    watch = SignalWatch(["SIGINT", "SIGINT"], clock, grace_s=9)
    watch.install()
    send(signal.SIGINT)
    assert watch.came is not None
    assert watch.came.name == "SIGINT"
    clock.advance(SAME_S + 1)
    send(signal.SIGINT)  # as long as nothing is saved, it is the same request
    watch.pass_on()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    watch.close()


@pytest.mark.usefixtures("interruptible")
def test_where_no_step_ends_a_signal_behind_the_grace_period_does_what_it_did() -> None:
    """In a long evaluation, say."""
    clock = ManualClock()
    watch = SignalWatch(["SIGINT"], clock, grace_s=9)
    watch.install()
    send(signal.SIGINT)
    clock.advance(8.9)
    send(signal.SIGINT)
    clock.advance(0.2)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    watch.close()


def test_one_that_is_dropped_lets_go() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ending = PreemptionHandler(Preemption(), ManualClock())
    ending.install()
    assert signal.getsignal(signal.SIGTERM) is not before
    del ending
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"signals": ()}, "names of signals"),
        ({"signals": "SIGTERM"}, r"names of signals.*signals=\('SIGTERM',\)"),
        ({"signals": ("SIGKILL",)}, "cannot be caught.*SIGTERM"),
        ({"signals": ("sigterm",)}, "did you mean 'SIGTERM'"),
        ({"signals": (15,)}, "does not announce the end"),
        ({"grace_s": 0}, "more than 0"),
        ({"grace_s": float("nan")}, "more than 0"),
        ({"grace_s": "30"}, "must be seconds"),
        ({"agree_steps": 0}, "from 1"),
        ({"agree_steps": True}, "from 1"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){said}"):
        Preemption(**options)


def test_preempt_is_a_choice_or_none(run_folder: Path) -> None:
    with (
        pytest.raises(OptionError, match="True, False or a Preemption"),
        opened(run_folder, {"t": torch.ones(8)}, preempt="SIGTERM"),
    ):
        pass


# --- Time and ranks -----------------------------------------------------------------------


class Saves:
    """What ``save_last`` is told, in seconds."""

    def __init__(self, error: Exception | None = None) -> None:
        self.timeouts_s: list[float] = []
        self.error = error

    def __call__(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(("passed_s", "left_s"), [(4.0, 21.0), (25.0, 0.0), (90.0, 0.0)])
def test_the_grace_period_begins_with_the_signal(passed_s: float, left_s: float) -> None:
    clock, saves = ManualClock(), Saves()
    ending = PreemptionHandler(Preemption(), clock)
    ending.install()
    send()
    clock.advance(passed_s)
    ending.step_ended(7, saves)
    ending.step_ended(8, saves)
    ending.close()
    assert saves.timeouts_s == [left_s]


def test_a_base_that_comes_too_late_is_said_and_the_loop_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ending = PreemptionHandler(Preemption(grace_s=3), ManualClock())
    ending.install()
    send()
    ending.step_ended(7, Saves(DeadlineError("it takes long")))
    ending.close()
    assert ending.preempted
    assert "the base of step 7 is not durable 3 s after SIGTERM: it takes long" in caplog.text


def test_a_base_that_fails_is_raised_and_the_loop_let_go() -> None:
    ending = PreemptionHandler(Preemption(), ManualClock())
    ending.install()
    send()
    with pytest.raises(OutOfSpaceError):
        ending.step_ended(7, Saves(OutOfSpaceError("full")))
    ending.close()
    assert ending.preempted


def test_ranks_end_at_the_same_step() -> None:
    """Two ranks, of which one gets the signal, in the middle between two questions."""
    clock = ManualClock()
    flags = [False, False]
    saves = [Saves(), Saves()]
    ranks = []
    for _ in range(2):
        # Both pass what they have before any is answered, as an all-reduce does.
        ranks.append(PreemptionHandler(Preemption(agree_steps=4), clock, lambda mine: any(flags)))
    ranks[1].install()
    ended = []
    for step in range(1, 13):
        if step == 6:
            send()
            flags[1] = True
        for number, rank in enumerate(ranks):
            before = rank.preempted
            rank.step_ended(step, saves[number])
            if rank.preempted and not before:
                ended.append((number, step))
    ranks[1].close()
    assert ended == [(0, 8), (1, 8)]
    assert saves[0].timeouts_s == [25.0]


def test_a_step_that_comes_again_behind_a_rewind_is_asked_about_again() -> None:
    """A rank whose step had failed would else leave out what the others ask."""
    asked: list[bool] = []
    ending = PreemptionHandler(
        Preemption(agree_steps=4), ManualClock(), lambda mine: bool(asked.append(mine))
    )
    ending.agree(4)  # and then an error
    ending.agree(4)
    ending.step_ended(4, Saves())
    assert asked == [False, False]


@pytest.mark.parametrize(("kind", "last"), [(DeadlineError, 4), (OutOfSpaceError, 3)])
def test_a_rank_whose_step_fails_has_asked_the_others(
    kind: type[EverstepError], last: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would get the next collective call of its training for an answer. A step that only
    tells of a failure is over all the same, and may be the last."""
    asked: list[bool] = []
    live = {"n": [last], "t": torch.full((2,), float(last))}

    def others(mine: bool) -> bool:
        asked.append(mine)
        return len(asked) == 3

    monkeypatch.setattr("everstep.checkpointer.rank_vote", lambda: others)
    with opened(run_folder, live, preempt=Preemption(agree_steps=1)) as ckpt:
        ckpt.resume()
        ckpt.step()
        for number in (2, 3):
            inspect(ckpt).channel.post(kind("as the test wants it"))
            with pytest.raises(kind):
                ckpt.step()
            assert asked == [False] * number
        if last == 4:
            assert not ckpt.preempted, "its step had no end"
            ckpt.step()
        assert ckpt.preempted
    assert asked == [False] * 3
    assert saved_at(run_folder) == last


def test_ranks_ask_each_other_over_the_process_group(tmp_path: Path) -> None:
    body = """
    rank = int(sys.argv[2])
    torch.distributed.init_process_group(
        "gloo", init_method="file://" + run, rank=rank, world_size=2)
    from everstep.trainer.session.preemption import any_rank, rank_vote
    assert rank_vote() is any_rank
    print(any_rank(False), any_rank(rank == 1), flush=True)
    torch.distributed.destroy_process_group()
    """
    code = PRELUDE + textwrap.dedent(body)
    both = [start_trainer(code, str(tmp_path / "group"), str(rank)) for rank in range(2)]
    for trainer in both:
        status, out, err = finish(trainer)
        assert (status, out.split()) == (0, ["False", "True"]), err


RANKS = """
rank = int(sys.argv[2])
torch.distributed.init_process_group(
    "gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
values = {"model": model, "optimizer": optimizer}
wanted = Preemption(agree_steps=4)
with everstep.Checkpointer(run, values, every=None, preempt=wanted) as ckpt:
    step = ckpt.resume().step
    while step < 100 and not ckpt.preempted:
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        ckpt.step()
print(step, flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_of_which_one_is_signalled(tmp_path: Path) -> None:
    """Both leave at the same step, with a base of both."""
    run_at, group = str(tmp_path / "run"), str(tmp_path / "group")
    both = [start_trainer(PRELUDE + RANKS, run_at, str(rank), group) for rank in range(2)]
    for trainer in both:
        status, out, err = finish(trainer)
        assert (status, out) == (0, "8\n"), err
    (manifest,) = Path(run_at).rglob("manifest.json")
    assert manifest.parent.name == f"{8:012}"
    assert len(list(manifest.parent.glob("rank-*.safetensors"))) == 2


def test_one_rank_asks_nobody() -> None:
    assert rank_vote() is None
    assert callable(any_rank)
