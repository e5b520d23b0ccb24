"""Collect the wheels that ddip and its tests need on an offline machine with its own Python and torch.

    python tests/wheelhouse.py --python 3.12 --torch torch==2.11.0 --to wheelhouse --nccl 2.30.7

With ``--nccl`` it has that NCCL for one kind of GPU too: NCCL 2.30 puts two ranks on one GPU, and many torches have an
older one. debugpy, which no GPU test needs, makes room for it. torch and its dependencies are not included. Of fastai's
dependencies only the small ones are: a machine on which people use fastai has the others.
"""

from __future__ import annotations

import argparse
import configparser
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent.parent
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28)] + ["manylinux2014_x86_64"]
OF_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "nbclient", "nbformat")
OF_FASTAI = ("fastai", "fastcore", "fastdownload", "fastprogress", "fasttransform", "plum-dispatch", "accelerate")
ALSO = ("py-spy", "beartype")
"""py-spy shows where a rank hangs; plum-dispatch needs beartype."""
MOST_BYTES = 60e6
FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""First bytes of a fatbin: magic number, version, and length of the header."""


def requirements() -> list[str]:
    """Return the requirements of setup.cfg without torch and its dependencies, and those of the GPU tests."""
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


def collect_wheels(python: str, torch: str, folder: Path) -> None:
    """Download the wheels for a version of Python and torch."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.rmtree(HERE / "build" / "lib", ignore_errors=True)  # old files of setuptools would get into the wheel
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(HERE)], check=True)
    subprocess.run([*pip, "download", "--quiet", *target, *requirements(), *ALSO], check=True)
    subprocess.run([*pip, "download", "--quiet", "--no-deps", *target, *OF_FASTAI], check=True)
    _remove_unsupported_fastai(folder, torch)


def _remove_unsupported_fastai(folder: Path, torch: str) -> None:
    """Remove fastai's wheel if it does not support this version of torch; its tests are then skipped."""
    from packaging.requirements import Requirement

    version = re.search(r"\d[\w.]*", torch)
    if version is None:  # the newest version
        return
    for wheel in folder.glob("fastai-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = archive.read(metadata).decode().splitlines()
        wanted = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: torch")]
        if any(need.name == "torch" and version[0] not in need.specifier for need in wanted):
            print(f"{wheel.name} is left out: it is not for torch {torch}")
            wheel.unlink()


def add_nccl(version: str, cuda: str, architecture: int, folder: Path) -> None:
    """Download NCCL, and compress its library without the kernels for GPUs of other architectures (90: Hopper)."""
    with tempfile.TemporaryDirectory() as temporary:
        platforms = [word for platform in [*PLATFORMS, "manylinux_2_18_x86_64"] for word in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
        subprocess.run([*command, "--dest", temporary, f"nvidia-nccl-cu{cuda}=={version}"], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            library = bytearray(archive.read("nvidia/nccl/lib/libnccl.so.2"))
    keep_architecture(library, architecture)
    (folder / "libnccl.so.2.xz").write_bytes(lzma.compress(library, preset=9 | lzma.PRESET_EXTREME))


def keep_architecture(library: bytearray, architecture: int) -> None:
    """Overwrite with zeros the machine code in `library`, an ELF file with fatbins of CUDA, for other architectures.

    A fatbin is a header of 16 bytes, which ends with its length, and entries. An entry begins with its kind (2: machine
    code, 1: PTX), the length of its header and of its data; the architecture is at byte 28.
    """
    begin, kept = library.find(FATBIN), 0
    while begin >= 0:
        (length,) = struct.unpack_from("<Q", library, begin + 8)
        at, end = begin + 16, begin + 16 + length
        while at < end <= len(library):
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            if not header or at + header + size > end:  # padding, or no fatbin
                break
            (built_for,) = struct.unpack_from("<I", library, at + 28)
            if (kind, built_for) == (2, architecture):
                kept += size
            else:
                library[at + header : at + header + size] = bytes(size)
            at += header + size
        begin = library.find(FATBIN, max(at, begin + 1) if end <= len(library) else begin + 1)
    if not kept:
        sys.exit(f"NCCL has no kernels for architecture {architecture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="Python version of the machine")
    parser.add_argument("--torch", default="torch==2.11.0", help="torch of the machine, such as torch==2.11.0")
    parser.add_argument("--to", type=Path, default=HERE / "wheelhouse")
    parser.add_argument("--nccl", default="", help="version of NCCL to add, such as 2.30.7")
    parser.add_argument("--cuda", default="13", help="CUDA version of that NCCL")
    parser.add_argument("--architecture", type=int, default=90, help="75 for T4, 80 for A100 and L4, 90 for H100")
    arguments = parser.parse_args()
    collect_wheels(arguments.python, arguments.torch, arguments.to)
    if arguments.nccl:
        add_nccl(arguments.nccl, arguments.cuda, arguments.architecture, arguments.to)
        for wheel in arguments.to.glob("debugpy-*"):
            wheel.unlink()
    size = sum(file.stat().st_size for file in arguments.to.iterdir())
    print(f"{arguments.to}: {len(list(arguments.to.iterdir()))} files, {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        sys.exit(f"that is more than {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
