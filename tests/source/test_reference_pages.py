"""The reference pages list everything that is public."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip
from ddip.notebook.loading import GROUP_MAGICS, DipMagics
from ddip.protocol import status_types

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = Path(ddip.__file__).parent
VARIABLE = r"[A-Z][A-Z0-9]+(?:_[A-Z0-9]*)+|RANK|PYTHONPATH|IPYTHONDIR|PYTHONHASHSEED"
NO_VARIABLES = {"CURRENT_DEVICE", "DEFAULT_PROGRESS_CALLBACK", "GLOO_WAITS", "IPY_MODEL_", "KW_ONLY"}
OPERATIONS = ("LOAD_", "CALL_", "POP_", "PRINT_", "RETURN_", "SC_", "STACK_", "SHORT_")
"""Prefixes of opcodes of Python and of pickle, and of names for ``os.sysconf``."""


def variables_in_code() -> Iterator[str]:
    """Yield the string constants that look like environment variables."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(VARIABLE, text) and not text.startswith(OPERATIONS):
                yield text


def directives() -> dict[str, str]:
    """Return the directives of the page of Python names, by the name that each documents."""
    parts = re.split(r"\n(?=\.\. auto)", (DOCS / "api.md").read_text())
    return {part.splitlines()[0].partition(":: ")[2]: part for part in parts if part.startswith(".. auto")}


def test_the_page_lists_every_public_name() -> None:
    assert {f"ddip.{name}" for name in ddip.__all__} - directives().keys() == set()


@pytest.mark.parametrize("name", [name for name in ddip.__all__ if inspect.isclass(getattr(ddip, name))])
def test_the_page_lists_all_members_of_a_class(name: str) -> None:
    assert re.search(":members:$", directives()[f"ddip.{name}"], re.MULTILINE)
    public = {
        key: value
        for key, value in vars(getattr(ddip, name)).items()
        if not key.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    }
    assert [key for key, value in public.items() if not value.__doc__] == []  # the build omits these


@pytest.mark.parametrize("name", [name for name in ddip.__all__ if inspect.isclass(getattr(ddip, name))])
def test_docstrings_of_attributes_have_no_colon_that_sphinx_takes_for_the_end_of_a_type(name: str) -> None:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(ddip, name)))).body
    assert isinstance(tree, ast.ClassDef)
    values = [statement.value for statement in tree.body if isinstance(statement, ast.Expr)]
    texts = [str(value.value) for value in values[1:] if isinstance(value, ast.Constant)]
    assert [text for text in texts if ": " in re.sub(r"``.*?``", "", text.splitlines()[0])] == []


def test_the_page_lists_every_json_type() -> None:
    kinds = {key for key, value in vars(status_types).items() if typing.is_typeddict(value)}
    assert {f"ddip.protocol.status_types.{kind}" for kind in kinds} - directives().keys() == set()


def test_the_page_lists_every_magic() -> None:
    magics = {name for kind in (DipMagics, *GROUP_MAGICS) for names in kind.magics.values() for name in names}
    assert set(re.findall(r"\{dip-magic\} (\w+)", (DOCS / "magics.md").read_text())) == magics


def test_the_page_lists_every_environment_variable() -> None:
    page = (DOCS / "environment.md").read_text()
    listed = set(re.findall(rf"`({VARIABLE})(?:=\w+)?`", page)) | {"DDIP_NATIVE_"}  # the directive lists its variables
    assert listed == {*variables_in_code()} - NO_VARIABLES
