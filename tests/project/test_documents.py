"""Documents: every path, page and heading that code and documents cite exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "changelog.d").glob("README.md"),
    ]
)
CITED = re.compile(
    r"(?<![\w./])(?:(?P<page>docs/[\w/-]+\.md)(?:#(?P<heading>[\w-]+))?"
    r"|(?:docs/)?adr/(?P<number>\d{3})\b)"
)
LINK = re.compile(r"\]\((?P<path>[^)#: ]*)(?:#(?P<heading>[\w-]+))?\)")
SOURCE_PATH = re.compile(r"`((?:src|tests|docs|bench|scripts)/[\w/.-]+\.\w+)`")
MODULE_PATH = re.compile(r"`([a-z_]+/[a-z_/]*\.py|[a-z_]+/(?:[a-z_]+/)*)`")
PACKAGES = "capture|commit|keeper|link|plan|restore|run|state|tiers|trainer"
PACKAGE_PATH = re.compile(rf"`((?:{PACKAGES})/[a-z_/]+)`")
UNDER = ("src/everstep", "tests", "bench/src", ".")

TEST_FILE = re.compile(r"[\w/]*\btest_\w+\.py\b")


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in plain}


def missing(page: Path, heading: str | None) -> str | None:
    """Return why a citation leads nowhere, or None."""
    if not page.exists():
        return f"{page.relative_to(ROOT)} does not exist"
    if heading and heading not in headings(page):
        return f"{page.relative_to(ROOT)} has no heading #{heading}"
    return None


def sources() -> list[Path]:
    """Return the tracked and new files of the code, the tests and the scripts."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--"]
    folders = ["src", "tests", "bench", "scripts", "Makefile", "pyproject.toml"]
    listed = subprocess.run(
        [*command, *folders], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split()]
    return [path for path in paths if path.suffix in {".py", ".sh", ".toml", ""} and path.is_file()]


def test_citations_in_the_code_exist() -> None:
    wrong = []
    for path in sources():
        for match in CITED.finditer(path.read_text(errors="replace")):
            if number := match["number"]:
                problem = None if list(DOCS.glob(f"adr/{number}-*.md")) else f"no adr/{number}"
            else:
                problem = missing(ROOT / match["page"], match["heading"])
            if problem:
                wrong.append(f"{path.relative_to(ROOT)}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    wrong = []
    for match in LINK.finditer(text):
        target = page.parent / match["path"] if match["path"] else page
        heading = match["heading"] if target.suffix == ".md" else None
        if problem := missing(target.resolve(), heading):
            wrong.append(problem)
    for path in SOURCE_PATH.findall(text):
        if not (ROOT / path).exists():
            wrong.append(f"{path} does not exist")
    for path in [*MODULE_PATH.findall(text), *PACKAGE_PATH.findall(text)]:
        if not any((ROOT / folder / path).exists() for folder in UNDER):
            wrong.append(f"{path} is in none of {', '.join(UNDER)}")
    tests = [str(path) for path in (ROOT / "tests").rglob("test_*.py")]
    for name in TEST_FILE.findall(text):
        if not any(test.endswith("/" + name) for test in tests):
            wrong.append(f"no test file {name}")
    for match in CITED.finditer(text):
        if match["number"] and not list(DOCS.glob(f"adr/{match['number']}-*.md")):
            wrong.append(f"no adr/{match['number']}")
    assert not wrong, "\n".join(wrong)


def test_the_list_of_decisions_is_complete() -> None:
    text = (DOCS / "adr" / "README.md").read_text()
    pages = {path.name[:3]: path.name for path in (DOCS / "adr").glob("[0-9]*.md")}
    listed = dict(re.findall(r"^\| \[(\d{3})\]\((.*?)\) \|", text, re.M))
    moved = set(re.findall(r"^\| (\d{3}) \|", text, re.M))
    assert listed == pages
    assert not moved & set(pages)
    assert {f"{number:03}" for number in range(1, max(map(int, pages)) + 1)} == moved | set(pages)
