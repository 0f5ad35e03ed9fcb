"""Rules for the shape and the language of the sources, kept as ratchets.

Each rule maps a place in the packages (a module, or ``module:function``) to a number that ought
to be 0. ``ratchets.json`` lists the places that break a rule today, with their numbers. A place
that is not listed may not break the rule, and a listed number may only fall:

    python -m tests.project.ratchets  # show what is new, and what can be taken off the list
    python -m tests.project.ratchets --shrink  # take it off
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.project.tidy import Function, Module, modules_under

__all__ = ["RULES", "Offenders", "measure", "problems", "read", "shrunk", "sources"]

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("ratchets.json")

MAX_COMPLEXITY = 15
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_CONSTRUCTOR_PARAMETERS = 7
MAX_ATTRIBUTES = 15
MAX_OWN_IMPORTS = 20
MAX_FILES_OF_A_FOLDER = 16
MIN_LINES_OF_A_MODULE = 80

Offenders = dict[str, int]
"""Numbers by place; only places that break the rule are in it."""


def sources() -> list[Module]:
    """Return the modules of both packages, everstep and everstep_bench."""
    return [
        *modules_under(ROOT / "src" / "everstep", "everstep"),
        *modules_under(ROOT / "bench" / "src" / "everstep_bench", "everstep_bench"),
    ]


def _of_functions(modules: list[Module], number: Callable[[Function], int]) -> Offenders:
    found: Offenders = {}
    for module in modules:
        for place, node in module.functions:
            if value := number(node):
                found[place] = max(value, found.get(place, 0))
    return found


def _above(value: int, limit: int) -> int:
    return value if value > limit else 0


_BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.AsyncFor,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.Assert,
)


def _complexity(node: ast.AST) -> int:
    total, todo = 1, list(ast.iter_child_nodes(node))
    while todo:
        child = todo.pop()
        if isinstance(child, Function | ast.ClassDef):
            continue
        total += isinstance(child, _BRANCHES)
        total += len(child.values) - 1 if isinstance(child, ast.BoolOp) else 0
        total += len(child.cases) if isinstance(child, ast.Match) else 0
        todo.extend(ast.iter_child_nodes(child))
    return total


def complex_functions(modules: list[Module]) -> Offenders:
    """Return functions with more than 15 independent paths."""
    return _of_functions(modules, lambda node: _above(_complexity(node), MAX_COMPLEXITY))


def long_functions(modules: list[Module]) -> Offenders:
    """Return functions of more than 60 lines; lines that hold only a comment do not count."""
    found: Offenders = {}
    for module in modules:
        lines = module.source.splitlines()
        for place, node in module.functions:
            own = lines[node.lineno - 1 : node.end_lineno]
            count = sum(not line.lstrip().startswith("#") for line in own)
            if count > MAX_FUNCTION_LINES:
                found[place] = max(count, found.get(place, 0))
    return found


_OPTION = "Annotated["


def _parameters(node: Function) -> int:
    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    # Typer reads the options of a command from its parameters; only typer passes them.
    options = [
        name for name in names if ast.unparse(name.annotation or name).startswith("Annotated[")
    ]
    count = len([name for name in names if name.arg not in ("self", "cls")]) - len(options)
    limit = MAX_CONSTRUCTOR_PARAMETERS if node.name == "__init__" else MAX_PARAMETERS
    return _above(count, limit)


def many_parameters(modules: list[Module]) -> Offenders:
    """Return functions of more than 8 parameters, constructors of more than 7."""
    return _of_functions(modules, _parameters)


def parameters_without_type(modules: list[Module]) -> Offenders:
    """Return functions that take ``*about: Any``: a tuple of things that nobody can look up."""

    def untyped(node: Function) -> int:
        star = node.args.vararg
        return int(star is not None and star.annotation is not None
                   and ast.unparse(star.annotation) == "Any" and star.arg == "about")  # fmt: skip

    return _of_functions(modules, untyped)


def _starred_tuples(node: Function) -> int:
    tuples = {
        target.id
        for child in ast.walk(node)
        if isinstance(child, ast.Assign) and isinstance(child.value, ast.Tuple)
        for target in child.targets
        if isinstance(target, ast.Name)
    }
    calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
    starred = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Starred)]
    return len([value for value in starred if isinstance(value, ast.Name) and value.id in tuples])


def starred_tuples(modules: list[Module]) -> Offenders:
    """Return functions with ``f(*local_tuple)``: name the arguments at the call."""
    return _of_functions(modules, _starred_tuples)


def many_attributes(modules: list[Module]) -> Offenders:
    """Return classes with more than 15 attributes."""
    found: Offenders = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                names = {
                    child.attr
                    for child in ast.walk(node)
                    if isinstance(child, ast.Attribute)
                    and isinstance(child.ctx, ast.Store)
                    and isinstance(child.value, ast.Name)
                    and child.value.id == "self"
                }
                if count := _above(len(names), MAX_ATTRIBUTES):
                    found[f"{module.name}:{node.name}"] = count
    return found


def many_imports(modules: list[Module]) -> Offenders:
    """Return modules with more than 20 imports of the package's own."""
    counts = {
        module.name: len(
            [
                node
                for node in module.tree.body
                if isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "everstep"
            ]
        )
        for module in modules
    }
    return {name: count for name, count in counts.items() if count > MAX_OWN_IMPORTS}


