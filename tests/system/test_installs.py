"""Each way to install ddip once: two ranks start from the installed copy, where nothing of this checkout can be found.

Packages that ddip requires are linked from the tests' environment; `tests/system/test_dist.py` has pip fetch them.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests import dist

BASE = Path(getattr(sys, "_base_executable", sys.executable))
"""The interpreter that the tests' environment was made from."""
SOURCE = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "setup.py")


@dataclass(frozen=True)
class Installed:
    """An installed ddip: which Python finds it, and where it is."""

    python: Path
    packages: Path
    environment: dict[str, str] = field(default_factory=dict)
    first_line: str = ""


@dataclass(frozen=True)
class Parts:
    """Files to install, created once: a zip of the source, a wheel of it, and links to what ddip requires."""

    source: Path
    wheel: Path
    links: Path

    def link_into(self, packages: Path) -> None:
        """Make the requirements of ddip, and pip, importable from these site-packages."""
        packages.mkdir(parents=True, exist_ok=True)
        (packages / "links.pth").write_text(f"{self.links}\n")

    def make_venv(self, folder: Path) -> Path:
        """Make a virtual environment without ddip; returns its interpreter."""
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        self.link_into(dist.find_packages(python))
        return python


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = tmp_path_factory.mktemp("parts").resolve()
    source = folder / "ddip-main.zip"
    with zipfile.ZipFile(source, "w") as archive:
        for name in (*SOURCE, *dist.files_of_the_package()):
            archive.write(dist.HERE / name, f"ddip-main/{name}")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    pip(Path(sys.executable), build)
    (wheel,) = folder.glob("ddip-*.whl")
    (described,) = metadata.distributions(path=[str(wheel)])
    dist.link_packages(folder / "links", *(described.requires or ()), "pip", "setuptools")
    return Parts(source, wheel, folder / "links")


