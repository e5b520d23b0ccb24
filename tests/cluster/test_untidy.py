"""Groups start and work wherever a plain kernel starts, however untidy the user's environment is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .notebook import Notebook

STARTUP = {"fails.py": "1 / 0\n", "loads_ddip.ipy": "%load_ext ddip\n"}
NO_PROXY = "http://127.0.0.1:1"
ENVIRONMENTS = {
    "ranks_of_another_job": {
        "RANK": "7",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "9",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
    },
    "locale": {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
    "proxies": {"http_proxy": NO_PROXY, "https_proxy": NO_PROXY, "ALL_PROXY": NO_PROXY},
    "switches_of_python": {
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONINSPECT": "1",
        "PYTHONBREAKPOINT": "no_such.debugger",
    },
    "every_warning_is_an_error": {"PYTHONWARNINGS": "error::UserWarning,error::FutureWarning"},
}


def write_profile(folder: Path, config: str = "", startup: dict[str, str] | None = None) -> None:
    """Create an IPython folder with this configuration and these startup files."""
    profile = folder / "profile_default"
    (profile / "startup").mkdir(parents=True)
    (profile / "ipython_config.py").write_text(config)
    for name, text in (startup or {}).items():
        (profile / "startup" / name).write_text(text)


def use_group(notebook: Notebook) -> None:
    """Start a group, use each of its magics, and end it."""
    notebook.ok("%load_ext ddip")
    notebook.ok("%makedip -n 2")
    assert notebook.ok("%%dip\nprint('rank', rank)").stdout == "rank 0\n"
    assert "rank 1: ZeroDivisionError" in notebook.fails("%%dip\n1 / (1 - rank)").message
    notebook.ok("weights = [0.5, 2.0]\n%dipush weights")
    notebook.ok("%%dip\nweights.append(float(rank))")
    assert notebook.ok("%dipull -r all weights\nprint(weights)").stdout.endswith("[[0.5, 2.0, 0.0], [0.5, 2.0, 1.0]]\n")
    assert "longer than" in notebook.fails("%%dip --timeout 0.3\nimport time\ntime.sleep(1000)").message
    notebook.fails("%%dip\nimport os\nif rank: os._exit(3)")
    notebook.ok("%makedip --repair --from 0 weights")
    assert notebook.ok("%%dip -r 1\nprint(weights)").stdout == "[0.5, 2.0, 0.0]\n"
    notebook.ok("%makedip -k")


@pytest.mark.grid(in_ci=True)
def test_a_group_starts_despite_errors_in_the_users_profile(
    tmp_path: Path, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path / "ipython", "c.InteractiveShell.autocall = (\n", STARTUP)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "error::DeprecationWarning")
    notebook = new_notebook()
    use_group(notebook)
    notebook.ok("%makedip -n 1")
    found = notebook.fails("%%dip\nimport warnings\nwarnings.warn('old', DeprecationWarning)")
    assert "DeprecationWarning: old" in found.message  # the user's filters apply to cells


@pytest.mark.grid
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_group_works_in_this_environment(
    name: str, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in ENVIRONMENTS[name].items():
        monkeypatch.setenv(variable, value)
    use_group(new_notebook())


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:IPython parent")
def test_a_group_without_a_home_leaves_no_folders(
    tmp_path: Path, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent/home")
    monkeypatch.delenv("IPYTHONDIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = new_notebook()
    notebook.ok("1")
    before = {path.name for path in tmp_path.iterdir()}  # of the kernel itself
    use_group(notebook)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("ddip")} == before


@pytest.mark.grid
@pytest.mark.parametrize("part", ["sp ace and ünïcode", "a" * 150])
def test_a_group_works_with_odd_names_of_folders(
    part: str, tmp_path: Path, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / part
    home.mkdir()
    for variable in ("HOME", "IPYTHONDIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(home))
    use_group(new_notebook())


@pytest.mark.grid
def test_a_group_works_with_lines_to_run_at_the_start(
    tmp_path: Path, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["1 / 0", "%load_ext ddip", "%autodip on"]
    write_profile(tmp_path / "ipython", f"c = get_config()\nc.InteractiveShellApp.exec_lines = {lines}\n")
    (tmp_path / "startup.py").write_text("raise RuntimeError('my startup file')\n")
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "startup.py"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = new_notebook()
    notebook.ok("%autodip off")
    use_group(notebook)


@pytest.mark.grid
def test_a_group_works_with_few_descriptors_and_private_files(new_notebook: Callable[[], Notebook]) -> None:
    limits, mask = resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o077)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        notebook = new_notebook()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.umask(mask)
    use_group(notebook)


@pytest.mark.grid
def test_a_group_starts_despite_configurations_that_fail(
    tmp_path: Path, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path / "ipython")
    jupyter = tmp_path / "jupyter"
    jupyter.mkdir()
    for program in ("ipcluster", "ipcontroller", "ipengine", "ipython_kernel", "ipython"):
        (tmp_path / "ipython" / "profile_default" / f"{program}_config.py").write_text("1 / 0\n")
    (jupyter / "jupyter_config.json").write_text("{")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(jupyter))
    use_group(new_notebook())


@pytest.mark.grid
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root can mount a file system")
@pytest.mark.parametrize(
    "mount",
    ["size=64m none /dev/shm", "size=1m none $TMPDIR && ! cat /dev/zero > $TMPDIR/all"],
    ids=["shared_memory_of_64_MB", "a_full_TMPDIR"],
)
def test_a_group_works_with_a_small_file_system(mount: str, tmp_path: Path) -> None:
    """Run this module's test of a locale on the file system, which only the processes of that run see."""
    (tmp_path / "small").mkdir()
    test = "tests/cluster/test_untidy.py::test_a_group_works_in_this_environment[locale]"
    again = (
        f"exec {sys.executable} -m pytest -q -n0 -m grid -p no:cacheprovider --basetemp={tmp_path / 'base'} '{test}'"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o {mount} && {again}"],
        env={**os.environ, "TMPDIR": str(tmp_path / "small")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
