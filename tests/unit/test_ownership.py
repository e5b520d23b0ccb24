"""Records of process ownership, and which of them are trusted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ddip.cluster.processes import ownership, processes
from ddip.cluster.processes.ownership import Record
from ddip.cluster.processes.processes import Proc

NOBODY = 65534
CLUSTER = "ddip-77-abc123"
ME = Proc.of(os.getpid())
DEAD = Proc(ME.pid, ME.started - 5)
"""A dead process whose PID now belongs to another process."""


def read_record(folder: Path) -> Record | None:
    """Read the record in `folder`."""
    with ownership._open_private(folder) as opened:
        return Record.read(opened)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide the only folder for run folders, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="place-", dir="/tmp") as folder:
        monkeypatch.setattr(ownership, "_candidate_folders", lambda: [Path(folder)])
        yield Path(folder)


@contextlib.contextmanager
def begin_marked(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that carries `mark` and leads a session."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
    environment = {**os.environ, processes.MARKED: mark}
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from now on its environment can be read
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that a record could end, because it carries our mark."""
    with begin_marked(processes.MARK) as process:
        yield process


def run_folder(place: Path, of: Proc, name: str = "abcdefgh") -> Path:
    """Create a run folder of the process `of`."""
    folder = place / f"{ownership._folder_prefix()}{of.pid}-{of.started:.15g}-{name}"
    folder.mkdir(mode=0o700)
    return folder


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(ME, (Proc(1, 2.5), Proc(3, 4.5)), "/profile", CLUSTER)
    tmp_path.chmod(0o700)
    record.write(tmp_path)
    assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [ownership.RECORD]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "[" * 100_000, '{"owner": 1, "processes": []}', '{"owner": {"pid": "x"}, "processes": []}'],
    ids=lambda text: text[:20],
)
def test_a_malformed_record_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / ownership.RECORD).write_text(text)
    (tmp_path / ownership.RECORD).chmod(0o600)
    tmp_path.chmod(0o700)
    assert read_record(tmp_path) is None
    assert not ownership.clear_up(tmp_path)
    assert tmp_path.exists()


def test_a_pid_that_is_now_another_process_is_not_found() -> None:
    assert ME.find() is not None
    assert DEAD.find() is None
    assert Proc(-1, 0.0).find() is None and Proc(2**80, 0.0).find() is None


