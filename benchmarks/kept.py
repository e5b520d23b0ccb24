"""Time cells, pushes and pulls of a kept group against a group of the same process, alternating.

Usage: kept.py [CELLS] [RANKS]

The kept group's magics run in its keeper (``ddip/kept``), so each cell takes one request more.
"""

from __future__ import annotations

import contextlib
import io
import sys

from IPython.core.interactiveshell import InteractiveShell
from rows import Row, report_rows, time_call

from ddip import Group

MEGABYTES = 16


def main() -> None:
    """Print one table of results."""
    cells = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    shell = InteractiveShell.instance()
    shell.user_ns["values"] = values = bytes(MEGABYTES << 20)
    rows = []
    with Group(size) as group, contextlib.redirect_stdout(io.StringIO()):
        shell.run_line_magic("load_ext", "ddip")
        start = time_call(lambda: shell.run_line_magic("makedip", f"--keep 5m -n {size}"))
        try:
            work = {
                "an empty cell": (
                    lambda: group.run("pass"),
                    lambda: shell.run_cell_magic("dip", "", "pass"),
                    cells,
                ),
                f"a push of {MEGABYTES} MB": (
                    lambda: group.push({"values": values}),
                    lambda: shell.run_line_magic("dipush", "values"),
                    cells // 10,
                ),
                f"a pull of {MEGABYTES} MB": (
                    lambda: group.pull(["values"]),
                    lambda: shell.run_line_magic("dipull", "values"),
                    cells // 10,
                ),
            }
            for what, (ours, kept, times) in work.items():
                pairs = [(1e3 * time_call(kept), 1e3 * time_call(ours)) for _ in range(times)]
                rows.append(
                    Row(what, "ms", size, [one for one, _ in pairs], {"the same process": [one for _, one in pairs]})
                )
        finally:
            shell.run_line_magic("makedip", "-k")
    print(f"start of the kept group: {start:.1f} s")
    report_rows("kept", rows)


if __name__ == "__main__":
    main()
