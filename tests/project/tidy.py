"""What the sources promise about themselves, read from their syntax trees.

Each rule is a function from sources to a list of complaints, empty when all is well.
``test_tidy.py`` runs every rule on the tree, and on a small planted violation of each.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = [
    "ORDER",
    "Module",
    "check_docstrings",
    "check_exports",
    "check_failpoints",
    "check_folders",
    "check_imports",
    "check_io",
    "check_pickle",
    "check_prints",
    "check_public_names",
    "check_shape",
    "check_shared",
    "check_sleeps",
    "check_waits",
    "modules_under",
]

ORDER = (
    "version",
    "errors",
    "seams",
    "state",
    "arena",
    "format",
    "events",
    "commit",
    "config",
    "options",
    "compress",
    "replay",
    "link",
    "tiers",
    "run",
    "capture",
    "restore",
    "plan",
    "keeper",
    "look",
    "report",
    "convert",
    "trainer",
    "checkpointer",
    "data",
    "",  # `import everstep` itself: what users see
    "integrations",
    "workloads",
    "testing",
    "demo",
    "cli",
    "bench",  # everstep_bench, but for its two parts that follow
    "bench.drill",
    "bench.cli",
)
"""Parts of the packages; each may import only what stands before it, and itself."""

MAX_LINES = 800
MAX_PUBLIC_NAMES = 16
MAX_MODULES_OF_A_TEST_FOLDER = 40


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted, e.g. ``"everstep.format.names"``.
        is_package: whether it is an ``__init__.py``.
    """

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, feature_version=(3, 10))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree. Many rules look at all of them, and walking takes time."""
        return list(ast.walk(self.tree))

    @cached_property
    def names_used(self) -> list[tuple[str, int]]:
        """Every imported name where it is imported or used, in full, with its line."""
        return list(_names_used(self))

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """Every function with its place, ``module:Class.function``."""
        found: list[tuple[str, Function]] = []
        todo: list[tuple[str, ast.AST]] = [("", self.tree)]
        while todo:
            prefix, parent = todo.pop()
            for node in ast.iter_child_nodes(parent):
                inner = prefix
                if isinstance(node, Function | ast.ClassDef):
                    inner = f"{prefix}.{node.name}".lstrip(".")
                if isinstance(node, Function):
                    found.append((f"{self.name}:{inner}", node))
                todo.append((inner, node))
        return found

    @property
    def part(self) -> str:
        """The part of the package that it belongs to; ``""`` for the root itself."""
        return _part_of(self.name)


def modules_under(folder: Path, name: str) -> list[Module]:
    """Every Python file under ``folder``, which holds the package (or tree) ``name``."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = [name, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        dotted = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(dotted, path.read_text(encoding="utf-8"), is_package))
    return found


def check_imports(module: Module) -> list[str]:
    """Imports go one way, downward in :data:`ORDER`."""
    own = module.part
    if own == "__main__":
        return []
    if own not in ORDER:
        return [f"{module.name}: {own!r} has no place in the order of imports; give it one"]
    complaints = []
    for target, line in _imports(module):
        if target.split(".")[0] not in ("everstep", "everstep_bench"):
            continue
        other = _part_of(target)
        if other not in ORDER:
            other = ""  # a name, not a part: taken from the root
        if other != own and ORDER.index(other) >= ORDER.index(own):
            complaints.append(f"{module.name}:{line}: imports {target}, which comes later")
    return complaints


def check_shape(module: Module) -> list[str]:
    """No long modules; each says what it is (docstring), a facade also what it offers."""
    complaints = []
    lines = len(module.source.splitlines())
    if lines > MAX_LINES:
        complaints.append(f"{module.name}: {lines} lines, at most {MAX_LINES}")
    body = module.tree.body
    if not ast.get_docstring(module.tree):
        complaints.append(f"{module.name}: no docstring")
    # A package that binds no name offers none: its docstring is all there is to say. Other modules
    # offer all names without an underscore.
    binds = [n for n in body if not isinstance(n, ast.Expr) and not _is_future(n)]
    if module.is_package and binds and _exported(module.tree) is None:
        complaints.append(f"{module.name}: no __all__")
    return complaints


