"""Find the script that a ``%diprun`` cell names, on the notebook's machine."""

from __future__ import annotations

import difflib
import hashlib
import re
import shlex
from pathlib import Path

from ddip.errors import BadInput
from ddip.protocol.cell_messages import ScriptFile

MAGIC = "%diprun"
MODULE_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")


def find_script(code: str) -> ScriptFile | None:
    """Return the script that the cell `code` runs; None if the cell is not one line of ``%diprun``.

    Raises BadInput if the line names no file that ranks can run.
    """
    found = re.fullmatch(rf"{MAGIC}(?:[ \t]+(.*))?", code.strip())
    if found is None:
        return None
    try:
        words = shlex.split(found[1] or "")
    except ValueError:
        raise BadInput(f"{code.strip()}: a quote is not closed; type it on both sides of the text") from None
    if words[:1] == ["-m"]:
        _check_module(words[1:])
        return {"folder": str(Path.cwd()), "digest": ""}
    if not words:
        raise BadInput(f"{MAGIC}: type a script and its arguments, such as {MAGIC} train.py --lr 0.1")
    if words[0].startswith("-"):
        raise BadInput(f"{MAGIC} {words[0]}: in a %%dip cell, type the options after %%dip, and here only the script")
    return {"folder": str(Path.cwd()), "digest": hashlib.sha256(_read_script(words[0])).hexdigest()}


def _check_module(words: list[str]) -> None:
    if not words:
        raise BadInput(f"{MAGIC} -m: type the name of a module, such as {MAGIC} -m package.train --lr 0.1")
    if words[0].endswith(".py"):
        raise BadInput(f"{MAGIC} -m {words[0]}: this is a file; type {MAGIC} {words[0]}")


def _read_script(typed: str) -> bytes:
    """Return the contents of the script; raises BadInput if it is no file that Python can run."""
    path, line = Path(typed).expanduser().absolute(), f"{MAGIC} {typed}"
    if path.is_dir():
        example = next((file.name for file in sorted(path.glob("[!_]*.py"))), "train.py")
        raise BadInput(f"{line}: this is a folder; type a script in it, such as {MAGIC} {Path(typed) / example}")
    if path.suffix == ".ipynb":
        raise BadInput(f"{line}: this is a notebook; run its cells with %autodip on, or export it as a script")
    if not path.exists():
        raise BadInput(f"{line}: there is no file {path}; {_suggest_script(typed, path)}")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{line}: {path} cannot be read ({error.strerror}); type another script") from None
    if b"\0" in source:
        raise BadInput(f"{line}: this is not Python code; type a script, such as {MAGIC} train.py")
    return source


def _suggest_script(typed: str, path: Path) -> str:
    names = [file.name for file in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, names, 1)
    if similar:
        return f"type {MAGIC} {Path(typed).with_name(similar[0])}"
    if MODULE_NAME.fullmatch(typed) and not typed.endswith(".py"):
        return f"for a module, type {MAGIC} -m {typed}"
    return "type the path of a script"
