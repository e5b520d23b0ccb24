"""What is installed, what the environment sets, and what the current folder holds."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from importlib.machinery import FrozenImporter

from ddip.cluster import boot
from ddip.doctor.report import Check, failed, ok, warning

SHOWN = ("ipyparallel", "ipykernel", "ipython")
"""Packages whose versions are told also where they are good; torch has a line of its own."""
FRONT_ENDS = {"jupyterlab": ("JupyterLab", 4), "notebook": ("Notebook", 7), "nbclassic": ("nbclassic", 1)}
"""What to call a package, and the oldest major version that ddip is tried with."""
OTHERS = ("IPython", "cloudpickle", "ddip", "ipykernel", "ipyparallel", "numpy", "psutil", "torch", "traitlets", "zmq")
"""Modules besides the standard library's that a file in the folder must not hide."""
TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
)
"""What ddip sets on ranks, as torchrun does, and by which libraries tell that they are on one."""

BACKENDS = ("GLOO_", "NCCL_", "TORCH_GLOO_", "TORCH_NCCL_")
"""How the names of what torch's backends read begin."""

VersionOf = Callable[[str], str | None]


def version_of(package: str) -> str | None:
    """Of an installed package; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- versions


def check_python() -> Check:
    """The interpreter's version, against what ddip asks for."""
    try:
        wanted = metadata.metadata("ddip")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        wanted = ""
    version = ".".join(map(str, sys.version_info[:3]))
    return judge_python(version, wanted, f"{sys.implementation.name}, {sys.executable}")


def judge_python(version: str, wanted: str, where: str) -> Check:
    """`wanted`: a specifier such as ``>=3.11,<3.15``; empty: unknown."""
    from packaging.specifiers import SpecifierSet

    if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
        return failed("python", f"{version}, {where}; ddip needs {wanted}", f"install ddip in a Python {wanted}")
    return ok("python", f"{version}, {where}")


def check_packages() -> Check:
    """What ddip requires, against what is installed."""
    try:
        requires = metadata.requires("ddip")
    except metadata.PackageNotFoundError:
        requires = None
    return judge_packages(requires, version_of)


def judge_packages(requires: Sequence[str] | None, version_of: VersionOf) -> Check:
    """`requires`: lines as in a wheel's metadata; None: ddip is not installed as a package."""
    from packaging.requirements import Requirement

    versions = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in SHOWN)
    if requires is None:
        advice = "install it in this environment: python -m pip install . in ddip's folder"
        return warning("packages", f"{versions}; ddip itself is imported without being installed", advice)
    wanted = [need for need in map(Requirement, requires) if need.marker is None or need.marker.evaluate({"extra": ""})]
    wrong = []
    for need in wanted:
        version = version_of(need.name)
        if version is None:
            wrong.append((f"{need.name} is missing", need))
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append((f"{need.name} {version} is not {need.specifier}", need))
    if wrong:
        line = " ".join(f'"{need.name}{need.specifier}"' for _, need in wrong)
        return failed("packages", "; ".join(text for text, _ in wrong), f"python -m pip install {line}")
    return ok("packages", versions)


def check_front_end() -> Check:
    """Where notebooks can be opened; another environment than this one may have more."""
    return judge_front_end(version_of, os.environ, shutil.which("code") is not None)


def judge_front_end(version_of: VersionOf, environment: Mapping[str, str], has_code: bool) -> Check:
    """`has_code`: the command of VS Code is there."""
    found, old = [], []
    for package, (name, oldest) in FRONT_ENDS.items():
        version = version_of(package)
        if version is not None:
            found.append(f"{name} {version}")
            if int(version.split(".")[0]) < oldest:
                old.append(f'"{package}>={oldest}"')
    if has_code or environment.get("TERM_PROGRAM") == "vscode" or "VSCODE_PID" in environment:
        found.append("VS Code")
    if version_of("ipython"):
        found.append("IPython in a terminal")
    text = ", ".join(found) or "none in this environment"
    if "JPY_SESSION_NAME" in environment or "JPY_PARENT_PID" in environment:
        text += "; this runs in a notebook of Jupyter Server"
    if old:
        advice = f"take a newer one: python -m pip install {' '.join(old)}"
        return warning("front-end", f"{text}; ddip is not tried with one that old", advice)
    return ok("front-end", text)


# -- the environment


