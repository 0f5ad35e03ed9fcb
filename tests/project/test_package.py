"""What is installed, and what is refused: the package's own metadata, and torch."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import everstep
from everstep.errors import UnavailableError
from everstep.version import is_too_old
from tests.support.inside import caches

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(everstep.__file__).parents[2]

fresh_caches = caches.fresh_caches  # the fixture


@pytest.fixture
def project() -> dict[str, object]:
    path = ROOT / "pyproject.toml"
    found: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return found


def test_no_installed_torch_is_ever_replaced(project: dict[str, object]) -> None:
    """pip would do that for any bound that it does not meet."""
    dependencies = project["dependencies"]
    assert isinstance(dependencies, list)
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0]: line for line in dependencies}
    assert names["torch"] == "torch"
    for line in dependencies:
        assert "<" not in line
        assert "==" not in line


def test_there_is_a_command(project: dict[str, object]) -> None:
    assert project["scripts"] == {"everstep": "everstep.cli:main"}
    assert (Path(everstep.__file__).parent / "py.typed").is_file()


def test_what_is_checked_elsewhere_is_what_is_checked_here() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count("exec make test ") == 1


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("2.5.1", True),
        ("1.13.0+cu117", True),
        ("what is this", True),
        ("2.6.0", False),
        ("2.6.0a0+ecf3bae40a.nv25.01", False),
        ("2.13.0+cpu", False),
        ("3.0", False),
    ],
)
@pytest.mark.usefixtures("fresh_caches")
def test_an_old_torch_is_refused_at_first_use(
    version: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_too_old(version) == old
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if old:
        with pytest.raises(UnavailableError, match=r"everstep needs 2\.6 or newer") as caught:
            everstep.Checkpointer  # noqa: B018
        assert version in str(caught.value)
    else:
        assert everstep.Checkpointer is not None


@pytest.mark.usefixtures("fresh_caches")
def test_errors_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    assert everstep.errors.UnavailableError is UnavailableError
    assert everstep.__version__
