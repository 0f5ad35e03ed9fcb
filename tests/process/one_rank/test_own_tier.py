"""A tier of the user's own class keeps the copies of a keeper process; a lost run comes back from
them."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
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


def test_its_scheme_can_be_registered(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = metadata.EntryPoint("own", "own_storage:OwnTier", options.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda **about: [point])
    opened = options.open_tier(f"own:/{tmp_path}/copies", PosixFileSystem())
    assert opened.url == f"own:/{tmp_path}/copies"


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
