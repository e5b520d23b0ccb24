"""Print the map of ddip's modules, made from their docstrings: ``python -m tests.module_map``.

With ``--write``, write the table of packages in CONTRIBUTING.md instead; ``tests/unit/test_package.py`` compares it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"(?s)(?<=<!-- packages -->\n\n).*?(?=\n\n<!-- end of packages -->)")


def summary(file: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def packages() -> list[Path]:
    """Return the folders of ddip's packages, parents first."""
    return sorted(file.parent for file in ROOT.glob("ddip/**/__init__.py"))


def package_table() -> str:
    """Return one row per package, without ddip itself and without the parts of an app."""
    shown = [folder for folder in packages() if 1 < len(folder.relative_to(ROOT).parts) < 4]
    rows = [f"| `{folder.relative_to(ROOT / 'ddip')}/` | {summary(folder / '__init__.py')} |" for folder in shown]
    return "\n".join(["| package | purpose |", "| --- | --- |", *rows])


def module_map() -> str:
    """Return each package and its modules, with their summaries."""
    lines = []
    for folder in packages():
        lines.append(f"\n{folder.relative_to(ROOT)}/  {summary(folder / '__init__.py')}")
        files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
        lines += [f"    {file.name}  {summary(file)}" for file in files]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(TABLE.sub(lambda _: package_table(), PAGE.read_text()))
    else:
        print(module_map())