def check_exports(module: Module) -> list[str]:
    """``__all__`` names everything public that the module defines (private names start with _)."""
    exported = _exported(module.tree)
    if exported is None:
        return []
    return [
        f"{module.name}:{node.lineno}: {node.name} is public but not in __all__"
        for node in _definitions(module.tree)
        if node.name not in exported
    ]


def check_docstrings(module: Module) -> list[str]:
    """Public classes and functions of a module say what they are."""
    return [
        f"{module.name}:{node.lineno}: {node.name} has no docstring"
        for node in _definitions(module.tree)
        if not ast.get_docstring(node)
    ]


def check_public_names(root: Module) -> list[str]:
    """The root package offers few names."""
    exported = _exported(root.tree)
    if exported is None:
        return [f"{root.name}: __all__ is not a plain list of strings"]
    if len(exported) > MAX_PUBLIC_NAMES:
        return [f"{root.name}: {len(exported)} public names, at most {MAX_PUBLIC_NAMES}"]
    return []


# --- Input and output -------------------------------------------------------------------

_BENCH = ("bench", "bench.drill", "bench.cli")
_COMMANDS = ("workloads", "demo", "cli", "testing", *_BENCH)
# Their files are those of other programs.
_FOREIGN = ("convert", "integrations")
_OUTSIDE_THE_SEAM = ("seams", "__main__", *_FOREIGN, *_COMMANDS)

_OS_ALLOWED = {
    # Of the module os everything touches the world except what stands here.
    "os.PathLike": "a type",
    "os.cpu_count": "asks the machine, touches no file",
    "os.environ": "the process's own environment",
    "os.environ.get": "the process's own environment",
    "os.fsdecode": "a conversion",
    "os.fspath": "a conversion",
    "os.getpid": "asks the process",
    "os.getppid": "asks the process",
    "os.path.abspath": "a string function, but for the working directory",
    "os.path.basename": "a string function",
    "os.path.dirname": "a string function",
    "os.path.isabs": "a string function",
    "os.path.join": "a string function",
    "os.path.normpath": "a string function",
    "os.register_at_fork": "a hook of the process",
    "os.strerror": "the text of an errno",
}

_IO_MODULES = (
    "bz2 codecs ctypes dbm fcntl fileinput glob gzip linecache lzma posix shutil sqlite3 "
    "tarfile tempfile zipfile numpy.lib.format safetensors torch.serialization"
).split()

_IO_NAMES = frozenset(
    """
    builtins.open io.open io.open_code io.FileIO pathlib.Path pathlib.PosixPath
    logging.FileHandler logging.handlers
    torch.save torch.load torch.from_file torch.jit.save torch.jit.load
    torch.Storage.from_file torch.UntypedStorage.from_file
    numpy.save numpy.savez numpy.savez_compressed numpy.savetxt numpy.load numpy.loadtxt
    numpy.genfromtxt numpy.fromfile numpy.memmap numpy.lib.npyio
    """.split()
)

_IO_METHODS = frozenset(
    # Of pathlib.Path: a caller may have handed one over where a PurePath is declared.
    """
    exists is_file is_dir is_symlink is_mount lstat read_text write_text write_bytes mkdir rmdir
    iterdir touch symlink_to hardlink_to readlink expanduser samefile rglob absolute tofile
    """.split()
)


def check_io(module: Module) -> list[str]:
    """Nothing outside the seams opens, lists, maps or deletes a file."""
    if module.part in _OUTSIDE_THE_SEAM:
        return []
    complaints = []
    for name, line in module.names_used:
        if name == "os" or (name.startswith("os.") and name not in _OS_ALLOWED):
            why = "not among the harmless names of os; use the FileSystem seam"
        elif name in _IO_NAMES or _within(name, _IO_MODULES):
            why = "input and output belong behind the FileSystem seam"
        else:
            continue
        complaints.append(f"{module.name}:{line}: {name}: {why}")
    for node in module.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in _IO_METHODS:
            complaints.append(f"{module.name}:{node.lineno}: .{node.func.attr}() touches files")
    return complaints + _maps_of_files(module)