def full_folders(modules: list[Module]) -> Offenders:
    """Return packages of more than 16 modules."""
    folders = Counter(
        module.name if module.is_package else module.name.rpartition(".")[0] for module in modules
    )
    return {name: count for name, count in folders.items() if count > MAX_FILES_OF_A_FOLDER}


@cache
def _entry_points() -> frozenset[str]:
    """Return modules that an installed distribution is entered by, from its pyproject."""
    texts = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "pyproject.toml", ROOT / "bench" / "pyproject.toml")
    ]
    return frozenset(re.findall(r'= "(everstep[\w.]*):', "\n".join(texts)))


def small_satellites(modules: list[Module]) -> Offenders:
    """Return modules of under 80 lines that belong to their only importer."""
    importers: dict[str, set[str]] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                for name in [node.module or "", *names]:
                    importers.setdefault(name, set()).add(module.name)
    return {
        module.name: 1
        for module in modules
        if not module.is_package
        and not module.name.endswith("__main__")
        and module.name not in _entry_points()
        and len(module.source.splitlines()) < MIN_LINES_OF_A_MODULE
        and len(importers.get(module.name, set()) - {module.name}) <= 1
    }


def _per_module(modules: list[Module], number: Callable[[Module], int]) -> Offenders:
    return {module.name: count for module in modules if (count := number(module))}


def doubled_statements(modules: list[Module]) -> Offenders:
    """Count ``a, b = x, y`` in each module: two statements on one line."""
    return _per_module(
        modules,
        lambda module: len(
            [
                node
                for node in module.nodes
                if isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and isinstance(node.targets[0], ast.Tuple)
            ]
        ),
    )


def _docstrings(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (
            text := ast.get_docstring(node)
        ):
            yield text


_HEADLESS = re.compile(r"(what|whether|who|how|where|whose|which)\b", re.IGNORECASE)


def headless_docstrings(modules: list[Module]) -> Offenders:
    """Count docstrings that open with What, Whether, Who, How, Where, Whose or Which."""
    return _per_module(
        modules, lambda module: len([text for text in _docstrings(module) if _HEADLESS.match(text)])
    )


def behind_for_after(modules: list[Module]) -> Offenders:
    """Count "behind" in docstrings and comments: what comes later in time comes after."""

    def number(module: Module) -> int:
        comments = [line.partition("#")[2] for line in module.source.splitlines()]
        texts = [*_docstrings(module), *comments]
        return sum(len(re.findall(r"\bbehind\b", text, re.IGNORECASE)) for text in texts)

    return _per_module(modules, number)


def callbacks_from_outside(modules: list[Module]) -> Offenders:
    """Count attributes of type Callable that another module fills in: pass a protocol instead."""
    filled = {
        target.attr
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Assign)
        for whole in node.targets
        for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
        if isinstance(target, ast.Attribute)
        and not (isinstance(target.value, ast.Name) and target.value.id in ("self", "cls"))
    }
    return _per_module(
        modules,
        lambda module: len(
            [
                node
                for node in module.nodes
                if isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Attribute)
                and "Callable" in ast.unparse(node.annotation)
                and node.target.attr in filled
            ]
        ),
    )


RULES: dict[str, Callable[[list[Module]], Offenders]] = {
    rule.__name__: rule
    for rule in (
        complex_functions,
        long_functions,
        many_parameters,
        parameters_without_type,
        starred_tuples,
        many_attributes,
        many_imports,
        full_folders,
        small_satellites,
        doubled_statements,
        headless_docstrings,
        behind_for_after,
        callbacks_from_outside,
    )
}


def measure(modules: list[Module]) -> dict[str, Offenders]:
    """Return the offenders of every rule."""
    return {name: rule(modules) for name, rule in RULES.items()}


def problems(found: dict[str, Offenders], listed: dict[str, Offenders]) -> list[str]:
    """Return a line for each number that is above its entry in the list."""
    return [
        f"{rule}: {place}: {value}, at most {listed.get(rule, {}).get(place, 0)}"
        for rule, offenders in found.items()
        for place, value in offenders.items()
        if value > listed.get(rule, {}).get(place, 0)
    ]


def shrunk(found: dict[str, Offenders], listed: dict[str, Offenders]) -> dict[str, Offenders]:
    """Return the list without what is mended; nothing is added, and no number rises."""
    return {
        rule: {
            place: min(value, found[rule][place])
            for place, value in sorted(listed.get(rule, {}).items())
            if place in found[rule]
        }
        for rule in found
    }


def read() -> dict[str, Offenders]:
    """Return the list as it is kept."""
    listed: dict[str, Offenders] = json.loads(LIST.read_text(encoding="utf-8"))
    return listed


def _main() -> int:
    found = measure(sources())
    listed = read()
    lines = problems(found, listed)
    smaller = shrunk(found, listed)
    for rule, offenders in smaller.items():
        lines += [
            f"{rule}: {place}: {value} -> {offenders.get(place, 0)}: can be taken off the list"
            for place, value in listed.get(rule, {}).items()
            if offenders.get(place, 0) < value
        ]
    if "--shrink" in sys.argv:
        LIST.write_text(json.dumps(smaller, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines) or "nothing to do")
    print({rule: sum(offenders.values()) for rule, offenders in smaller.items()})
    return 0


if __name__ == "__main__":
    sys.exit(_main())
