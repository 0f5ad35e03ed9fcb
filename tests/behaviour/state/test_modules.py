"""Modules of every kind come back as they were, whatever their tensors look like."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.utils import parametrizations

from everstep import Checkpointer, KeeperOptions, LogOptions, Recovery
from everstep.errors import MismatchError, RecoveryError
from everstep.format.names import base_dir
from everstep.state.values.tensors import DTYPE_CODES
from tests.support.world import assert_same, opened, seed_everything

Build = Callable[[int], nn.Module]


def save_and_resume(run: Path, saved: nn.Module, live: nn.Module, **how: Any) -> Recovery:
    """Saves one module and resumes into another."""
    with opened(run, {"m": saved}) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
    with opened(run, {"m": live}) as ckpt:
        return ckpt.resume(**how)


def check(run: Path, build: Build) -> nn.Module:
    """A module of another seed holds the saved bits in its own tensors after resuming."""
    saved, live = build(1), build(2)
    own = {id(tensor) for tensor in [*live.parameters(), *live.buffers()]}
    wanted = saved.state_dict()
    recovery = save_and_resume(run, saved, live)
    assert recovery.exact
    assert_same(live.state_dict(), wanted)
    assert {id(tensor) for tensor in [*live.parameters(), *live.buffers()]} == own
    return live


class Holder(nn.Module):
    """Buffers b0, b1, ... of any tensors."""

    def __init__(self, *buffers: torch.Tensor) -> None:
        super().__init__()
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"b{number}", buffer)


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits of any dtype, NaNs with payloads and all."""
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (max(size, 1),), dtype=torch.uint8)
    return raw[:size].view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


ALL_DTYPES = [*DTYPE_CODES, torch.complex128]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (5, 7)], ids=str)
def test_every_dtype(shape: tuple[int, ...], run_folder: Path) -> None:
    assert len(ALL_DTYPES) >= 19

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Holder(*(values(dtype, shape) for dtype in ALL_DTYPES))

    check(run_folder, build)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(1, 2, 2, 3, 2).to(memory_format=torch.channels_last_3d),
    "every second": lambda: torch.randn(10)[::2],
    "a column": lambda: torch.randn(4, 6)[:, 2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "expanded scalar": lambda: torch.randn(()).expand(2, 3),
    "windows": lambda: torch.randn(6).unfold(0, 3, 1),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "conjugate, transposed": lambda: torch.randn(3, 4, dtype=torch.complex128).mH,
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "real part": lambda: torch.randn(4, dtype=torch.complex128).real,
    "bool, transposed": lambda: torch.randn(3, 4).t() > 0,
    "tail of a storage": lambda: torch.randn(9)[5:],
    "size-one dimensions": lambda: torch.randn(1, 3, 1).transpose(0, 2),
    "inference tensor": lambda: _inference(),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["sync", "async"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, method: str, run_folder: Path) -> None:
    torch.manual_seed(1)
    saved = Holder(LAYOUTS[layout]())
    torch.manual_seed(2)
    live = Holder(LAYOUTS[layout]())
    stride = live.b0.stride()
    wanted = saved.state_dict()
    with opened(run_folder, {"m": saved}, method=method) as ckpt:
        ckpt.step()
        ckpt.save()
    with opened(run_folder, {"m": live}, method=method) as ckpt:
        ckpt.resume()
    assert_same(live.state_dict(), wanted)
    assert live.b0.stride() == stride


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("transposed", "plain"),
        ("plain", "transposed"),
        ("plain", "channels"),
        ("channels", "plain"),
    ],
)
def test_the_layout_may_change(before: str, after: str, run_folder: Path) -> None:
    """Bytes are stored in row-major order, so the strides of the live tensor do not matter."""
    layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda t: t,
        "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
        "channels": lambda t: t.to(memory_format=torch.channels_last),
    }
    saved = Holder(layouts[before](torch.randn(2, 3, 4, 5)))
    live = Holder(layouts[after](torch.zeros(2, 3, 4, 5)))
    save_and_resume(run_folder, saved, live)
    assert_same(live.state_dict(), saved.state_dict())


