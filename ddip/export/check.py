"""Run a script under torchrun, and compare its values with those of the session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddip.errors import BadInput
from ddip.sharded import values

ERRORS = ("F4", "F5", "F6", "F7", "F82", "F9", "E9", "PLE")
"""Beginnings of ruff's rules about errors; the others are about style."""
TOLERANCE = 1e-6
LAST_LINES = """
from ddip.export.check import save_values

save_values(globals() | locals(), {names})
"""
FOLDER = "DDIP_EXPORT_CHECK"
"""Environment variable that tells the ranks of the checked script where to store their values."""


def keep_style(text: str, path: Path) -> str:
    """Return the script with a comment that lets ruff accept the style of the cells, if ruff is installed.

    ruff still reports errors, such as undefined names.
    """
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json", "--stdin-filename", str(path), "-"]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    try:
        codes = {str(found["code"]) for found in json.loads(answer.stdout)}
    except (ValueError, TypeError, KeyError):
        return text
    style = sorted(code for code in codes if code == "F401" or not code.startswith(ERRORS))
    if not style:
        return text
    above, end, below = text.partition('"""\n\n')
    return f"{above}{end}# ruff: noqa: {', '.join(style)}    the style of the cells, as typed\n\n{below}"


def last_lines(names: list[str]) -> str:
    """Return the code that stores the values of `names` at the end of the checked script's main function."""
    return LAST_LINES.format(names=names)


def save_values(variables: dict[str, object], names: list[str]) -> None:
    """Store this rank's values for the notebook; the checked script calls this."""
    packed, _ = values.pack_values(variables, names)
    Path(os.environ[FOLDER], os.environ["RANK"]).write_bytes(packed)


def compare_script(text: str, path: Path, size: int, expected: Sequence[bytes]) -> str:
    """Run the script `text` beside `path`, and compare its values; return a line about them.

    Raises BadInput if they differ, or if the script fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = path.with_name(f".{path.stem}_check_{os.getpid()}.py")
        copy.write_text(text)
        try:
            _run_script(copy, size, folder, path)
        finally:
            copy.unlink()
        differences: dict[str, float | str] = {}
        for rank, ours in enumerate(expected):
            stored = Path(folder, str(rank))
            theirs = stored.read_bytes() if stored.exists() else values.pack_values({}, [])[0]
            for name, difference in values.compare_values(ours, theirs).items():
                if isinstance(difference, str) or difference > TOLERANCE:
                    raise BadInput(
                        f"--check: {path} does not give the session's {name} on rank {rank}: "
                        + (difference if isinstance(difference, str) else f"the difference is {difference:.3g}")
                    )
                differences[name] = max(difference, float(differences.get(name, 0.0)))
    if not differences:
        return f"ddip: {path} ran under torchrun; no rank has a module, so name variables to compare: --check loss"
    largest = max((float(difference) for difference in differences.values()), default=0.0)
    return f"ddip: {path} gives the session's values: {len(differences)} compared, largest difference {largest:.3g}"


def _run_script(copy: Path, size: int, folder: str, path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), str(copy)]
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, FOLDER: folder, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # torchrun ends the ranks
            process.wait()
            raise
        if status:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()]
            errors = [line for line in lines if ".py" not in line and "Error" in line and "ChildFailed" not in line]
            why = errors[0] if errors else lines[-1] if lines else f"exit status {status}"
            raise BadInput(f"--check: {path} failed under torchrun: {why}\n" + "\n".join(lines[-25:]))
