"""Make everstep-bench usable in tests where it is not installed.

``make setup`` installs it. A checkout that borrows the environment of another one has only the
sources: pytest puts them on ``sys.path`` (``pythonpath`` in pyproject.toml), which child processes
do not inherit, and ``importlib.metadata`` finds no entry points in them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

__all__ = ["provide_plugin"]

_BENCH = Path(__file__).parents[2] / "bench"
_GROUP = re.compile(r'^\[project\.entry-points\."(.+)"\]\n((?:.+\n)+)', re.MULTILINE)


def provide_plugin() -> None:
    """Write the metadata that an installation would have, and pass the sources to children."""
    try:
        importlib.metadata.distribution("everstep-bench")
    except importlib.metadata.PackageNotFoundError:
        project = (_BENCH / "pyproject.toml").read_text(encoding="utf-8")
        folder = _BENCH / "src" / "everstep_bench.egg-info"  # which git ignores
        folder.mkdir(exist_ok=True)
        points = "".join(
            f"[{group}]\n{names.replace(chr(34), '')}" for group, names in _GROUP.findall(project)
        )
        metadata = "Metadata-Version: 2.1\nName: everstep-bench\nVersion: 0\n"
        (folder / "PKG-INFO").write_text(metadata)
        (folder / "entry_points.txt").write_text(points)
    elsewhere = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(_BENCH / "src") not in elsewhere:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_BENCH / "src"), *filter(None, elsewhere)])
