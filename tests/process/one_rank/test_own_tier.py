"""A tier of the user's own class keeps the copies of a keeper process; a lost run comes back from
them."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import OptionError, UnavailableError
from everstep.seams import PosixFileSystem
from everstep.testing.conformance import Place, conformance
from everstep.tiers import options
from everstep.tiers.memory import MemoryTier

MODULE = '''
from pathlib import PurePath
from everstep.seams import PosixFileSystem
from everstep.tiers.disk_tier import DiskTier

class OwnTier(DiskTier):
    """Objects as files; a URL of its own."""

    def __init__(self, url):
        self._url = url
        super().__init__(PosixFileSystem(), PurePath("/" + url.removeprefix("own://")))

    @property
    def url(self):
        return self._url

class Forgetful(OwnTier):
    def __init__(self, url):
        super().__init__(url + "/again")
'''


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user's, which only this process has on its path."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_storage.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield importlib.import_module("own_storage")
    sys.modules.pop("own_storage", None)


@pytest.fixture
def registered(tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is registered for its scheme, as by an installed package."""
    about = tmp_path / "code" / "own_storage-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-storage\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[everstep.tiers]\nown = own_storage:OwnTier\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    importlib.invalidate_caches()


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return {"model": model, "optimizer": optimizer}


def test_a_lost_run_comes_back_from_it(tmp_path: Path, storage: Any) -> None:
    tried = storage.OwnTier(f"own:/{tmp_path}/tried")
    assert all(result.problem is None for result in conformance(Place(lambda: tried)))
    tier = storage.OwnTier(f"own:/{tmp_path}/copies")
    state = state_of(1)
    with everstep.Checkpointer(tmp_path / "run", state, method="lazy", every=2, tiers=[tier]) as c:
        c.resume()
        for _ in range(4):
            state["optimizer"].step()
            c.step()
    shutil.rmtree(tmp_path / "run")
    other = state_of(2)
    with everstep.Checkpointer(tmp_path / "run", other, method="lazy", every=2, tiers=[tier]) as c:
        recovery = c.resume()
    assert (recovery.step, recovery.exact) == (4, True)
    assert torch.equal(state["model"].weight, other["model"].weight)
    options = everstep.TierOptions(tier, keep=1)
    assert everstep.load(options).step == 4


@pytest.mark.usefixtures("registered")
def test_its_scheme_can_be_registered(tmp_path: Path) -> None:
    opened = options.open_tier(f"own:/{tmp_path}/copies", PosixFileSystem())
    assert opened.url == f"own:/{tmp_path}/copies"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("is_cached", "in_memory"),
    [(True, False), (False, False), (False, True)],
    ids=["same machine", "another machine", "without a disk"],
)
def test_a_run_can_be_named_by_the_url_of_a_store(
    tmp_path: Path,
    tmpfs_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cached: bool,
    in_memory: bool,
) -> None:
    """Training writes to a folder of the machine; on another one all is read from the store."""
    cache = (tmpfs_folder if in_memory else tmp_path) / "cache"
    monkeypatch.setenv("EVERSTEP_CACHE", str(cache))
    url = f"own:/{tmp_path}/store/my-run"
    log = everstep.LogOptions(to="disk")
    state = state_of(1)
    with everstep.Checkpointer(url, state, method="logged", every=5, log=log) as ckpt:
        ckpt.resume()
        for _ in range(7):
            state["optimizer"].step()
            ckpt.step()
    (folder,) = cache.iterdir()
    assert folder.name.startswith("my-run-")
    if not is_cached:
        shutil.rmtree(cache)
    other = state_of(2)
    with everstep.Checkpointer(url, other, method="logged", every=5, log=log) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (7, True)
    assert torch.equal(state["model"].weight, other["model"].weight)
    assert everstep.load(url).step == 7
    assert [one.name for one in cache.iterdir()] == [folder.name]


def test_what_a_keeper_process_cannot_open_is_refused(tmp_path: Path, storage: Any) -> None:
    class Local(storage.OwnTier):  # type: ignore[misc,name-defined]
        pass

    url = f"own:/{tmp_path}/copies"
    with pytest.raises(OptionError, match="cannot be imported"):
        everstep.TierOptions(Local(url))
    with pytest.raises(OptionError, match="ends with its process"):
        everstep.TierOptions(MemoryTier())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no URL"):
        everstep.TierOptions(storage.OwnTier("somewhere"))
    with pytest.raises(OptionError, match="was made from"):
        everstep.Checkpointer(tmp_path / "run", state_of(1), tiers=[storage.Forgetful(url)])
    with pytest.raises(UnavailableError, match="no_such_module"):
        options.open_tier(url, PosixFileSystem(), opens="no_such_module:Tier")
