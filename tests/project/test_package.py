"""What is installed, and what is refused: the package's own metadata, and torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

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


def test_wheel_and_sdist(tmp_path: Path) -> None:
    """Both have all modules, the command and the license, and are imported from anywhere."""
    build = "import sys; from hatchling.build import build_sdist, build_wheel; "
    build += "print(build_wheel(sys.argv[1])); print(build_sdist(sys.argv[1]))"
    names = run_python(build, tmp_path, cwd=ROOT).split()
    with zipfile.ZipFile(tmp_path / names[0]) as wheel:
        files = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources <= files
    assert "everstep/py.typed" in files
    about = f"everstep-{everstep.__version__}.dist-info"
    assert f"{about}/licenses/LICENSE" in files
    assert "everstep = everstep.cli:main" in (
        tmp_path / "site" / about / "entry_points.txt"
    ).read_text(encoding="utf-8")
    with tarfile.open(tmp_path / names[1]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in sources} <= inside
    assert {"pyproject.toml", "README.md", "LICENSE", "examples/lightning_trainer.py"} <= inside
    where = run_python("import everstep; print(everstep.__file__)", cwd=tmp_path / "site")
    assert Path(where.strip()).is_relative_to(tmp_path)


def run_python(program: str, *arguments: Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_extras_of_earlier_versions_are_kept(project: dict[str, Any]) -> None:
    assert project["optional-dependencies"]["s3"] == ["everstep[cloud]"]


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