def test_a_record_of_another_host_or_pid_namespace_is_ignored(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    Record(ME, (), "", "", place="elsewhere").write(tmp_path)
    assert read_record(tmp_path) is None


def test_the_run_folder_is_private_and_named_after_its_owner() -> None:
    folder = ownership.make_run_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert ownership._owner_in_name(folder.name) == ME
        assert list(folder.iterdir()) == []
    finally:
        ownership.remove_files(folder, "", "")
    assert not folder.exists()


@pytest.mark.parametrize("name", ["line\nend", "tab\tx", "a#b", "a?b"])
def test_a_folder_that_torch_cannot_find_is_skipped(monkeypatch: pytest.MonkeyPatch, place: Path, name: str) -> None:
    """Use a path that torch would parse as an address.

    ``/tmp/a#b`` would become ``/tmp/a``, open to all users.
    """
    (place / name).mkdir()
    monkeypatch.setattr(ownership, "_candidate_folders", lambda: [place / name, place])
    folder = ownership.make_run_folder()
    assert folder.parent == place
    assert list((place / name).iterdir()) == []


def test_cleanup_removes_clusters_of_dead_owners_and_keeps_others(place: Path) -> None:
    dead, alive, elsewhere = run_folder(place, DEAD), run_folder(place, ME), place / "ddip-0-elsewhere-1-1-abcdefgh"
    elsewhere.mkdir(mode=0o700)
    (dead / "deep").mkdir()
    (dead / "deep" / "file").touch()
    (dead / "link").symlink_to(place)
    profile = place / "profile"
    files = [
        profile / "security" / f"ipcontroller-{CLUSTER}-client.json",
        profile / "log" / f"engines{CLUSTER}.json",
    ]
    other = profile / "security" / "ipcontroller-other-client.json"
    for file in [*files, other]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    Record(DEAD, (DEAD,), str(profile), CLUSTER).write(dead)
    Record(ME, (), str(profile), "ddip-78-abc123").write(alive)
    assert ownership.clear_up_orphans() == 1
    assert not dead.exists() and not any(file.exists() for file in files)
    assert alive.exists() and elsewhere.exists() and other.exists()


def test_the_list_of_clusters_shows_live_processes_and_changes_nothing(
    place: Path, victim: subprocess.Popen[bytes]
) -> None:
    dead, alive, without_record = run_folder(place, DEAD), run_folder(place, ME), run_folder(place, DEAD, "unwritten")
    run_folder(place, DEAD, "not_ours_alone").chmod(0o755)
    (place / "other").mkdir()
    Record(DEAD, (DEAD, Proc.of(victim.pid)), "", CLUSTER).write(dead)
    Record(ME, (), "", CLUSTER).write(alive)
    before = sorted(place.rglob("*"))
    found = {run.folder: (run.owner, run.owner_lives, run.processes) for run in ownership.list_runs()}
    assert found == {dead: (DEAD, False, 1), alive: (ME, True, 0), without_record: (DEAD, False, 0)}
    assert victim.poll() is None and sorted(place.rglob("*")) == before


def test_a_folder_of_a_dead_owner_without_record_is_removed(place: Path) -> None:
    code = (
        "import os, pathlib, sys\nfrom ddip.cluster.processes import ownership\n"
        "ownership._candidate_folders = lambda: [pathlib.Path(sys.argv[1])]\n"
        "print(ownership.make_run_folder(), flush=True)\ninput()"
    )
    command = [sys.executable, "-c", code, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == place and list(folder.iterdir()) == []
        assert ownership.clear_up_orphans() == 0
        process.kill()
        process.wait()
        assert ownership.clear_up_orphans() == 1
    assert not folder.exists()


def test_pattern_characters_in_a_folders_name_have_no_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="a[b]*:", dir="/tmp") as odd:
        monkeypatch.setattr(ownership, "_candidate_folders", lambda: [Path(odd)])
        alive = ownership.make_run_folder()
        run_folder(Path(odd), DEAD)
        assert ownership.clear_up_orphans() == 1
        assert list(Path(odd).iterdir()) == [alive]


def test_run_folders_use_the_first_suitable_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the session folder if it outlives the login, then the temporary folder, then /tmp."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "tmp"
    runtime.mkdir(mode=0o700)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    lasts = ownership._outlives_the_login(runtime)  # False if systemd removes it at logout
    assert ownership._candidate_folders() == [*([runtime] if lasts else []), temporary, Path("/tmp")]
    runtime.chmod(0o755)
    assert ownership._candidate_folders() == [temporary, Path("/tmp")]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert ownership._candidate_folders() == [temporary, Path("/tmp")]
    too_long = temporary / ("x" * 90)
    too_long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(too_long))
    folder = ownership.make_run_folder()
    assert folder.parent == Path("/tmp")
    assert list(too_long.iterdir()) == []
    folder.rmdir()
    monkeypatch.setattr(ownership, "_candidate_folders", lambda: [too_long, tmp_path / "missing"])
    with pytest.raises(OSError, match=f"{too_long}: .*; {tmp_path / 'missing'}: "):
        ownership.make_run_folder()


# -- files written by other users


def linked_record(folder: Path, good: Path) -> None:
    (folder / ownership.RECORD).rename(good / "content")
    (folder / ownership.RECORD).symlink_to(good / "content")


def linked_folder(folder: Path, good: Path) -> None:
    folder.rename(good / "folder")
    folder.symlink_to(good / "folder")


def hard_linked_record(folder: Path, good: Path) -> None:
    os.link(folder / ownership.RECORD, good / "content")


def record_of_another(folder: Path, good: Path) -> None:
    os.chown(folder / ownership.RECORD, NOBODY, NOBODY)


