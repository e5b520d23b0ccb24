"""Find the script that a ``%diprun`` cell names, on the notebook's machine."""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path

from ddip.errors import BadInput
from ddip.protocol.cell_messages import ScriptFile

MAGIC = "%diprun"


def find_script(code: str, folder: str = "") -> ScriptFile | None:
    """Return the script that the cell `code` runs; None if the cell is not one line of ``%diprun``.

    A relative path begins at the `folder`, and modules are found there; default: the working folder. Raises BadInput if
    the line names no file that ranks can run.
    """
    found = re.fullmatch(rf"{MAGIC}(?:[ \t]+(.*))?", code.strip())
    if found is None:
        return None
    try:
        words = shlex.split(found[1] or "")
    except ValueError:
        raise BadInput(f"{code.strip()}: a quote is not closed; type it on both sides of the text") from None
    if words in ([], ["-m"]):
        raise BadInput(
            f"{code.strip()}: type a script and its arguments, such as {MAGIC} train.py --lr 0.1, or -m and a module"
        )
    folder = folder or str(Path.cwd())
    if words[0] == "-m":
        if words[1].endswith(".py"):
            raise BadInput(f"{MAGIC} -m {words[1]}: this is a file; type {MAGIC} {words[1]}")
        return {"folder": folder, "digest": ""}
    if words[0].startswith("-"):
        raise BadInput(f"{MAGIC} {words[0]}: in a %%dip cell, type the options after %%dip, and here only the script")
    return {"folder": folder, "digest": hashlib.sha256(_read_script(words[0], folder)).hexdigest()}


def _read_script(typed: str, folder: str) -> bytes:
    """Return the contents of the script; raises BadInput for a notebook, and if it cannot be read."""
    path, line = Path(folder, Path(typed).expanduser()), f"{MAGIC} {typed}"
    if path.suffix == ".ipynb":
        raise BadInput(f"{line}: this is a notebook; run its cells with %autodip on, or export it as a script")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{line}: {path} cannot be read ({error.strerror}); type the path of a script") from None
