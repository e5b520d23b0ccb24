"""Bytes that processes of one host have in memory once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddip.protocol import shared
from ddip.protocol.shared import SharedBytes


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a system that has memory without a name, or has not."""
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create")
    return tmp_path


def test_what_was_written_can_be_read_as_long_as_somebody_does(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write(b"one ")
        made.write(memoryview(b"two"))
        ours, theirs = made.view(), shared.view(made.path)
        path = made.path
    made.close()
    assert ours[:] == theirs[:] == b"one two"
    with pytest.raises(OSError):
        shared.view(path)
    assert not list(folder.iterdir())


def test_others_cannot_open_it_and_it_is_read_only(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write(b"secret")
        if made.path.startswith(str(folder)):
            assert os.stat(made.path).st_mode & 0o777 == 0o600
        else:
            assert not list(folder.iterdir())
        with pytest.raises(TypeError):
            shared.view(made.path)[0] = 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_cannot_open_it(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write(b"secret")
        look = [sys.executable, "-c", "import sys; open(sys.argv[1], 'rb')", made.path]
        assert subprocess.run(look, capture_output=True).returncode == 0
        theirs = subprocess.run(["cat", made.path], user=65534, group=65534, extra_groups=[], capture_output=True)
        assert theirs.returncode and b"Permission denied" in theirs.stderr


def test_nothing_to_read_is_refused(folder: Path) -> None:
    with SharedBytes(folder) as made, pytest.raises(ValueError):
        shared.view(made.path)


def test_without_memory_and_folder_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no memory without a name"):
        SharedBytes()
