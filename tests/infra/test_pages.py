"""The pages in docs: generated pages fit their sources, the index names every page, and links have targets."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def module_monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def pages(module_monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # pages.py imports another script in its folder.
    module_monkeypatch.syspath_prepend(str(ROOT / "infra"))
    spec = importlib.util.spec_from_file_location("pages", ROOT / "infra" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_made_pages_fit_their_sources(pages: ModuleType) -> None:
    assert (DOCS / "errors.md").read_text() == pages.errors_page(), "run: python infra/pages.py"
    assert (DOCS / "rooms.md").read_text() == pages.rooms_page(), "run: python infra/pages.py"
    assert (DOCS / "operations.md").read_text() == pages.operations_page(), "run: python infra/pages.py"
    assert (DOCS / "llms.txt").read_text() == pages.llms_text(), "run: python infra/pages.py"


def test_the_index_names_every_page_once() -> None:
    targets = [link.partition("#")[0] for link in _LINK.findall((DOCS / "index.md").read_text())]
    linked = [(DOCS / target).resolve() for target in targets]
    assert sorted(page for page in linked if page.is_relative_to(DOCS)) == [
        page for page in PAGES if page.name != "index.md"
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(page.read_text())
    }


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"
