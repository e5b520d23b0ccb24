"""Check the file name prefix of ``%%dip --log PREFIX``, under which ranks also write their output to files."""

from __future__ import annotations

import os
from pathlib import Path

from ddip.errors import BadInput


def resolve_prefix(typed: str) -> Path:
    """Return the absolute path prefix of the ranks' log files, or raise BadInput if it cannot be used.

    Only this host's folder is checked. On other hosts, ranks create the folder if it is missing.
    """
    path = Path(typed).expanduser().absolute()
    if path.is_dir() or typed.endswith(os.sep):
        example = Path(typed) / "train"
        raise BadInput(f"--log {typed}: this is a folder; type the start of the file names, such as --log {example}")
    if not path.parent.is_dir():
        raise BadInput(f"--log {typed}: there is no folder {path.parent}; create it, or type another one")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"--log {typed}: cannot write to {path.parent}; type another folder")
    return path
