"""Hooks of MkDocs for documents that are read in the repository, too.

They link to files by relative paths, some of which lie outside ``docs/``. These files become pages
below ``repository/`` here, and links to them, and to folders, lead there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = "docs"
OUTSIDE = "repository"
SHOWN = ("*.md", "changelog.d/README.md", "examples/*.py")
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside ``docs/`` that pages link to."""
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in SHOWN for path in root.glob(pattern)):
        name = f"{OUTSIDE}/{path.relative_to(root).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links of a page lead to pages of the site."""
    root = Path(config.config_file_path).parent
    here = page.file.src_uri

    def target(match: re.Match[str]) -> str:
        folder = posixpath.dirname(_in_repository(here))
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        if (root / path).is_dir():
            path += "/README.md"
        return posixpath.relpath(_in_site(path), posixpath.dirname(here))

    return LINK.sub(target, markdown)


def _in_repository(name: str) -> str:
    outside = name.removeprefix(f"{OUTSIDE}/")
    return outside if outside != name else f"{DOCS}/{name}"


def _in_site(path: str) -> str:
    inside = path.removeprefix(f"{DOCS}/")
    return inside if inside != path else f"{OUTSIDE}/{path}"
