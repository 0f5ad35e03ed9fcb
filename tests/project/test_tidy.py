"""The sources keep the promises of ``tidy.py``; each rule is shown to be able to fail."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project import tidy
from tests.project.tidy import Module
from tests.project.words import check_words

ROOT = Path(__file__).parents[2]
Modules = list[Module]
Rule = Callable[[Module], list[str]]


# Of this module's tests only: with the trees of all files the collection of garbage takes seconds.
@pytest.fixture(scope="module")
def sources() -> Modules:
    return [
        *tidy.modules_under(ROOT / "src" / "everstep", "everstep"),
        *tidy.modules_under(ROOT / "bench" / "src" / "everstep_bench", "everstep_bench"),
    ]


@pytest.fixture(scope="module")
def own_tests() -> Modules:
    return tidy.modules_under(ROOT / "tests", "tests")


def complaints(rule: Rule, modules: list[Module]) -> list[str]:
    return [line for module in modules for line in rule(module)]


# --- The tree ---------------------------------------------------------------------------


def test_sources_were_found(sources: Modules, own_tests: Modules) -> None:
    names = {module.name for module in sources}
    assert {"everstep", "everstep.seams.posix", "everstep_bench.drill.plan"} <= names
    assert "tests.project.test_tidy" in {module.name for module in own_tests}


@pytest.mark.parametrize(
    "rule",
    [
        tidy.check_imports,
        tidy.check_shape,
        tidy.check_exports,
        tidy.check_docstrings,
        tidy.check_io,
        tidy.check_pickle,
        tidy.check_prints,
    ],
)
def test_sources(rule: Rule, sources: Modules) -> None:
    found = complaints(rule, sources)
    assert not found


def test_root_offers_few_names(sources: Modules) -> None:
    root = next(module for module in sources if module.name == "everstep")
    assert not tidy.check_public_names(root)


def test_failpoints_exist_and_are_visited(sources: Modules) -> None:
    found = tidy.check_failpoints(sources)
    assert not found


def test_tests_do_not_sleep(own_tests: Modules) -> None:
    found = complaints(tidy.check_sleeps, own_tests)
    assert not found


def test_tests_import_nothing_from_test_modules(own_tests: Modules) -> None:
    found = complaints(tidy.check_shared, own_tests)
    assert not found


def test_no_folder_of_tests_is_full(own_tests: Modules) -> None:
    found = tidy.check_folders(own_tests)
    assert not found


def test_interrupts_leave_no_lock_taken(sources: Modules) -> None:
    found = complaints(tidy.check_waits, sources)
    assert not found


def test_texts_name_no_machine() -> None:
    found = []
    for path in _own_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += check_words(str(path.relative_to(ROOT)), text)
    assert not found


def _own_files() -> list[Path]:
    """Files that git knows or would add; without git, those of the folders that hold ours."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = [ROOT / name for name in ("src", "bench", "tests", "docs", "scripts")]
        paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


# --- The rules --------------------------------------------------------------------------


PLACE = "tests.unit"  # apart from the imports below, which would count as this module's own


