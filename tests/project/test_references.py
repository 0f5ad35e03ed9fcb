"""Docstrings: every cross-reference (``:class:`...```) names something that the sources define."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.project.ratchets import sources

REFERENCE = re.compile(r":(?:mod|class|func|meth|attr|data):`~?(\.?[\w.]+)`")


def defined(prefix: str, body: list[ast.stmt]) -> Iterator[str]:
    """Yield the dotted names that a body defines or imports."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}.{node.name}"
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    yield f"{prefix}.{part.attr}"
        elif isinstance(node, ast.ClassDef):
            yield f"{prefix}.{node.name}"
            yield from defined(f"{prefix}.{node.name}", node.body)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield f"{prefix}.{alias.asname or alias.name}"
        elif isinstance(node, ast.If):
            yield from defined(prefix, node.body)
        else:
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield f"{prefix}.{part.id}"


def unresolved() -> list[str]:
    """Return the references that lead nowhere; one with a leading dot may be the end of a name."""
    modules = sources()
    names = {module.name for module in modules}
    for module in modules:
        names.update(defined(module.name, module.tree.body))
    ends = {"." + ".".join(name.split(".")[-n:]) for name in names for n in range(1, 4)}
    found = []
    for module in modules:
        for reference in REFERENCE.findall(module.source):
            first = reference.split(".")[0]
            if first == "" and reference in ends:
                continue
            # A name of the package's facade is public; its members are defined elsewhere.
            owner = ".".join(reference.split(".")[:2])
            if first.startswith("everstep") and (reference in names or owner in PUBLIC & names):
                continue
            if first == "" or first.startswith("everstep"):
                found.append(f"{module.name}: {reference}")
    return found


PUBLIC = {"everstep.Checkpointer", "everstep.Recovery"}


def test_references_lead_somewhere() -> None:
    assert not (found := unresolved()), "\n".join(found)
