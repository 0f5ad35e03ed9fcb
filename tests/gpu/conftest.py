"""The tests on a CUDA device: set before it is first used."""

from __future__ import annotations

import os

# Or cuBLAS does not give the same bits each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
