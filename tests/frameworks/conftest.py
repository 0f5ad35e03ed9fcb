"""Tests on the frameworks that users train with; ``make test-frameworks`` installs them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

FRAMEWORKS = (
    "accelerate",
    "datasets",
    "deepspeed",
    "lightning",
    "omegaconf",
    "peft",
    "torchdata",
    "transformers",
)

# Without the frameworks (in `make test`) these modules cannot even be imported.
collect_ignore_glob = [] if all(map(find_spec, FRAMEWORKS)) else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the frameworks warn: their deprecations are no errors of ours."""
    for item in items:
        if item.path.parent.name == "frameworks":
            item.add_marker(pytest.mark.filterwarnings("default"))