def folder_of_another(folder: Path, good: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def folder_that_all_can_write(folder: Path, good: Path) -> None:
    folder.chmod(0o1777)


def folder_that_a_group_can_enter(folder: Path, good: Path) -> None:
    folder.chmod(0o710)


def record_that_all_can_write(folder: Path, good: Path) -> None:
    (folder / ownership.RECORD).chmod(0o666)


def a_pipe(folder: Path, good: Path) -> None:
    (folder / ownership.RECORD).unlink()
    os.mkfifo(folder / ownership.RECORD, 0o600)


FORGERIES = [
    linked_record,
    linked_folder,
    hard_linked_record,
    record_of_another,
    folder_of_another,
    folder_that_all_can_write,
    folder_that_a_group_can_enter,
    record_that_all_can_write,
    a_pipe,
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_record_that_another_user_can_change_is_not_obeyed(
    place: Path, victim: subprocess.Popen[bytes], forge: Callable[[Path, Path], None]
) -> None:
    if forge in (record_of_another, folder_of_another) and os.getuid():
        pytest.skip("only root can give files away")
    profile, good = place / "profile", place / "good"
    kept = profile / "security" / f"ipcontroller-{CLUSTER}-client.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    good.mkdir()
    folder = run_folder(place, DEAD)
    Record(DEAD, (Proc.of(victim.pid),), str(profile), CLUSTER).write(folder)
    forge(folder, good)
    ownership.clear_up_orphans()  # our folder with a dead owner is removed, whatever it contains
    assert victim.poll() is None and kept.exists()
    if folder.is_symlink() or folder.exists():
        assert "folder" in forge.__name__
    else:
        assert {path.name for path in good.iterdir()} <= {"content"}


@pytest.mark.grid(in_ci=True)
def test_a_record_exchanged_while_it_is_read_is_not_obeyed(place: Path, victim: subprocess.Popen[bytes]) -> None:
    """The reader sees one of the two records, and detects a link from what it has opened."""
    forged = place / "forged"
    Record(DEAD, (Proc.of(victim.pid),), "", "").write(place)
    (place / ownership.RECORD).rename(forged)
    folder = run_folder(place, ME)  # exists as long as the record is not trusted
    over = threading.Event()

    def exchange_record() -> None:
        while not over.is_set():
            Record(ME, (), "", "").write(folder)
            (folder / "link").symlink_to(forged)
            (folder / "link").rename(folder / ownership.RECORD)

    thread = threading.Thread(target=exchange_record)
    thread.start()
    try:
        for _ in range(3000):
            assert ownership.clear_up_orphans() == 0
    finally:
        over.set()
        thread.join()
    assert victim.poll() is None and folder.exists()


def test_a_record_ends_only_processes_with_its_mark(place: Path, victim: subprocess.Popen[bytes]) -> None:
    begin = ["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $! $$"]  # an ended shell has left this in its session
    output = subprocess.run(begin, capture_output=True, text=True, start_new_session=True, check=True).stdout
    left, session = map(int, output.split())
    try:
        assert os.getsid(left) == session and Proc.of(left).find()
        listed = (Proc.of(victim.pid), Proc(session, 0.0))
        Record(DEAD, listed, "", "", mark="of another owner").write(run_folder(place, DEAD))
        assert ownership.clear_up_orphans() == 1
        assert victim.poll() is None and Proc.of(left).find()
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_record_ends_processes_with_its_mark(place: Path) -> None:
    with begin_marked("0123") as process:
        Record(DEAD, (Proc.of(process.pid),), "", "", mark="0123").write(run_folder(place, DEAD))
        threading.Thread(target=process.wait, daemon=True).start()
        assert ownership.clear_up_orphans() == 1
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("cluster", ["other", "*", "", "ddip-1-*", "x/../../secret", "ddip-1-a\n"])
def test_a_record_cannot_choose_files_to_remove(place: Path, cluster: str) -> None:
    profile = place / "profile"
    (profile / "security").mkdir(parents=True)
    (profile / "security" / "ipcontroller-x").mkdir()
    names = (f"ipcontroller-{name}-client.json" for name in ("other", "", "*", "ddip-1-a", "ddip-1-a\n"))
    kept = [profile / "secret.json", *(profile / "security" / name for name in names)]
    for file in kept:
        file.touch()
    record = Record(DEAD, (), str(profile), cluster)
    folder = run_folder(place, DEAD)
    record.write(folder)
    # the former content of a record
    (folder / ownership.RECORD).write_text(json.dumps({**asdict(record), "files": [str(kept[0]), f"{profile}/*/*"]}))
    assert ownership.clear_up_orphans() == 1
    assert all(file.exists() for file in kept)


def test_a_record_with_another_owner_than_its_folder_is_ignored(place: Path) -> None:
    folder = run_folder(place, DEAD)
    record = Record(ME, (), "", "")
    record.write(folder)
    assert ownership.clear_up_orphans() == 0 and folder.exists()
    replace(record, owner=DEAD).write(folder)
    assert ownership.clear_up_orphans() == 1 and not folder.exists()