def _maps_of_files(module: Module) -> list[str]:
    """Memory maps are anonymous: ``mmap.mmap(-1, ...)``, written so that it can be seen."""
    complaints = []
    aliases = _aliases(module)
    for node in module.nodes:
        if not isinstance(node, ast.Call) or _dotted(node.func, aliases) != "mmap.mmap":
            continue
        if not node.args or ast.unparse(node.args[0]) != "-1":
            complaints.append(f"{module.name}:{node.lineno}: mmap.mmap of a file")
    return complaints


# --- Prints, pickle, sleep --------------------------------------------------------------

_PICKLES = (
    "_pickle cPickle cloudpickle copyreg dill joblib marshal pickle pickletools shelve "
    "torch.load torch.save torch.serialization"
).split()


def check_pickle(module: Module) -> list[str]:
    """No pickle is written or read, except by the peers that the bench compares with, where a
    user asks for a file of torch.save, and where torch passes objects as such streams in memory."""
    if module.part in ("bench", "convert") or module.name.startswith("everstep.integrations.dcp."):
        return []
    return [
        f"{module.name}:{line}: {name}: no pickle is ever written or read"
        for name, line in module.names_used
        if _within(name, _PICKLES)
    ]


def check_sleeps(module: Module) -> list[str]:
    """Tests wait for events, with a timeout, never for time to pass."""
    if "sleep" not in module.source:  # most: they need not be parsed
        return []
    return [
        f"{module.name}:{line}: {name}: wait for an event with a timeout"
        for name, line in module.names_used
        if name in ("time.sleep", "asyncio.sleep")
    ]


_TEST_IMPORTS = re.compile(
    r"(?:from|import)\s+tests(?:\.\w+)*\.test_\w+"
    r"|from\s+tests(?:\.\w+)*\s+import\s+\(?(?:[\w\s]+,)*\s*test_\w+"
)


def check_shared(module: Module) -> list[str]:
    """Nothing is imported from a test module, nor in programs that tests run."""
    return [
        f"{module.name}:{module.source[: found.start()].count(chr(10)) + 1}: {found.group()}: "
        "move to tests/support what test modules share"
        for found in _TEST_IMPORTS.finditer(module.source)
    ]


def check_folders(modules: Iterable[Module]) -> list[str]:
    """No folder has more modules than one can take in at a glance."""
    counts = Counter(module.name.rpartition(".")[0] for module in modules)
    return [
        f"{folder}: {count} modules, at most {MAX_MODULES_OF_A_TEST_FOLDER}"
        for folder, count in sorted(counts.items())
        if count > MAX_MODULES_OF_A_TEST_FOLDER
    ]


def check_prints(module: Module) -> list[str]:
    """Outside of commands all lines go where one that cannot be printed ends no training."""
    if module.part in _COMMANDS or module.name == _MESSAGES:
        return []
    printed = {node for node in module.nodes if isinstance(node, ast.Name)}
    return [
        f"{module.name}:{node.lineno}: print: say it with {_MESSAGES}"
        for node in sorted(printed, key=lambda name: name.lineno)
        if node.id == "print"
    ]


_MESSAGES = "everstep.seams.progress"


def check_waits(module: Module) -> list[str]:
    """Nothing that the training thread locks can be left locked by an interrupt."""
    if module.part in _COMMANDS or module.name == _CONDITIONS:
        return []
    return [
        f"{module.name}:{line}: {name}: take that of {_CONDITIONS}"
        for name, line in _called(module)
        if name in _TORN
    ]


_CONDITIONS = "everstep.seams.processes.threads"
_TORN = (
    "threading.Condition",
    "concurrent.futures.Future",
    "queue.Queue",
    "queue.LifoQueue",
    "queue.PriorityQueue",
)


def _called(module: Module) -> Iterator[tuple[str, int]]:
    """Names, in full, of what is called, or told to be: with what stands in brackets or without."""
    aliases = _aliases(module)
    for node in module.nodes:
        if isinstance(node, ast.Call):
            made = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        elif isinstance(node, ast.keyword) and node.arg == "default_factory":
            made = node.value
        else:
            continue
        if isinstance(made, ast.Name | ast.Attribute) and (dotted := _dotted(made, aliases)):
            yield dotted, made.lineno


