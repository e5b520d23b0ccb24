"""Bytes that the processes of one host share in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddip.protocol.objects import shared
from ddip.protocol.objects.shared import SharedBytes


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a system with or without anonymous memory files."""
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create")
    return tmp_path


def test_shared_bytes_stay_readable_while_a_reader_has_them(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write([b"one "])
        made.write([memoryview(b"t"), b"", b"wo"])
        ours, theirs = made.view(), shared.map_file(made.path)
        path = made.path
    made.close()
    assert ours[:] == theirs[:] == b"one two"
    with pytest.raises(OSError):
        shared.map_file(path)
    assert not list(folder.iterdir())


def test_other_users_cannot_open_shared_memory(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write([b"secret"])
        if made.path.startswith(str(folder)):
            assert os.stat(made.path).st_mode & 0o777 == 0o600
        else:
            assert not list(folder.iterdir())


def test_each_reader_changes_only_its_own_copy(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write([b"one"])
        ours, theirs = made.view(), shared.map_file(made.path)
        ours[0:1], theirs[2:3] = b"O", b"E"
        assert (ours[:], theirs[:], shared.map_file(made.path)[:]) == (b"One", b"onE", b"one")


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_portions_are_full_and_have_few_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh"), memoryview(b"i")]
    found = [b"".join(portion) for portion in shared.split_portions(pieces, size)]
    assert b"".join(found) == b"abcdefghi" and all(len(portion) == size for portion in found[:-1])
    monkeypatch.setattr(shared, "MOST_PIECES", 2)
    found_by_two = [*shared.split_portions(pieces, size)]
    assert b"".join(b"".join(portion) for portion in found_by_two) == b"abcdefghi"
    assert all(len(portion) <= 2 for portion in found_by_two)


def test_many_pieces_are_written_despite_partial_writes(folder: Path) -> None:
    pieces = [memoryview(bytes([number % 256]) * (number % 7)) for number in range(5000)]
    with SharedBytes(folder) as made:
        for portion in shared.split_portions(pieces, 10_000):
            made.write(portion)
        assert made.view()[:] == b"".join(pieces)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_cannot_open_the_file(folder: Path) -> None:
    with SharedBytes(folder) as made:
        made.write([b"secret"])
        look = [sys.executable, "-c", "import sys; open(sys.argv[1], 'rb')", made.path]
        assert subprocess.run(look, capture_output=True).returncode == 0
        theirs = subprocess.run(["cat", made.path], user=65534, group=65534, extra_groups=[], capture_output=True)
        assert theirs.returncode and b"Permission denied" in theirs.stderr


def test_an_empty_file_is_refused(folder: Path) -> None:
    with SharedBytes(folder) as made, pytest.raises(ValueError):
        shared.map_file(made.path)


def test_sharing_fails_without_memory_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no memory"):
        SharedBytes()
