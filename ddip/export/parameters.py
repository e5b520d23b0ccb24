"""Make the assignments of a cell tagged ``parameters``, or run with ``%%dip --param``, options of the script."""

from __future__ import annotations

import ast

from ddip.export.record import Session
from ddip.export.translation import Statement

FUNCTION = '''\
def parse_options() -> argparse.Namespace:
    """Return the options of the command line; their defaults are the values of the session."""
    parser = argparse.ArgumentParser()
{lines}
    return parser.parse_args()
'''


class Options:
    """The options of the script, found while its main function is written."""

    def __init__(self, session: Session) -> None:
        self.numbers = {one.number for one in session.executions if one.is_param}
        """Numbers of the executions whose assignments are options."""
        self.found: dict[str, object] = {}
        """Default of each option, by name."""

    def replace_constant(self, statement: Statement) -> str:
        """Return the assignment of an option instead of `statement`; empty if it assigns no constant."""
        match statement.node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                return ""
        try:
            default = ast.literal_eval(value)
        except ValueError:
            return ""
        if not isinstance(default, (bool, int, float, str)) or name in self.found:
            return ""
        self.found[name] = default
        return f"{name} = options.{name}"

    def function_text(self) -> str:
        """Return the function of the script that parses the options."""
        lines = [self._option_line(name, default) for name, default in self.found.items()]
        return FUNCTION.format(lines="\n".join(f"    {line}" for line in lines))

    def _option_line(self, name: str, default: object) -> str:
        flag = f"--{name.replace('_', '-')}"
        kind = (
            "action=argparse.BooleanOptionalAction" if isinstance(default, bool) else f"type={type(default).__name__}"
        )
        return f"parser.add_argument({flag!r}, dest={name!r}, {kind}, default={default!r})"
