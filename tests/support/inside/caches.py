"""Results that the project computes once for each process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import everstep
from everstep.compress import sparse


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    """Clear cached checks of torch's version and of the kernels, before and after the test."""
    cached = everstep._check_torch, sparse._kernels_on
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()
