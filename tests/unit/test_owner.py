"""Records of who owns which process."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from ddip import owner
from ddip.owner import Proc, Record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(Proc.of(os.getpid()), (Proc(1, 2.5), Proc(3, 4.5)), ("/x/*.json",))
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [owner.RECORD]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"owner": 1, "processes": [], "files": []}', '{"owner": {"pid": "x"}, "processes": []}'],
)
def test_a_malformed_record_is_no_authority(tmp_path: Path, text: str) -> None:
    (tmp_path / owner.RECORD).write_text(text)
    assert Record.read(tmp_path) is None
    owner.clear_up(tmp_path)
    assert tmp_path.exists()


def test_a_pid_that_is_now_another_process_is_not_found() -> None:
    me = Proc.of(os.getpid())
    assert me.find() is not None
    assert Proc(me.pid, me.started - 1).find() is None


def test_a_record_of_another_host_or_pid_namespace_is_no_authority(tmp_path: Path) -> None:
    Record(Proc.of(os.getpid()), (), (), "elsewhere").write(tmp_path)
    assert Record.read(tmp_path) is None


def test_the_run_folder_is_private() -> None:
    folder = owner.make_run_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        owner.remove_files(folder, ())
    assert not folder.exists()


def test_clusters_of_dead_owners_are_cleared_up_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, alive, broken = owner.make_run_folder(), owner.make_run_folder(), owner.make_run_folder()
    left = tmp_path / "left.json"
    left.touch()
    me = Proc.of(os.getpid())
    Record(Proc(me.pid, me.started - 5), (Proc(me.pid, me.started - 5),), (str(tmp_path / "l*.json"),)).write(dead)
    Record(me, (), ()).write(alive)
    (broken / owner.RECORD).write_text(json.dumps({"owner": None}))
    assert owner.clear_up_orphans() == 1
    assert (dead.exists(), left.exists(), alive.exists(), broken.exists()) == (False, False, True, True)
