"""Build the sdist and the wheel, and test the wheel in isolation from this checkout: ``make dist``.

    python tests/dist.py --to dist

The exit code is not 0 if a step fails; everything but the two files is removed again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent.parent
LEADS_ELSEWHERE = ("PYTHON", "PYTEST", "VIRTUAL_ENV", "CONDA_")
ALL_REDUCE = """
import ddip, sys
from pathlib import Path
packages = Path(sys.argv[1])
assert Path(ddip.__file__).is_relative_to(packages), ddip.__file__
with ddip.Group(2) as group:
    group.run("import ddip, torch, torch.distributed as dist; x = torch.ones(3) * (rank + 1); dist.all_reduce(x)")
    group.run("file = ddip.__file__")
    for rank in (0, 1):
        found = group.pull(["x", "file"], rank)
        assert found["x"].tolist() == [3.0] * 3, found
        assert Path(found["file"]).is_relative_to(packages), found
"""
"""A program that starts two ranks, and fails unless it and they have ddip from the folder that it is given."""


class StepFailed(Exception):
    """A failed step of the build or the test; the message has its name and its output."""


def run_step(what: str, command: Sequence[str | Path], **options: Any) -> str:
    """Print the name of a step and run it; return its output or raise StepFailed."""
    print(what, flush=True)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        raise StepFailed(f"{what}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def new_environment(folder: Path) -> Path:
    """Create an environment of this Python with only pip; return its interpreter."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


# -- build


def build_distributions(folder: Path, to: Path) -> tuple[Path, Path]:
    """Build with tools in a separate environment below `folder`; return the sdist and the wheel in `to`."""
    python = new_environment(folder / "tools")
    run_step("install build and twine", [python, "-m", "pip", "install", "--quiet", "build", "twine"])
    made = folder / "made"
    run_step("build the sdist, and the wheel from it", [python, "-m", "build", "--outdir", made, HERE])
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    run_step("twine check", [python, "-m", "twine", "check", "--strict", sdist, wheel])
    to.mkdir(parents=True, exist_ok=True)
    for former in [*to.glob("ddip-*.tar.gz"), *to.glob("ddip-*.whl")]:
        former.unlink()
    return Path(shutil.copy(sdist, to)), Path(shutil.copy(wheel, to))


def ensure_complete(names: Sequence[str], expected: Sequence[str]) -> None:
    """Raise StepFailed unless the wheel's `names` are exactly the package's files and the metadata."""
    packed = {name for name in names if ".dist-info/" not in name}
    if packed != set(expected):
        missing, more = sorted(set(expected) - packed), sorted(packed - set(expected))
        raise StepFailed(f"the wheel lacks {missing}, and has {more} besides the package's files")


def files_of_the_package() -> list[str]:
    """Return the package's files with their paths in a wheel."""
    files = [
        *(HERE / "ddip").rglob("*.py"),
        HERE / "ddip" / "py.typed",
        *(HERE / "ddip" / "protocol" / "schemas").glob("*.json"),
    ]
    return [path.relative_to(HERE).as_posix() for path in files]


# -- try


def link_packages(folder: Path, *names: str) -> None:
    """Fill `folder` with links to these packages and their dependencies, as far as this Python has them.

    torch takes gigabytes, and this environment already has it. If the new environment used all of these site-packages,
    this checkout's ddip would be importable, and a requirement missing from setup.cfg would go unnoticed. So it gets a
    folder with these packages only.
    """
    folder.mkdir()
    done: set[str] = set()
    waiting = list(_required(names, {""}))
    while waiting:
        need = waiting.pop()
        if str(need) in done:
            continue
        done.add(str(need))
        found = metadata.distribution(need.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not top.endswith(".pth") and not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))).resolve())
        waiting += _required(found.requires or (), need.extras or {""})


def _required(needs: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    """Return those that apply to this Python and these extras."""
    for need in map(Requirement, needs):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
            yield need


def find_packages(python: Path) -> Path:
    """Return the folder into which pip installs for this interpreter."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run_step("look for its site-packages", [python, "-c", ask], env=clean_environment()).strip())


def clean_environment() -> dict[str, str]:
    """Return this process's environment variables without those that lead Python to other packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LEADS_ELSEWHERE)}


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install `wheel` into a new environment below `folder`, and start ranks from there."""
    python = new_environment(folder / "fresh")
    link_packages(folder / "torch", "torch")
    packages = find_packages(python)
    (packages / "torch.pth").write_text(f"{folder / 'torch'}\n")
    run_step("install the wheel", [python, "-m", "pip", "install", "--quiet", wheel], env=clean_environment())
    work = folder / "work"
    work.mkdir()
    options = {"cwd": work, "env": {**clean_environment(), "IPYTHONDIR": str(folder / "ipython")}}
    run_step("all_reduce on two ranks", [python, "-c", ALL_REDUCE, packages], **options)
    report = json.loads(run_step("python -m ddip doctor --json", [python, "-m", "ddip", "doctor", "--json"], **options))
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("packages", "start-gloo"):
        if checks[name]["status"] != "ok":
            raise StepFailed(f"the doctor says of {name}: {checks[name]['found']}")
    print(f"  {checks['start-gloo']['found']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=HERE / "dist", help="where the sdist and the wheel are put")
    to = parser.parse_args().to
    try:
        with tempfile.TemporaryDirectory(prefix="ddip-dist-") as name:
            folder = Path(name).resolve()  # resolved like the paths of modules
            sdist, wheel = build_distributions(folder, to)
            with zipfile.ZipFile(wheel) as archive:
                ensure_complete(archive.namelist(), files_of_the_package())
            try_wheel(wheel, folder)
    except StepFailed as error:
        sys.exit(str(error))
    for made in (sdist, wheel):
        print(f"{made}: {made.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
