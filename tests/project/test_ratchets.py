"""The sources break the rules of ``ratchets.py`` nowhere but where they did before."""

from __future__ import annotations

import pytest

from tests.project import ratchets
from tests.project.tidy import Module


def test_list_is_what_the_sources_break() -> None:
    found = ratchets.measure(ratchets.sources())
    listed = ratchets.read()
    assert not ratchets.problems(found, listed)
    assert listed == ratchets.shrunk(found, listed), "run python -m tests.project.ratchets --shrink"


MANY = ", ".join(f"p{n}=0" for n in range(9))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("complex_functions", "def f(x):\n" + "    if x: pass\n" * 15),
        ("long_functions", "def f():\n" + "    x = 1\n" * 60),
        ("many_parameters", f"def f({MANY}): pass"),
        ("many_parameters", f"class A:\n    def __init__(self, {MANY[:-6]}): pass"),
        ("parameters_without_type", "def f(*about: Any): pass"),
        ("starred_tuples", "def f():\n    about = 1, 2\n    g(*about)"),
        (
            "many_attributes",
            "class A:\n    def f(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(16)),
        ),
        ("many_imports", "".join(f"from everstep.m{n} import x\n" for n in range(21))),
        ("small_satellites", "x = 1"),
        ("doubled_statements", "a, b = 1, 2"),
        ("headless_docstrings", 'def f():\n    """What is left."""'),
        ("behind_for_after", "x = 1  # copied behind the step"),
        (
            "callbacks_from_outside",
            "class A:\n    def __init__(self):\n        self.told: Callable[[], None] = f\n"
            "def g(a):\n    a.told = h",
        ),
    ],
)
def test_rule_finds_its_offender(rule: str, source: str) -> None:
    found = ratchets.RULES[rule]([Module("everstep.a", source)])
    assert found
    assert ratchets.problems({rule: found}, {})
    assert not ratchets.problems({rule: found}, {rule: found})


def test_full_folder() -> None:
    modules = [Module(f"everstep.a.m{n}", "") for n in range(17)]
    assert ratchets.RULES["full_folders"](modules) == {"everstep.a": 17}
    assert not ratchets.RULES["full_folders"](modules[1:])


def test_list_only_shrinks() -> None:
    listed = {"doubled_statements": {"everstep.a": 2, "everstep.b": 1}}
    found = {"doubled_statements": {"everstep.a": 3, "everstep.c": 1}}
    assert ratchets.shrunk(found, listed) == {"doubled_statements": {"everstep.a": 2}}
