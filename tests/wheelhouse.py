"""Collect the wheels that ddip and its tests need on a machine that has Python and torch of its own, and no network.

    python tests/wheelhouse.py --python 3.12 --torch torch==2.11.0 --to wheelhouse

Neither torch nor what torch itself brings is among them. Of fastai's needs only the small ones are: a machine on which
people use fastai has the others.
"""

from __future__ import annotations

import argparse
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent.parent
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28)] + ["manylinux2014_x86_64"]
OF_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "nbclient", "nbformat")
OF_FASTAI = ("fastai", "fastcore", "fastdownload", "fastprogress", "fasttransform", "plum-dispatch", "accelerate")
ALSO = ("py-spy", "beartype")
"""Where a rank hangs; and a need of plum-dispatch."""
MOST_BYTES = 60e6


def needs() -> list[str]:
    """What setup.cfg asks for, but torch and what comes with it; and what the tests of GPUs need."""
    config = configparser.ConfigParser()
    config.read(HERE / "setup.cfg")
    core = config["options"]["install_requires"].split("\n")
    test = config["options.extras_require"]["test"].split("\n")
    found = [line.partition("#")[0].strip() for line in core if line.strip()]
    found += [line.partition("#")[0].strip() for line in test if _name(line) in OF_TESTS]
    return [need for need in found if _name(need) != "torch"]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement.strip())
    return match.group(0).lower() if match else ""


def collect(python: str, torch: str, folder: Path) -> int:
    """Fill `folder` for that version of Python and of torch; returns the bytes of all wheels."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.rmtree(HERE / "build" / "lib", ignore_errors=True)  # what setuptools has left would be in the wheel, too
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    there = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    there += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(HERE)], check=True)
    subprocess.run([*pip, "download", "--quiet", *there, *needs(), *ALSO], check=True)
    subprocess.run([*pip, "download", "--quiet", "--no-deps", *there, *OF_FASTAI], check=True)
    _leave_out_what_torch_forbids(folder, torch)
    return sum(wheel.stat().st_size for wheel in folder.iterdir())


def _leave_out_what_torch_forbids(folder: Path, torch: str) -> None:
    """fastai says which torch it works with; where that is another one, its tests are left out there."""
    from packaging.requirements import Requirement

    version = re.search(r"\d[\w.]*", torch)
    if version is None:  # whatever is newest
        return
    for wheel in folder.glob("fastai-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = archive.read(metadata).decode().splitlines()
        wanted = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: torch")]
        if any(need.name == "torch" and version[0] not in need.specifier for need in wanted):
            print(f"{wheel.name} is left out: it is not for torch {torch}")
            wheel.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the Python there")
    parser.add_argument("--torch", default="torch==2.11.0", help="the torch there, such as torch==2.11.0")
    parser.add_argument("--to", type=Path, default=HERE / "wheelhouse")
    arguments = parser.parse_args()
    size = collect(arguments.python, arguments.torch, arguments.to)
    print(f"{arguments.to}: {len(list(arguments.to.iterdir()))} wheels, {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        sys.exit(f"that is more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