class Tied(nn.Module):
    def __init__(self, seed: int, *, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        if tie:
            self.second.weight = self.first.weight


def test_tied_weights_are_stored_once_and_stay_tied(run_folder: Path) -> None:
    live = check(run_folder, Tied)
    assert isinstance(live, Tied)
    assert live.first.weight is live.second.weight


def test_tied_when_saved_untied_now(run_folder: Path) -> None:
    saved, live = Tied(1), Tied(2, tie=False)
    notes = save_and_resume(run_folder, saved, live).notes
    assert_same(live.state_dict(), saved.state_dict())
    assert live.first.weight.data_ptr() != live.second.weight.data_ptr()
    assert notes == (
        "m/first.weight, m/second.weight were one tensor when saved, and are separate tensors now",
    )


def test_untied_when_saved_tied_now(run_folder: Path) -> None:
    """Two values do not fit into one memory: said, before anything is touched."""
    saved, live = Tied(1, tie=False), Tied(2)
    before = {key: value.clone() for key, value in live.state_dict().items()}
    with pytest.raises(RecoveryError, match=r"m/.*weight.*shares its memory"):
        save_and_resume(run_folder, saved, live)
    assert_same(live.state_dict(), before)


def test_untied_but_equal_when_saved_tied_now(run_folder: Path) -> None:
    saved, live = Tied(1, tie=False), Tied(2)
    with torch.no_grad():
        saved.second.weight.copy_(saved.first.weight)
    notes = save_and_resume(run_folder, saved, live).notes
    assert_same(live.state_dict(), saved.state_dict())
    assert notes == (
        "m/first.weight, m/second.weight were separate tensors when saved, and are one tensor now",
    )


@pytest.mark.parametrize("tie", [False, True])
def test_a_log_is_of_the_ties_of_its_training(tie: bool, run_folder: Path) -> None:
    """What replay does to the one tensor, it would not do to the other: the log is left alone."""

    def made(seed: int, tie: bool) -> dict[str, Any]:
        model = Tied(seed, tie=tie)
        if not tie:
            model.second.weight.requires_grad_(False)
        return {"m": model, "optimizer": torch.optim.AdamW([model.first.weight])}

    def opened_logged(state: dict[str, Any]) -> Checkpointer:
        log, keeper = LogOptions(to="disk"), KeeperOptions(process=False)
        return Checkpointer(run_folder, state, method="logged", every=4, log=log, keeper=keeper)

    state, at_base = made(1, tie=True), torch.empty(0)
    with opened_logged(state) as ckpt:
        ckpt.resume()
        for step in range(1, 7):
            state["m"].first.weight.square().sum().backward()
            state["optimizer"].step()
            ckpt.step()
            at_base = state["m"].first.weight.detach().clone() if step == 4 else at_base
    shutil.rmtree(base_dir(run_folder, 1, 6))  # which close() has taken
    live = made(2, tie=tie)
    with opened_logged(live) as ckpt:
        recovery = ckpt.resume()
        wanted = state["m"].first.weight if tie else at_base
        assert torch.equal(live["m"].first.weight, wanted)
        assert torch.equal(live["m"].second.weight, wanted)
    assert (recovery.step, recovery.exact) == ((6, True) if tie else (4, False))
    assert [one.reason for one in recovery.skipped] == (
        []
        if tie
        else [
            "the log after it cannot be replayed: m/first.weight, m/second.weight were one tensor "
            "when saved, and are separate tensors now"
        ]
    )


def test_tied_across_sections(run_folder: Path) -> None:
    def build(seed: int) -> dict[str, nn.Module]:
        torch.manual_seed(seed)
        encoder, decoder = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        decoder.weight = encoder.weight
        return {"encoder": encoder, "decoder": decoder}

    saved, live = build(1), build(2)
    with opened(run_folder, saved) as ckpt:
        ckpt.save()
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    assert_same(live["decoder"].state_dict(), saved["decoder"].state_dict())
    assert live["encoder"].weight is live["decoder"].weight


def views(seed: int) -> nn.Module:
    """Views of one memory: the same start, another start, overlapping, transposed."""
    torch.manual_seed(seed)
    x = torch.randn(12)
    return Holder(x, x[:5], x[3:9], x.view(3, 4).t(), x[::2], x.view(4, 3))


def test_views_of_one_memory(run_folder: Path) -> None:
    live = check(run_folder, views)
    assert isinstance(live, Holder)
    live.b0[0] = 77.0
    assert live.b1[0] == live.b3[0, 0] == live.b4[0] == live.b5[0, 0] == 77.0


@pytest.mark.parametrize("start", [0, 2])
def test_separate_when_saved_overlapping_now(start: int, run_folder: Path) -> None:
    """Not both can get what was saved for them: an error, never a mixture without a word."""
    saved = Holder(torch.randn(6), torch.randn(3))
    memory = torch.zeros(6)
    live = Holder(memory, memory[start : start + 3])
    with pytest.raises(RecoveryError, match="shares its memory"):
        save_and_resume(run_folder, saved, live)


def test_overlapping_when_saved_separate_now(run_folder: Path) -> None:
    saved, live = views(1), Holder(*(t.clone() for t in views(2).buffers()))
    save_and_resume(run_folder, saved, live)
    assert_same(live.state_dict(), saved.state_dict())


def test_slices_of_one_flat_memory(run_folder: Path) -> None:
    """Flattened parameters lie side by side: nothing overlaps, all is restored."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        flat = torch.randn(20)
        return Holder(flat[:7], flat[7:16].view(3, 3), flat[16:])

    check(run_folder, build)


@pytest.mark.parametrize(
    "build",
    [
        lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
        lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        lambda: nn.BatchNorm2d(3),
        lambda: nn.ModuleDict(
            {"a~b": nn.Linear(2, 2), "c": nn.ParameterDict({"x": torch.ones(2)})}
        ),
        lambda: nn.Sequential(),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    ],
    ids=lambda build: type(build()).__name__,
)
def test_modules_of_torch(build: Callable[[], nn.Module], run_folder: Path) -> None:
    def seeded(seed: int) -> nn.Module:
        seed_everything(seed)
        return build()

    check(run_folder, seeded)


class WithExtra(nn.Module):
    """Extra state of a module, with a tensor in it, and an int key."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(2))
        self.extra: Any = {"seed": seed, 3: (1, "x"), "moments": torch.randn(3)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state(run_folder: Path) -> None:
    saved, live = nn.Sequential(WithExtra(1)), nn.Sequential(WithExtra(2))
    save_and_resume(run_folder, saved, live)
    assert_same(live.state_dict(), saved.state_dict())
    assert_same(live[0].extra, saved[0].extra)


class Transposing(nn.Module):
    """Stores its weight under another name and transposed, by hooks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._in)

    @staticmethod
    def _out(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}w_t"] = state.pop(f"{prefix}weight").t().contiguous()

    @staticmethod
    def _in(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w_t").t()


def test_state_dict_hooks(run_folder: Path) -> None:
    saved, live = nn.Sequential(Transposing(1)), nn.Sequential(Transposing(2))
    save_and_resume(run_folder, saved, live)
    assert_same(live[0].weight, saved[0].weight)


class Caching(nn.Module):
    """Derives something from its weight when it is loaded, by an override."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.derive()

    def derive(self) -> None:
        self.doubled = self.weight.detach() * 2


class CachingOutside(Caching):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        result = super().load_state_dict(*args, **options)
        self.derive()
        return result


class CachingInside(Caching):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derive()


class CachingByHook(Caching):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_load_state_dict_post_hook(lambda module, _: module.derive())


@pytest.mark.parametrize("kind", [CachingOutside, CachingInside, CachingByHook])
def test_what_modules_do_on_loading_is_done(kind: type[Caching], run_folder: Path) -> None:
    saved, live = kind(1), kind(2)
    if kind is CachingOutside:
        save_and_resume(run_folder, saved, live)
    else:
        save_and_resume(run_folder, nn.Sequential(saved), nn.Sequential(live))
    assert torch.equal(live.doubled, saved.weight.detach() * 2)


def compiled(module: nn.Module) -> Any:
    """Wrapped by ``torch.compile``, which compiles nothing before the first call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules, at their first import
        return torch.compile(module, backend="eager")


def test_torch_compile_does_not_change_names(run_folder: Path) -> None:
    """Saved plain, resumed compiled; the module inside and a compiled part of a module alike."""
    seed_everything(1)
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    seed_everything(2)
    live = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    live[0] = compiled(live[0])
    wrapped = compiled(live)
    assert "_orig_mod.0._orig_mod.weight" in wrapped.state_dict()
    save_and_resume(run_folder, saved, wrapped)
    assert_same(list(live.state_dict().values()), list(saved.state_dict().values()))
    folder = run_folder.with_name("back")
    seed_everything(3)
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    save_and_resume(folder, wrapped, plain)
    assert_same(plain.state_dict(), saved.state_dict())


def test_the_optimizer_of_a_compiled_module_has_the_same_names(run_folder: Path) -> None:
    def build(seed: int, *, wrap: bool) -> dict[str, Any]:
        seed_everything(seed)
        plain = nn.Linear(2, 2)
        model = compiled(plain) if wrap else plain
        optimizer = torch.optim.Adam(model.parameters())
        plain(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, live = build(1, wrap=False), build(2, wrap=True)
    with opened(run_folder, saved) as ckpt:
        ckpt.step()
        ckpt.save()
    with opened(run_folder, live) as ckpt:
        ckpt.resume()
    assert_same(live["optimizer"].state_dict(), saved["optimizer"].state_dict())


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_does_not_change_names(one_rank: None, run_folder: Path) -> None:
    seed_everything(1)
    saved = nn.parallel.DistributedDataParallel(nn.Linear(2, 3))
    seed_everything(2)
    live = nn.Linear(2, 3)
    save_and_resume(run_folder, saved, live)
    assert_same(live.state_dict(), saved.module.state_dict())
    seed_everything(3)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 3))
    save_and_resume(run_folder.with_name("back"), live, wrapped)
    assert_same(wrapped.module.state_dict(), live.state_dict())


def test_a_live_tensor_is_read_in_place(run_folder: Path) -> None:
    """No second copy of the model is made, and references to its tensors stay good."""
    saved, live = nn.Linear(3, 3), nn.Linear(3, 3)
    seen = live.weight.data
    save_and_resume(run_folder, saved, live)
    assert torch.equal(seen, saved.weight)
    assert live.weight.data_ptr() == seen.data_ptr()


def test_another_dtype_and_another_shape_are_both_named(run_folder: Path) -> None:
    saved = Holder(torch.ones(3), torch.ones(2, 2), torch.ones(1), torch.ones(4))
    live = Holder(torch.ones(3, dtype=torch.float64), torch.ones(2, 3), torch.ones(1))
    live.register_buffer("fresh", torch.zeros(2))
    with pytest.raises(MismatchError) as error:
        save_and_resume(run_folder, saved, live)
    assert dict(error.value.mismatches) == {
        "m/b0": "saved F32 [3], live F64 [3]",
        "m/b1": "saved F32 [2, 2], live F32 [2, 3]",
        "m/b3": "in the checkpoint, not in the model",
        "m/fresh": "not in the checkpoint",
    }
    assert torch.equal(live.b2, torch.ones(1))