def module(name: str, source: str, *, is_package: bool = False) -> Module:
    return Module(name, source, is_package)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("everstep.errors", "from everstep.options import Method"),
        ("everstep.errors", "import everstep.options"),
        ("everstep.seams.posix", "from everstep import state"),
        ("everstep.seams.posix", "from everstep import Checkpointer"),
        ("everstep.state.values.tree", "import everstep"),
        ("everstep.state.values.tree", "from ...commit import machine"),
        ("everstep.commit.base_commit", "def f():\n    from everstep.run.scan import scan"),
        ("everstep.commit.base_commit", "from everstep.keeper.persist.base_writer import Keeper"),
        ("everstep.keeper.persist.base_writer", "import everstep.demo as d"),
        ("everstep.keeper.persist.base_writer", "from everstep.checkpointer import Checkpointer"),
        ("everstep.checkpointer", "from everstep.testing import FaultyTier"),
        ("everstep", "from everstep.cli import main"),
        ("everstep.cli", "import everstep_bench"),
        ("everstep.cli", "if TYPE_CHECKING:\n    from everstep_bench.cli.bench import app"),
        ("everstep_bench.arms", "from everstep_bench.cli.common import tell"),
        ("everstep_bench.arms", "from everstep_bench.drill.plan import DrillPlan"),
        ("everstep.attic", "import os"),
    ],
)
def test_import_against_the_order(name: str, source: str) -> None:
    assert len(tidy.check_imports(module(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("everstep.options", "from everstep.errors import OptionError"),
        (
            "everstep.state.values.tree",
            "from everstep.state.layout.entries import Entry\nimport os.path",
        ),
        ("everstep.state.values.tree", "from .entries import Entry"),
        ("everstep.checkpointer", "from everstep.keeper.persist.base_writer import Keeper"),
        ("everstep.cli.demo", "import everstep\nfrom everstep import Checkpointer, demo"),
        ("everstep.__main__", "from everstep.cli import main"),
        ("everstep_bench.cli.drill", "from everstep_bench.drill.plan import DrillPlan"),
        ("everstep.errors", "import everstepping"),
    ],
)
def test_import_along_the_order(name: str, source: str) -> None:
    assert not tidy.check_imports(module(name, source))


@pytest.mark.parametrize(
    ("name", "source", "is_package"),
    [
        ("everstep.a", '"""Text."""\n__all__ = []\n' + "x = 1\n" * 799, False),
        ("everstep.a", "__all__ = []\n", False),
        ("everstep.a", '"""Text."""\nfrom b import c\n', True),
        ("everstep.a", '"""Text."""\n__all__ = sorted(globals())\n', True),
    ],
)
def test_module_out_of_shape(name: str, source: str, is_package: bool) -> None:
    assert len(tidy.check_shape(module(name, source, is_package=is_package))) == 1


@pytest.mark.parametrize(
    ("name", "source", "is_package"),
    [
        ("everstep.a", '"""Text."""\n__all__ = []\n' + "x = 1\n" * 798, False),
        ("everstep.a", '"""Text."""\n__all__: list[str] = []\n', False),
        ("everstep.a", '"""Text."""\nfrom __future__ import annotations\n', True),
        ("everstep.a", '"""Text."""\nx = 1\n', False),
    ],
)
def test_module_in_shape(name: str, source: str, is_package: bool) -> None:
    assert not tidy.check_shape(module(name, source, is_package=is_package))


def test_public_name_outside_all() -> None:
    source = "__all__ = ['a']\ndef a(): ...\ndef b(): ...\ndef _c(): ...\nclass D: ...\n"
    assert len(tidy.check_exports(module("everstep.a", source))) == 2


def test_missing_docstrings() -> None:
    source = "def a(): ...\nasync def b(): ...\nclass C: ...\ndef _d(): ...\nx = 1\n"
    assert len(tidy.check_docstrings(module("everstep.a", source))) == 3
    assert not tidy.check_docstrings(module("everstep.a", 'def a():\n    """Text."""\n'))


@pytest.mark.parametrize("count", [16, 17])
def test_public_names_are_counted(count: int) -> None:
    root = module("everstep", f"__all__ = {[f'name_{i}' for i in range(count)]}")
    assert len(tidy.check_public_names(root)) == count - 16


def test_public_names_that_cannot_be_counted() -> None:
    assert tidy.check_public_names(module("everstep", "__all__ = dir()"))
    assert tidy.check_public_names(module("everstep", ""))


@pytest.mark.parametrize(
    "source",
    [
        "open('f')",
        "with open('f') as f:\n    pass",
        "f = open",
        "import io\nio.open('f')",
        "import io as i\ni.FileIO('f')",
        "import os\nos.unlink('f')",
        "import os\nos.path.exists('f')",
        "import os as o\no.replace('a', 'b')",
        "from os import unlink as u\n",
        "import os.path\nos.path.getsize('f')",
        "import os\ngetattr(os, 'open')('f')",
        "from pathlib import Path",
        "import pathlib\npathlib.Path('f')",
        "import shutil",
        "def f():\n    import tempfile",
        "from ctypes import CDLL",
        "import mmap\nmmap.mmap(descriptor, 4096)",
        "from mmap import mmap\nmmap(fileno=3, length=4096)",
        "import numpy as np\nnp.load('f')",
        "import numpy as np\na.tofile('f')",
        "import torch\ntorch.UntypedStorage.from_file('f')",
        "from torch import save",
        "from safetensors.torch import save_file",
        "import safetensors",
        "def f(path):\n    return path.read_bytes().exists()",
    ],
)
def test_io_past_the_seam(source: str) -> None:
    assert tidy.check_io(module("everstep.format.writer", source))
    assert not tidy.check_io(module("everstep.seams.posix", source))


@pytest.mark.parametrize(
    "source",
    [
        "fs.open(path)\nself.fs.create(path).write(data)",
        "import os\nos.getpid(), os.environ['A'], os.path.join('a', 'b')",
        "from pathlib import PurePath\nPurePath('f').parent",
        "import mmap\nmmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)",
        "import numpy as np, torch\nnp.frombuffer(b''), torch.frombuffer(b'')",
        "class A:\n    def open(self): ...\n    def load(self): return self.open()",
    ],
)
def test_io_through_the_seam(source: str) -> None:
    assert not tidy.check_io(module("everstep.format.writer", source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "def f():\n    import shelve",
        "import torch\ntorch.save({}, 'f')",
        "import torch as t\nload = t.load",
        "import torch.serialization as s",
        "from cloudpickle import dumps",
    ],
)
def test_pickle(source: str) -> None:
    for name in (
        "everstep.state.values.objects",
        "everstep.seams.posix",
        "everstep.testing.faultytier",
    ):
        assert tidy.check_pickle(module(name, source))
    assert not tidy.check_pickle(module("everstep_bench.arms", source))


def test_no_pickle() -> None:
    source = "import torch\ntorch.frombuffer(b'')\nmodel.load_state_dict(state)\nckpt.save()"
    assert not tidy.check_pickle(module("everstep.state.values.objects", source))


@pytest.mark.parametrize(
    "source", ["import time\ntime.sleep(1)", "from time import sleep", "import time as t\nt.sleep"]
)
def test_sleep(source: str) -> None:
    assert tidy.check_sleeps(module("tests.unit.test_a", source))
    assert not tidy.check_sleeps(module("tests.unit.test_a", "import time\ntime.monotonic()"))


@pytest.mark.parametrize(
    "source",
    [
        f"from {PLACE}.test_a import World",
        f"import {PLACE}.test_a as a",
        f"from {PLACE} import support, test_a",
        f"from {PLACE} import (\n    support,\n    test_a,\n)",
        f"PROGRAM = 'from {PLACE}.test_a import World; World()'",
    ],
)
def test_import_from_a_test_module(source: str) -> None:
    assert tidy.check_shared(module("tests.unit.test_b", source))
    assert not tidy.check_shared(module("tests.unit.test_b", source.replace("test_a", "a")))


def test_full_folder_of_tests() -> None:
    modules = [module(f"tests.unit.a.test_{n}", "") for n in range(41)]
    assert tidy.check_folders(modules)
    assert not tidy.check_folders(modules[1:])


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Condition()",
        "from threading import Condition as C\nC()",
        "from concurrent.futures import Future\nFuture[None]()",
        "import dataclasses\nfrom concurrent import futures\n"
        "dataclasses.field(default_factory=futures.Future)",
        "import queue\nqueue.LifoQueue()",
    ],
)
def test_wait(source: str) -> None:
    assert tidy.check_waits(module("everstep.keeper.a", source))
    assert not tidy.check_waits(module("everstep_bench.a", source))
    known = "import threading\nfrom everstep.seams.processes.threads import Condition\n"
    assert not tidy.check_waits(
        module("everstep.keeper.a", known + "Condition()\nthreading.Lock()")
    )