def check_environment() -> Check:
    """Variables to which ddip, torch or the ranks react."""
    from ddip.cluster.on_host import cores
    from ddip.group.engines import WATCHDOG
    from ddip.group.host import loopback, threads
    from ddip.group.placement import SHARES
    from ddip.protocol.rank_spec import INTERFACE_VARIABLES

    return judge_environment(
        os.environ,
        interfaces={name: loopback() for name in INTERFACE_VARIABLES},
        threads=threads(cores(), 2),
        watchdog=WATCHDOG,
        shares=SHARES,
    )


def judge_environment(
    environment: Mapping[str, str],
    interfaces: Mapping[str, str],
    threads: int,
    watchdog: Mapping[str, str],
    shares: str,
) -> Check:
    """`interfaces` and `watchdog`: variables with the values that ddip gives them; `threads`: of each of two ranks."""
    lines = []
    for name, ours in interfaces.items():
        theirs = environment.get(name) or ours
        if theirs != ours:
            lines.append(f"{name}={theirs} is not followed: the ranks of one host talk over {ours}")
    for name, ours in watchdog.items():
        theirs = environment.get(name, ours)
        if theirs != ours:
            lines.append(f"{name}={theirs}: torch's watchdog may end a rank that waits, and its variables with it")
    torchrun = [f"{name}={environment[name]}" for name in TORCHRUN if name in environment]
    if torchrun:
        lines.append(f"{', '.join(torchrun)}: the ranks get their own, but libraries may take the notebook for a rank")
    lines += _thread_lines(environment, threads)
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        lines.append("CUDA_LAUNCH_BLOCKING is set: each operation on a GPU is waited for, which is slow")
    if environment.get(shares) == "1":
        lines.append(f"{shares}=1: ranks may share a GPU over nccl, which is slow")
    if environment.get("PYTHONSTARTUP"):
        lines.append(f"PYTHONSTARTUP={environment['PYTHONSTARTUP']} runs in the notebook's kernel and on each rank")
    for name in ("TMPDIR", "IPYTHONDIR"):
        if not (environment.get(name) or "/").startswith(("/", "~")):
            lines.append(f"{name}={environment[name]} is a relative path: it means another place in each folder")
    told = {*interfaces, *watchdog, shares}
    passed = [f"{n}={v}" for n, v in sorted(environment.items()) if n.startswith(BACKENDS) and n not in told]
    if not lines:
        return ok("environment", "; ".join(["no variable gets in the way", *(f"ranks get {one}" for one in passed)]))
    lines += [f"{one} is passed on to the ranks" for one in passed]
    return warning("environment", "\n".join(lines), "unset those that are not meant, where Jupyter is started")


def _thread_lines(environment: Mapping[str, str], threads: int) -> list[str]:
    typed = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if typed.isdecimal() and int(typed) > threads:
        share = f"ddip would give each of two ranks {threads}"
        return [f"OMP_NUM_THREADS={typed}: every rank computes with that many threads, where {share}"]
    return []


# -- files in the way


def check_folder() -> Check:
    """Files here, and on PYTHONPATH, that have the names of modules."""
    try:
        entries = [
            entry.name
            for entry in os.scandir(os.getcwd())
            if entry.is_file() or os.path.exists(f"{entry.path}/__init__.py")
        ]
    except FileNotFoundError:
        return failed("folder", "the current folder has been removed", "cd to another folder")
    except OSError as error:
        return warning("folder", f"the current folder cannot be read: {error}", "cd to a folder that you may read")
    return judge_folder(hiding(entries), boot.hidden())


def hiding(entries: Iterable[str]) -> list[str]:
    """Those of the files and packages of a folder that take the place of a module that is not loaded by then.

    >>> hiding(["random.py", "train.py", "os.py"])
    ['random.py']
    """
    names = {*sys.stdlib_module_names.difference(sys.builtin_module_names), *OTHERS}
    found = [entry for entry in entries if entry.removesuffix(".py") in names and entry.count(".") < 2]
    return sorted(entry for entry in found if FrozenImporter.find_spec(entry.removesuffix(".py")) is None)


def judge_folder(here: Sequence[str], on_path: Mapping[str, str]) -> Check:
    """`here`: what `hiding` found; `on_path`: modules of the standard library that files on PYTHONPATH hide."""
    lines = [f"{file} {boot.INSTEAD} {name}" for name, file in on_path.items()]
    if here:
        take = "takes the place of a module" if len(here) == 1 else "take the place of modules"
        lines.append(f"{', '.join(here)} in the current folder {take} in notebooks and cells")
    if on_path:
        return failed("folder", "\n".join(lines), "rename these files, or take their folder off PYTHONPATH")
    if here:
        return warning("folder", lines[0], "rename it" if len(here) == 1 else "rename them")
    return ok("folder", "no file in it hides a module")
