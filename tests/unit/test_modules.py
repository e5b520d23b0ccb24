"""The notebook's own modules: which can be sent, what is sent, and where it may be written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import IPython
import pytest

from ddip.errors import BadInput
from ddip.group.objects import modules
from ddip.protocol.on_rank import IMPORTED
from ddip.rank.objects import rank_modules as on_rank

from .conftest import NewGroup


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the notebook's folder."""
    notebook_folder = tmp_path / "notebook"
    notebook_folder.mkdir()
    monkeypatch.syspath_prepend(notebook_folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return notebook_folder


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_module_is_sent_as_its_file(folder: Path) -> None:
    write_files(folder, {"mine_a.py": "x = 1\n"})
    (source,) = modules.find_sources(" mine_a, mine_a,")
    assert (source.name, source.files, source.size) == ("mine_a", {"mine_a.py": b"x = 1\n"}, 6)


@pytest.mark.parametrize("init", ["__init__.py", "later.py"])
def test_a_package_is_its_folder_without_caches_and_editor_files(folder: Path, init: str) -> None:
    kept = {f"mine_b/{init}": "", "mine_b/sub/deep.py": "y = 2", "mine_b/words.json": "{}"}
    left_out = ["mine_b/__pycache__/deep.pyc", "mine_b/.git/config", "mine_b/.hidden", "mine_b/sub/old.pyc"]
    write_files(folder, kept | dict.fromkeys(left_out, "no"))
    (folder / "mine_b" / "sub" / "same.py").symlink_to(folder / "mine_b" / "sub" / "deep.py")
    os.mkfifo(folder / "mine_b" / "pipe")
    (source,) = modules.find_sources(["mine_b"])
    assert source.files == {name: text.encode() for name, text in kept.items()} | {"mine_b/sub/same.py": b"y = 2"}


def test_a_digest_shows_whether_a_module_has_changed() -> None:
    made = [{"m/a.py": b"1", "m/b.py": b"2"}, {"m/a.py": b"12", "m/b.py": b""}, {"m/a.py": b"1", "m/c.py": b"2"}]
    assert len({modules.Source("m", files).digest for files in made}) == 3
    assert modules.Source("m", made[0]).digest == modules.Source("m", dict(reversed(made[0].items()))).digest


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("", "--modules utils,models"),
        ("torch", "installed module"),
        ("json", "installed module"),
        ("ddip", "installed module"),
        ("sys", "belongs to Python"),
        ("mine_nowhere", "sys.path"),
        ("__main__", "%dipush copies"),
        ("pkg.sub", "; type %dipush --modules pkg"),
        ("folder/utils.py", "; type %dipush --modules utils"),
        ("utils.py", "; type %dipush --modules utils"),
        ("a b", "'a b'"),
    ],
)
def test_modules_outside_the_notebooks_folder_are_refused(typed: str, text: str) -> None:
    with pytest.raises(BadInput) as error:
        modules.find_sources(typed)
    assert str(error.value).startswith(f"%dipush --modules {typed}".rstrip()) and text in str(error.value)


def test_compiled_modules_are_refused(folder: Path) -> None:
    write_files(
        folder, {f"mine_c{modules.COMPILED[0]}": "", "mine_d/__init__.py": "", f"mine_d/fast{modules.COMPILED[-1]}": ""}
    )
    with pytest.raises(BadInput, match=r"\(.*/mine_c.*; install"):
        modules.find_sources("mine_c")
    with pytest.raises(BadInput, match="fast.*; install"):
        modules.find_sources("mine_d")


@pytest.mark.parametrize("target", ["secret.txt", "elsewhere", "mine_e/sub"])
def test_links_out_of_a_package_and_to_folders_are_refused(folder: Path, target: str) -> None:
    write_files(folder, {"mine_e/__init__.py": "", "mine_e/sub/a.py": "", "secret.txt": "key", "elsewhere/b.py": ""})
    (folder / "mine_e" / "link").symlink_to(folder / target)
    with pytest.raises(BadInput, match=f"mine_e/link .*/{target};"):
        modules.find_sources("mine_e")


def test_a_link_that_leads_nowhere_is_refused(folder: Path) -> None:
    write_files(folder, {"mine_n/__init__.py": ""})
    (folder / "mine_n" / "link").symlink_to("gone.py")
    with pytest.raises(BadInput, match="mine_n/link .*gone.py"):
        modules.find_sources("mine_n")