KNOWN = module(
    "everstep.seams.failpoints",
    'FAILPOINTS: dict[str, str] = {"save.before_write": "", "save.after_write": ""}\n'
    "def failpoint(name): ...",
)
VISITS = (
    "from everstep.seams.failpoints import failpoint\n"
    'failpoint("save.before_write")\nfailpoint("save.after_write")\n'
)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (VISITS + 'failpoint("save.before_everything")', "save.before_everything"),
        (VISITS + 'failpoint("elsewhere")', "elsewhere"),
        (VISITS + "failpoint(name)", "without a literal"),
        (VISITS + 'arm("save.before_lunch", "kill")', "save.before_lunch"),
        (VISITS.replace("save.after_write", "save.before_write"), "never visited"),
        (VISITS.replace("failpoint(", "other("), "never visited"),
    ],
)
def test_failpoint_that_is_wrong(source: str, wrong: str) -> None:
    found = tidy.check_failpoints([KNOWN, module("everstep.format.writer", source)])
    assert found
    assert any(wrong in complaint for complaint in found)


@pytest.mark.parametrize(
    "source",
    [
        VISITS,
        VISITS.replace("seams.failpoints", "seams"),
        VISITS + 'arm("save.before_write", "kill")\nnames = ["save.b", "before_write"]',
    ],
)
def test_failpoints_that_are_right(source: str) -> None:
    assert not tidy.check_failpoints([KNOWN, module("everstep.format.writer", source)])


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("everstep.trainer.session.components", 'print("text", file=sys.stderr)'),
        ("everstep.checkpointer", "def f(say=print):\n    print_line(1)"),
        ("everstep.seams.machine", 'print("text", flush=True)'),
        ("everstep.keeper.__main__", "print()"),
    ],
)
def test_print_that_may_fail(name: str, source: str) -> None:
    assert len(tidy.check_prints(module(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "everstep.trainer.session.components",
            "from everstep.seams.progress import print_line\nsay('print')",
        ),
        ("everstep.seams.progress", "print(text, file=stream)"),
        ("everstep.cli.ls", "print(1)"),
        ("everstep.demo.show", "print(1)"),
        ("everstep_bench.drill.report", "print(1)"),
        ("everstep.testing.conformance", "print(1)"),
    ],
)
def test_prints_that_are_right(name: str, source: str) -> None:
    assert not tidy.check_prints(module(name, source))


@pytest.mark.parametrize("folder", ["work", "root", "farm", "tmp/lab"])
def test_path_of_this_machine(folder: str) -> None:
    path = f"/{folder}/" + "main"
    assert check_words("a.md", f"one\nsee {path}\n") == [f"a.md:2: {f'/{folder}/'!r}"]
    assert check_words("a.md", f'"{path}"')
    assert not check_words("a.md", f"runs{path}, $HOME{path}, {folder}/main")


def test_number_of_an_issue() -> None:
    assert check_words("a.md", "see " + "issue" + " #12")
    assert check_words("a.md", "Issue" + " 12")
    assert not check_words("a.md", "an issue with 12 steps")
