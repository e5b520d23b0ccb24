"""``%%dip --log train``: where ranks write what they write, too."""

from __future__ import annotations

import os
from pathlib import Path

from ddip.errors import BadInput


def checked(typed: str) -> Path:
    """The path that the names of the ranks' files begin with; raises BadInput if none can be made there.

    The folder is that of this host. On other hosts ranks make it, where it is not there.
    """
    path = Path(typed).expanduser().absolute()
    if path.is_dir() or typed.endswith(os.sep):
        example = Path(typed) / "train"
        raise BadInput(f"--log {typed}: this is a folder; type how the files' names begin, such as --log {example}")
    if not path.parent.is_dir():
        raise BadInput(f"--log {typed}: there is no folder {path.parent}; make it, or type another one")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"--log {typed}: nothing can be written in {path.parent}; type another folder")
    return path