def test_large_modules_are_refused_before_they_are_read_completely(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(folder, {"mine_f/__init__.py": "", "mine_f/data.bin": "", "mine_g.py": "x" * 200})
    os.truncate(folder / "mine_f" / "data.bin", 1 << 40)
    with pytest.raises(BadInput, match="mine_f .*16 MB or 2000"):
        modules.find_sources("mine_f")
    monkeypatch.setattr(modules, "MOST_BYTES", 100)
    with pytest.raises(BadInput, match="mine_g.py .*100 B"):
        modules.find_sources("mine_g")


def test_ranks_beside_the_notebook_need_nothing(folder: Path, new_group: NewGroup) -> None:
    write_files(folder, {"mine_h.py": ""})
    group = new_group(2)
    pushed = group.push_modules("mine_h")
    assert str(pushed) == "the ranks are on the notebook's host and import mine_h from the same files; nothing was sent"
    assert not pushed.hosts and not pushed.notices
    assert "objects.rank_modules.write_module" not in group.engine(0).calls


def test_a_push_prints_a_summary() -> None:
    answers = {"a": {0: IMPORTED, 1: IMPORTED}, "b": {2: "SyntaxError: no"}}
    pushed = modules.ModulesPushed(("a", "b"), ("h1", "h2"), ("h2",), 30, not_reloaded=answers)
    assert str(pushed) == "pushed a, b: 30 B to h2"
    first, second = pushed.notices
    assert first.startswith(
        "a is imported already on ranks 0, 1, which keeps the old version: run import importlib, a;"
    )
    assert second == "b could not be reloaded on rank 2, which keeps the old version: SyntaxError: no"


# -- on a rank


def read_files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_module_replaces_the_former_one_completely(tmp_path: Path) -> None:
    module_folder = tmp_path / "modules"
    on_rank.write_module(str(module_folder), "m", {"m/__init__.py": b"1", "m/old.py": b"2"})
    on_rank.write_module(str(module_folder), "other", {"other.py": b"3"})
    on_rank.write_module(str(module_folder), "m", {"m/__init__.py": b"4"})
    assert read_files(module_folder) == {"m/__init__.py": "4", "other.py": "3"}
    on_rank.write_module(str(module_folder), "m", {"m.py": b"5"})
    assert read_files(module_folder) == {"m.py": "5", "other.py": "3"}
    assert module_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "path", ["../m.py", "m/../../x.py", "/m/x.py", "//m/x.py", "m", "x.py", "m/./x.py", "m//x.py", "m/..", "m/a\0", ""]
)
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    module_folder = tmp_path / "modules"
    on_rank.write_module(str(module_folder), "m", {"m.py": b"before"})
    with pytest.raises(ValueError, match=re.escape(repr(path))):
        on_rank.write_module(str(module_folder), "m", {"m/__init__.py": b"", path: b"bad"})
    assert read_files(tmp_path) == {"modules/m.py": "before"}


@pytest.mark.parametrize("name", ["..", "a/b", "", "."])
def test_a_module_has_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        on_rank.write_module(str(tmp_path), name, {f"{name}/x.py": b""})


@pytest.mark.skipif(
    IPython.version_info < (8,) and sys.version_info >= (3, 12), reason="IPython 7 reloads with imp, which is gone"
)
def test_ranks_prefer_pushed_modules_and_reload_them_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "others"), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write_files(tmp_path / "others", {"mine_k.py": "x = 'another'"})
    module_folder = str(tmp_path / "modules")
    try:
        on_rank.write_module(module_folder, "mine_k", {"mine_k.py": b"def f(): return 1"})
        assert on_rank.take_modules(module_folder, ["mine_k"], False) == {}
        import mine_k  # type: ignore[import-not-found]

        former = mine_k.f
        for number in (2, 3):  # same size, written in the same second
            on_rank.write_module(module_folder, "mine_k", {"mine_k.py": b"def f(): return %d" % number})
            assert on_rank.take_modules(module_folder, ["mine_k"], False) == {"mine_k": IMPORTED}
            assert mine_k.f() == (1 if number == 2 else 2)
            assert on_rank.take_modules(module_folder, ["mine_k"], True) == {}
            assert mine_k.f() == former() == number
        on_rank.write_module(module_folder, "mine_k", {"mine_k.py": b"def f(:"})
        assert on_rank.take_modules(module_folder, ["mine_k"], True)["mine_k"].startswith("SyntaxError: ")
        assert mine_k.f() == 3
        assert sys.path.count(module_folder) == 1
    finally:
        sys.modules.pop("mine_k", None)
