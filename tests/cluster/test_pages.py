"""Every code block of the README and of docs/ works, pasted in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .notebook import Notebook
from .pages import FILES, MARKS, PAGES, ROOT, Block, blocks_of, pattern_of

KNOWN = {"python", "sh", "text", "toml", "yaml"}
WITH_CODE = [page for page in PAGES if any(block.is_cell or "terminal" in block.marks for block in blocks_of(page))]


def name_of(page: Path) -> str:
    """Return the path of a page within the repository."""
    return str(page.relative_to(ROOT))


def needs_data(page: Path) -> bool:
    """Return True if a block of the page needs fastai's data sets."""
    return any("data" in block.marks for block in blocks_of(page))


def needs_extra(page: Path) -> bool:
    """Return True if the page needs packages that ``make test`` does not install."""
    return any("needs" in block.marks for block in blocks_of(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_have_known_kinds_and_skipped_blocks_a_reason(page: Path) -> None:
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        assert block.language in KNOWN or block.language.startswith("{"), f"{where}: {block.language!r}"
        assert set(block.marks) <= MARKS, f"{where}: {block.marks}"
        assert block.marks.get("not run", "why") and block.marks.get("file", "name"), where


@pytest.mark.parametrize("page", [*PAGES, *FILES], ids=name_of)
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(((?!\w+:)[^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        assert not heading or heading in _anchors_of(file), target


def _anchors_of(page: Path) -> set[str]:
    """Return the headings of a page, as links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found}


RUN = [page for page in WITH_CODE if not needs_data(page) and not needs_extra(page)]


@pytest.mark.grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_blocks_of_a_page_run_as_they_are_pasted(
    page: Path, new_notebook: Callable[[], Notebook], tmp_path: Path
) -> None:
    run_blocks(page, new_notebook(), tmp_path)


def run_blocks(page: Path, notebook: Notebook, folder: Path) -> None:
    """Paste all blocks of `page` into `notebook`, which runs in `folder`."""
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(block.text)
        elif "terminal" in block.marks:
            _assert_shown(block, where, _run_in_terminal(block.text, folder, where))
        elif block.is_cell:
            _assert_shown(block, where, _run_in_notebook(notebook, block, where))


def _run_in_terminal(text: str, folder: Path, where: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-ec", text], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _run_in_notebook(notebook: Notebook, block: Block, where: str) -> str:
    if "types" in block.marks:
        return _run_dialogue(notebook, block, where)
    shown = notebook.run(block.text, timeout=500 if "data" in block.marks else 240)
    wanted = block.marks.get("raises", "")
    assert shown.error == wanted, f"{where}\n{block.text}\n{shown.message}\n{shown.traceback}\n{shown.stderr}"
    return "\n".join([shown.text, shown.traceback])


def _run_dialogue(notebook: Notebook, block: Block, where: str) -> str:
    """Run a cell that asks; return its output, with the prompts as the page states them.

    Prompts arrive on another channel than the output, so that their places in it are not known.
    """
    answers = [] if block.marks["types"] == "nothing" else block.marks["types"].split(" | ")
    asked = notebook.converse(block.text, *answers)
    while "no background cell waits" in asked.shown.message:  # its ranks have not reached the breakpoint yet
        asked = notebook.converse(block.text, *answers)
    assert asked.shown.status == "ok", f"{where}\n{asked}"
    typed = [f"{prompt}{answer}" for prompt, answer in zip(asked.prompts, answers, strict=True)]
    stated = [line for line in block.shows.splitlines() if re.match(r"rank \d+(:| of)", line)]
    for line in stated:
        assert any(pattern_of(line).fullmatch(text) for text in typed), f"{where}: {line}\n{typed}"
    block.shows = "\n".join(line for line in block.shows.splitlines() if line not in stated)
    return asked.text


def _assert_shown(block: Block, where: str, shown: str) -> None:
    assert pattern_of(block.shows).search(shown), (
        f"{where}\n{block.text}\nshall show\n{block.shows}\nbut shows\n{shown}"
    )
