"""Run a script under torchrun, and compare its values with those of the session."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ddip.errors import BadInput
from ddip.export.record import Session
from ddip.sharded import values

TOLERANCE = 1e-6
"""Largest difference of a value, relative to its largest number."""


def last_line(names: list[str], folder: str) -> str:
    """Return the code with which the checked script stores the values of `names` in `folder`."""
    return f"__import__('ddip.export.check').export.check.save_values(globals(), {names}, {folder!r})"


def save_values(variables: dict[str, object], names: list[str], folder: str) -> None:
    """Store this rank's values for the notebook; the checked script calls this."""
    packed, _ = values.pack_values(variables, names)
    Path(folder, os.environ["RANK"]).write_bytes(packed)


def accept_style(text: str) -> str:
    """Return the script with comments that let ruff accept the style of the cells, line by line.

    Without ruff, there are none. ruff still reports undefined names.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--ignore", "F821", "--add-noqa"]
        subprocess.run([*command, str(path)], capture_output=True, check=False)
        return path.read_text(encoding="utf-8", errors="strict")


def compare_script(
    write: Callable[[str], str], path: Path, session: Session, expected: Sequence[bytes], pushed: Sequence[bytes] = ()
) -> str:
    """Run the script beside `path`, and compare its values; return a line about them.

    `write`: returns the script that stores its values in a folder; `expected`: the packed values of each rank;
    `pushed`: the values that the script reads from a file. Raises BadInput if values differ, or the script fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, data = path.with_name(f".{path.stem}.check.py"), path.with_name(f".{path.stem}.data.pickle")
        try:
            copy.write_text(write(folder), encoding="utf-8")
            data.write_bytes(pickle.dumps([*pushed]))
            _run_script(copy, session, path)
        finally:
            copy.unlink(missing_ok=True)
            data.unlink(missing_ok=True)
        largest, compared = 0.0, set[str]()
        for rank, ours in enumerate(expected):
            stored = Path(folder, str(rank))
            if not stored.exists():
                raise BadInput(f"--check: {path} ended on rank {rank} before its last line, so it was not written")
            for name, difference in values.compare_values(ours, stored.read_bytes()).items():
                if isinstance(difference, str) or not difference <= TOLERANCE:
                    what = difference if isinstance(difference, str) else f"the relative difference is {difference:.3g}"
                    raise BadInput(
                        f"--check: {path} was not written, since it does not give the session's {name} on rank {rank}: "
                        + what
                    )
                largest = max(largest, difference)
                compared.add(name)
    return f"ddip: {path} gives the session's values: {len(compared)} compared, largest difference {largest:.3g}"


def _run_script(copy: Path, session: Session, path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={session.size}"]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": f"{session.threads}",
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, str(copy.absolute())],
            cwd=session.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # torchrun ends the ranks
            process.wait()
            raise
        if status:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if line.strip()]
            errors = [line for line in lines if re.search(r"^(\[rank\d+\]: )?[\w.]+(Error|Exception): ", line)]
            why = errors[0] if errors else lines[-1] if lines else f"exit status {status}"
            raise BadInput(
                f"--check: {path} was not written, since it failed under torchrun: {why}\n" + "\n".join(lines[-25:])
            )
