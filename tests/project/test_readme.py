"""Every block of README.md is executed, and what it shows is what comes out."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import TIMEOUT_S, masked, run_command, run_program

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CALL = r"\b(everstep(?:\.\w+)+)\("


def blocks(language: str) -> list[str]:
    """The contents of all fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "COLUMNS": "100", "TZ": "UTC"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first block has run."""
    folder = tmp_path_factory.mktemp("readme")
    run_program(blocks("python")[0], folder)
    return folder


def test_there_are_blocks() -> None:
    assert len(blocks("python")) == 4
    assert len(blocks("console")) == 3


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.split("\n")[0])
def test_console(folder: Path, block: str) -> None:
    first, _, shown = block.partition("\n")
    command = shlex.split(first.removeprefix("$ "))
    assert command[0] == "everstep"
    found = run_command(command, folder)
    assert masked(found) == masked(shown)


def test_looking_takes_nothing_over(folder: Path) -> None:
    run_folder = folder / "runs" / "first"
    before = sorted(run_folder.rglob("*"))
    assert run([sys.executable, "-c", blocks("python")[1]], folder) == "100\n"
    assert sorted(run_folder.rglob("*")) == before


def test_reading_without_everstep(folder: Path) -> None:
    assert run([sys.executable, "-c", blocks("python")[2]], folder) == "torch.Size([1, 4])\n"


def test_running_again_resumes(folder: Path) -> None:
    again = blocks("python")[0] + "\nprint(recovery.step, recovery.exact)"
    assert run([sys.executable, "-c", again], folder) == "100 True\n"


def test_loader_and_plain_data_come_back(folder: Path) -> None:
    """Half-way in an epoch, with the batches that would have come."""
    code = blocks("python")[0] + "\n" + blocks("python")[3]
    mark = " " * 12 + "ckpt.step()\n"
    said = f"{' ' * 12}print(ckpt.stats().step, batch.sum().item())\n"
    code = code.replace(mark, f"{mark}{said}")
    assert said in code
    code += '\nprint(loader.epoch, state["samples"], ckpt.stats().step)'
    whole = run_program(code, folder)
    shutil.rmtree(folder / "runs" / "epochs")
    stop = f"{said}{' ' * 12}if ckpt.stats().step == 30: raise SystemExit\n"
    first = run_program(code.replace(said, stop), folder)
    second = run_program(code, folder)
    assert first + second == whole
    assert second.endswith("\n2 320 40\n")


def test_names_are_there_after_importing_everstep_alone() -> None:
    pages = [ROOT / "docs" / name for name in ("OPTIONS.md", "PLANNING.md")]
    texts = [README, *(page.read_text() for page in pages)]
    names = sorted({name for text in texts for name in re.findall(CALL, text)})
    assert {"everstep.compress.Compressor", "everstep.options.Every"} <= set(names)
    # Each as the first that is used: a name must not hang on what another one has imported.
    forget = "[sys.modules.pop(m) for m in list(sys.modules) if m.split('.')[0] == 'everstep']"
    lines = [f"{forget}\nimport everstep\n{name}" for name in names]
    run([sys.executable, "-c", "\n".join(["import sys", *lines])], ROOT)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks(""))):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_linked_files_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