def pip(python: Path, command: Sequence[str | Path], **variables: str) -> None:
    """Run pip without a network: a requirement that is not linked fails."""
    environment = {**dist.clean_environment(), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", **variables}
    dist.run_step(f"pip {command[0]}", [python, "-m", "pip", *command], env=environment)


# -- ways to install


def into_a_venv(parts: Parts, folder: Path) -> Installed:
    python = parts.make_venv(folder / "venv")
    pip(python, ["install", parts.wheel])
    return Installed(python, dist.find_packages(python))


def from_a_zip_of_the_source(parts: Parts, folder: Path) -> Installed:
    python = parts.make_venv(folder / "venv")
    pip(python, ["install", "--no-build-isolation", parts.source])
    return Installed(python, dist.find_packages(python))


def into_a_conda_prefix(parts: Parts, folder: Path) -> Installed:
    """A prefix as conda makes it: an interpreter and a library of its own, and no ``pyvenv.cfg``."""
    prefix = folder / "conda"
    library = Path(sysconfig.get_path("stdlib"))
    own_library = prefix / "lib" / library.name
    for made in (prefix / "bin", prefix / "conda-meta", own_library):
        made.mkdir(parents=True)
    (prefix / "conda-meta" / "history").touch()
    python = Path(shutil.copy(BASE.resolve(), prefix / "bin" / "python"))
    for entry in library.iterdir():
        if entry.name not in ("site-packages", "dist-packages", "EXTERNALLY-MANAGED"):
            (own_library / entry.name).symlink_to(entry)
    for entry in library.parent.glob("libpython*"):
        (prefix / "lib" / entry.name).symlink_to(entry)
    packages = dist.find_packages(python)
    assert packages.is_relative_to(prefix)
    parts.link_into(packages)
    pip(python, ["install", parts.wheel])
    path = f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return Installed(python, packages, {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": "conda", "PATH": path})


def into_a_user_site(parts: Parts, folder: Path) -> Installed:
    if site.ENABLE_USER_SITE is None:
        pytest.skip("Python has no user site for this user")
    home = {"HOME": str(folder)}
    ask = [BASE, "-c", "import site; print(site.getusersitepackages())"]
    packages = Path(dist.run_step("look for the user site", ask, env={**dist.clean_environment(), **home}).strip())
    assert packages.is_relative_to(folder)
    parts.link_into(packages)
    pip(BASE, ["install", "--user", "--no-warn-script-location", parts.wheel], **home, PIP_BREAK_SYSTEM_PACKAGES="1")
    return Installed(BASE, packages, home)


def into_a_target_folder_on_pythonpath(parts: Parts, folder: Path) -> Installed:
    python, target = _install_into_target(parts, folder)
    return Installed(python, target, {"PYTHONPATH": str(target)})


def into_a_target_folder_on_sys_path(parts: Parts, folder: Path) -> Installed:
    python, target = _install_into_target(parts, folder)
    return Installed(python, target, first_line=f"import sys; sys.path.insert(0, {str(target)!r})")


def _install_into_target(parts: Parts, folder: Path) -> tuple[Path, Path]:
    python, target = parts.make_venv(folder / "venv"), folder / "target"
    pip(python, ["install", "--no-deps", "--target", target, parts.wheel])
    return python, target


def with_uv(parts: Parts, folder: Path) -> Installed:
    """uv does not see what a ``.pth`` file leads to, so it is told to leave requirements alone."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    environment = {**dist.clean_environment(), "UV_CACHE_DIR": str(folder / "cache"), "UV_NO_CONFIG": "1"}
    dist.run_step("uv venv", [uv, "venv", "--offline", "--python", BASE, folder / "venv"], env=environment)
    python = folder / "venv" / "bin" / "python"
    parts.link_into(dist.find_packages(python))
    install = [uv, "pip", "install", "--offline", "--no-deps", "--python", python, parts.wheel]
    dist.run_step("uv pip install", install, env=environment)
    return Installed(python, dist.find_packages(python))


WAYS = (
    into_a_venv,
    from_a_zip_of_the_source,
    into_a_conda_prefix,
    into_a_user_site,
    into_a_target_folder_on_pythonpath,
    into_a_target_folder_on_sys_path,
    with_uv,
)
LATER = (into_a_conda_prefix, into_a_user_site, into_a_target_folder_on_pythonpath, with_uv)
"""Ways that ``make test-long`` tries."""


@pytest.mark.parametrize(
    "install",
    [pytest.param(way, id=way.__name__, marks=[pytest.mark.long] * (way in LATER)) for way in WAYS],
)
def test_ranks_start_from_the_installed_copy(
    install: Callable[[Parts, Path], Installed], parts: Parts, tmp_path: Path
) -> None:
    installed = install(parts, tmp_path.resolve())
    work = tmp_path / "work"
    work.mkdir()
    environment = {**dist.clean_environment(), "IPYTHONDIR": str(tmp_path / "ipython"), **installed.environment}
    program = f"{installed.first_line}\n{dist.ALL_REDUCE}"
    dist.run_step("all_reduce", [installed.python, "-c", program, installed.packages], cwd=work, env=environment)


# -- a kernel in another environment than Jupyter's

CELLS = (
    "%load_ext ddip\n%makedip -n 2",
    "%%dip -S all\nimport ddip, sys, torch, torch.distributed as dist\nx = torch.ones(3)\ndist.all_reduce(x)\n"
    "assert x.tolist() == [2.0] * 3\nprint(sys.executable, ddip.__file__)",
    "import ddip, sys\nprint(sys.executable, ddip.__file__)",
    "%makedip -k",
)


def test_ranks_have_the_environment_of_the_kernel(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = into_a_venv(parts, tmp_path.resolve())
    described = {
        "argv": [str(installed.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "another environment",
        "language": "python",
    }
    kernel = tmp_path / "share" / "kernels" / "another"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(described))
    work = tmp_path / "work"
    work.mkdir()
    for name in set(os.environ) - set(dist.clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    run = NotebookClient(notebook, timeout=240, kernel_name="another", resources={"metadata": {"path": str(work)}})
    run.execute()
    expected = f"{installed.python} {installed.packages / 'ddip' / '__init__.py'}"
    here, ranks = notebook.cells[2].outputs[0].text, notebook.cells[1].outputs
    assert here.strip() == expected
    assert expected in "".join(output.data["text/plain"] for output in ranks if "data" in output)
