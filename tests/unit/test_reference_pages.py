"""The reference pages list everything that is public."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ddip

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = Path(ddip.__file__).parent
VARIABLE = r"[A-Z][A-Z0-9]+(?:_[A-Z0-9]*)+|RANK|PYTHONPATH|IPYTHONDIR|PYTHONHASHSEED"
NO_VARIABLES = {"CURRENT_DEVICE", "DEFAULT_PROGRESS_CALLBACK", "GLOO_WAITS", "IPY_MODEL_", "KW_ONLY"}
OPERATIONS = ("LOAD_", "CALL_", "POP_", "PRINT_", "RETURN_", "SC_")
"""Prefixes of Python's opcodes, and of names for ``os.sysconf``."""


def variables_in_code() -> Iterator[str]:
    """Yield the string constants that look like environment variables."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(VARIABLE, text) and not text.startswith(OPERATIONS):
                yield text


def test_the_page_lists_every_environment_variable() -> None:
    page = (DOCS / "magics.md").read_text().partition("\n## Environment variables\n")[2]
    listed = set(re.findall(rf"`({VARIABLE})(?:=\w+)?`", page)) | {"DDIP_NATIVE_"}  # the directive lists its variables
    assert listed == {*variables_in_code()} - NO_VARIABLES
