"""Rules for ddip's source that ruff does not know."""

from __future__ import annotations

import ast
from pathlib import Path

import ddip

FILES = sorted(Path(ddip.__file__).parent.rglob("*.py"))


def test_every_broad_except_raises_or_explains_itself() -> None:
    wrong = []
    for file in FILES:
        text = file.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            catches_all = isinstance(node, ast.ExceptHandler) and ast.unparse(node.type or node) == "BaseException"
            if catches_all and "#" not in lines[node.lineno - 1]:
                wrong += [f"{file}:{node.lineno}"] * (not any(isinstance(part, ast.Raise) for part in ast.walk(node)))
    assert wrong == []


def test_variables_that_functions_set_for_the_module_are_described() -> None:
    wrong = []
    for file in FILES:
        text = file.read_text()
        lines, tree = text.splitlines(), ast.parse(text)
        named = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for statement, following in zip(tree.body, [*tree.body, None][1:], strict=True):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
                is_described = isinstance(following, ast.Expr) or "#" in lines[statement.lineno - 1]
                wrong += [f"{file}:{statement.lineno}"] * (bool(found & named) and not is_described)
    assert wrong == []