# --- Failpoints -------------------------------------------------------------------------


def check_failpoints(modules: Iterable[Module]) -> list[str]:
    """Failpoints that the code names exist, and every one that exists is visited."""
    modules = list(modules)
    known = _known_failpoints(modules)
    groups = "|".join(sorted({re.escape(name.split(".")[0]) for name in known}))
    looks_like_one = re.compile(rf"(?:{groups})\.(?:before|after)_[a-z_]+")
    visited, complaints = set(), set()
    for module in modules:
        if module.name == "everstep.seams.failpoints":
            continue
        for name, line in _visits(module):
            if name is None:
                complaints.add(f"{module.name}:{line}: failpoint without a literal name")
            elif name in known:
                visited.add(name)
            else:
                complaints.add(f"{module.name}:{line}: no failpoint {name!r}")
        for text, line in _strings(module):  # armed, or in a plan of the demo
            if looks_like_one.fullmatch(text) and text not in known:
                complaints.add(f"{module.name}:{line}: no failpoint {text!r}")
    complaints |= {f"failpoint {name!r} is never visited" for name in known - visited}
    return sorted(complaints)


def _visits(module: Module) -> Iterator[tuple[str | None, int]]:
    """The name of each failpoint that the module visits, None where it is not a literal."""
    aliases = _aliases(module)
    for node in module.nodes:
        if isinstance(node, ast.Call) and _is_failpoint(_dotted(node.func, aliases)):
            yield _text(node.args[0]) if node.args else None, node.lineno


def _strings(module: Module) -> Iterator[tuple[str, int]]:
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def _is_failpoint(dotted: str | None) -> bool:
    return dotted in ("everstep.seams.failpoint", "everstep.seams.failpoints.failpoint")


def _known_failpoints(modules: Iterable[Module]) -> set[str]:
    for module in modules:
        if module.name != "everstep.seams.failpoints":
            continue
        for node in module.tree.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAILPOINTS":
                assert node.value is not None
                return set(ast.literal_eval(node.value))
    raise AssertionError("everstep.seams.failpoints.FAILPOINTS is not where it was")


# --- Reading syntax trees ---------------------------------------------------------------

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _part_of(name: str) -> str:
    """``"format"`` of ``"everstep.format.names"``, ``""`` of ``"everstep"``."""
    package, *parts = name.split(".")
    if package == "everstep_bench":
        return f"bench.{parts[0]}" if parts and parts[0] in ("drill", "cli") else "bench"
    return parts[0] if parts else ""


def _within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def _text(node: ast.AST) -> str | None:
    """The string that a literal stands for."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _exported(tree: ast.Module) -> list[str] | None:
    """The names in ``__all__``, or None where it is not a literal."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.List | ast.Tuple):
                return [text for text in map(_text, value.elts) if text is not None]
    return None


def _definitions(tree: ast.Module) -> Iterator[_Definition]:
    for node in tree.body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            yield node


def _imports(module: Module) -> Iterator[tuple[str, int]]:
    """Every imported name, dotted, wherever in the module it is imported."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def _origin(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _aliases(module: Module) -> dict[str, str]:
    """What each imported name stands for, dotted; scopes are not told apart."""
    found = {"open": "builtins.open", "__import__": "builtins.__import__"}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            for alias in node.names:
                found[alias.asname or alias.name] = f"{origin}.{alias.name}"
    return found


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """``"numpy.load"`` for the expression ``np.load``; None for anything but imported names."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value, aliases)
        return f"{value}.{node.attr}" if value else None
    return None


def _names_used(module: Module) -> Iterator[tuple[str, int]]:
    """Every imported name where it is imported or used, in full, with its line."""
    yield from (item for item in _imports(module) if item[0] != "os")
    aliases = _aliases(module)

    def visit(node: ast.AST) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.Name | ast.Attribute):
            dotted = _dotted(node, aliases)
            if dotted:
                yield dotted, node.lineno
                return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(module.tree)
