"""The documentation builds without a warning and is complete: notebooks with output, links, names."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe

import ddip
from ddip.notebook.magics import DipMagics
from tests.cluster.test_notebooks import NOTEBOOKS

from .lab import Lab

pytest.importorskip("myst_nb", reason="pip install '.[docs]'")
ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The links of a page, and the anchors that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.names.update(filter(None, [found.get("id"), found.get("name") if tag == "a" else None]))
        target = found.get("href") if tag in ("a", "link") else found.get("src")
        if target and tag in ("a", "link", "img", "script"):
            self.targets.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation as ``make docs`` does."""
    to = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-E", "-d", str(to / "trees")]
    done = subprocess.run([*command, "docs", str(to / "html")], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return to / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Return every page of the site."""
    return {path: Page(path) for path in site.rglob("*.html")}


def test_all_messages_are_listed(site: Path) -> None:
    page = (site / "messages.html").read_text()
    text = re.sub("<[^>]+>", "", page)
    assert "this group has no app; start it with %makedip -a NAME" in text and page.count("<li>") > 200


def test_make_docs_runs_the_tested_command() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "-m sphinx -b html -W --keep-going -q -d build/doctrees docs build/docs" in makefile


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_each_notebook_has_a_page_with_outputs(pages: dict[Path, Page], site: Path, notebook: Path) -> None:
    text = pages[site / "tutorials" / f"{notebook.stem}.html"].text
    assert text.count("cell_input") >= text.count("cell_output docutils") > 3
    assert re.search(r"ddip: \d ranks on the CPU(?: of [^,]+, [^,]+)?, gloo, \d", text), "what %makedip shows"
    assert f'href="tutorials/{notebook.stem}.html"' in pages[site / "index.html"].text


def test_every_link_within_the_site_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            named = unquote(parts.fragment)
            if not to.is_file() or (named and to.suffix == ".html" and named not in pages[to].names):
                broken.append(f"{path.relative_to(site)}: {target}")
    assert not broken, "\n".join(broken)


def test_no_page_loads_anything_from_the_network(pages: dict[Path, Page]) -> None:
    loaded = re.compile(
        r"""<(?:script|img|iframe)[^>]*\bsrc=["']?(?:https?:)?//|<link[^>]*\bhref=["']?(?:https?:)?//"""
    )
    assert not [path.name for path, page in pages.items() if loaded.search(page.text)]


@pytest.mark.parametrize("name", ["index", "limits", "hosts", "design", "tutorials/fastai_01_intro"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_accessible_and_fits_its_screen(site: Path, lab: Lab, name: str, width: int, scheme: str) -> None:
    browser = lab.page.context.browser
    assert browser is not None
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto((site / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    assert not [(rule["id"], rule["nodes"]) for rule in found if rule["impact"] in ("serious", "critical")]
    page.close()


def test_every_public_name_and_every_option_is_in_the_reference(pages: dict[Path, Page], site: Path) -> None:
    names = {f"ddip.{name}" for name in ddip.__all__ if not name.endswith("_ipython_extension")}
    assert names <= pages[site / "api.html"].names
    magics = pages[site / "magics.html"]
    kinds = {**DipMagics.magics["line"], **DipMagics.magics["cell"]}
    assert set(kinds) <= magics.names
    text = re.sub(r"<[^>]+>", "", magics.text)
    for name, attribute in kinds.items():
        parser = getattr(getattr(DipMagics, attribute), "parser", None)
        for action in parser._actions if parser else []:
            assert all(option in text for option in action.option_strings), (name, action)


def test_the_files_of_the_repository_are_included(pages: dict[Path, Page], site: Path) -> None:
    for name, page in [("Issues", "limits"), ("CHANGELOG", "changes"), ("SECURITY", "security")]:
        headings = re.findall(r"^#+ (.+)$", (ROOT / f"{name}.md").read_text(), re.MULTILINE)
        text = re.sub(r"<[^>]+>", "", pages[site / f"{page}.html"].text)
        assert all(heading in text for heading in headings), name
    assert "Which tests for which change" in pages[site / "contributing.html"].text
