"""Checks of the installed packages, the environment variables and the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from importlib.machinery import FrozenImporter

from ddip.cluster.processes import boot
from ddip.doctor.doctor_report import Check, failed, ok, warning

SHOWN = ("ipyparallel", "ipykernel", "ipython", "jupyterlab", "notebook")
"""Packages whose versions the report shows; torch has a separate line."""
OLDEST = {"jupyterlab": 4, "notebook": 7}
"""Oldest major version of each front end with which ddip is tested."""
OTHERS = ("IPython", "cloudpickle", "ddip", "ipykernel", "ipyparallel", "numpy", "psutil", "torch", "traitlets", "zmq")
"""Modules outside the standard library that a file in the folder must not hide."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Variables that torchrun sets, by which libraries recognize a rank."""
BACKENDS = ("GLOO_", "NCCL_", "TORCH_GLOO_", "TORCH_NCCL_")
"""Prefixes of the environment variables that torch's backends read."""

VersionOf = Callable[[str], str | None]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    """Compare the interpreter's version with what ddip requires."""
    from packaging.specifiers import SpecifierSet

    wanted = (metadata.metadata("ddip")["Requires-Python"] or "") if version_of("ddip") else ""
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{version}, {sys.implementation.name}, {sys.executable}"
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return failed("python", f"{found}; ddip needs {wanted}", f"install ddip in a Python {wanted}")
    return ok("python", found)


def check_packages() -> Check:
    """Compare what ddip requires with what is installed."""
    return judge_packages(metadata.requires("ddip") if version_of("ddip") else None, version_of)


def judge_packages(requires: Sequence[str] | None, version_of: VersionOf) -> Check:
    """Judge the installed versions, which `version_of` returns by package.

    `requires`: lines as in a wheel's metadata, None if ddip is not installed as a package.
    """
    from packaging.requirements import Requirement

    versions = ", ".join(f"{name} {version}" for name in SHOWN if (version := version_of(name)))
    if requires is None:
        advice = "install it in this environment: python -m pip install . in ddip's folder"
        return warning("packages", f"{versions}; ddip itself is imported without being installed", advice)
    wrong = {}
    for need in map(Requirement, requires):
        version = version_of(need.name)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong[f'"{need.name}{need.specifier}"'] = f"{need.name} {version or 'is missing'}"
    if wrong:
        return failed("packages", ", ".join(wrong.values()), f"python -m pip install {' '.join(wrong)}")
    old = {name: f'"{name}>={oldest}"' for name, oldest in OLDEST.items() if _major_version(version_of(name)) < oldest}
    if old:
        text = f"{versions}; ddip is not tested with such an old version of {', '.join(old)}"
        return warning("packages", text, f"python -m pip install {' '.join(old.values())}")
    return ok("packages", versions)


def _major_version(version: str | None) -> float:
    return int(version.split(".")[0]) if version else float("inf")


def check_environment() -> Check:
    """Look for variables that ddip, torch or the ranks react to."""
    from ddip.cluster.processes.on_host import count_cores
    from ddip.group.members.engines import WATCHDOG
    from ddip.group.process_group.network import loopback_name
    from ddip.protocol.rank_spec import INTERFACE_VARIABLES

    interfaces = {name: loopback_name() for name in INTERFACE_VARIABLES}
    return judge_environment(os.environ, interfaces, max(1, count_cores() // 2), WATCHDOG)


def judge_environment(
    environment: Mapping[str, str], interfaces: Mapping[str, str], threads: int, watchdog: Mapping[str, str]
) -> Check:
    """Judge the environment variables.

    `interfaces` and `watchdog`: variables with the values that ddip sets; `threads`: number of threads of each of two
    ranks.
    """
    lines = []
    for name, ours in interfaces.items():
        theirs = environment.get(name) or ours
        if theirs != ours:
            lines.append(f"{name}={theirs} is ignored: the ranks of one host communicate over {ours}")
    for name, ours in watchdog.items():
        theirs = environment.get(name, ours)
        if theirs != ours:
            lines.append(f"{name}={theirs}: torch's watchdog may end a rank that waits, and its variables with it")
    torchrun = [f"{name}={environment[name]}" for name in TORCHRUN if name in environment]
    if torchrun:
        lines.append(
            f"{', '.join(torchrun)}: the ranks get their own, but libraries may mistake the notebook for a rank"
        )
    typed = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    if typed.isdecimal() and int(typed) > threads:
        lines.append(
            f"OMP_NUM_THREADS={typed}: each rank uses that many threads; ddip would give each of two ranks {threads}"
        )
    backend_variables = {name for name in environment if name.startswith(BACKENDS)} - {*interfaces, *watchdog}
    passed = [f"{name}={environment[name]}" for name in sorted(backend_variables)]
    if passed:
        lines.append(f"passed on to the ranks: {', '.join(passed)}")
    if len(lines) == bool(passed):
        return ok("environment", "\n".join(lines) or "no variable interferes")
    return warning("environment", "\n".join(lines), "unset unintended ones where Jupyter is started")


def check_folder() -> Check:
    """Look for files in the current folder, and on PYTHONPATH, that have the names of modules."""
    try:
        entries = [
            entry.name
            for entry in os.scandir(os.getcwd())
            if entry.is_file() or os.path.exists(f"{entry.path}/__init__.py")
        ]
    except OSError as error:
        return failed("folder", f"the current folder cannot be read: {error}", "cd to a folder that you may read")
    return judge_folder(hiding_entries(entries), boot.hidden_modules())


def hiding_entries(entries: Iterable[str]) -> list[str]:
    """Return the files and packages of a folder that would hide a module; frozen modules cannot be hidden.

    >>> hiding_entries(["random.py", "train.py", "os.py"])
    ['random.py']
    """
    names = {*sys.stdlib_module_names.difference(sys.builtin_module_names), *OTHERS}
    found = [entry for entry in entries if entry.removesuffix(".py") in names and entry.count(".") < 2]
    return sorted(entry for entry in found if FrozenImporter.find_spec(entry.removesuffix(".py")) is None)


def judge_folder(files: Sequence[str], on_path: Mapping[str, str]) -> Check:
    """Judge the files of the current folder and of PYTHONPATH.

    `files`: the result of `hiding_entries`; `on_path`: modules of the standard library that PYTHONPATH hides, with the
    file.
    """
    if on_path:
        lines = [f"{file} {boot.INSTEAD} {name}" for name, file in on_path.items()]
        return failed("folder", "\n".join(lines), "rename these files, or take their folder off PYTHONPATH")
    if files:
        found = f"in notebooks and cells, files of the current folder hide modules: {', '.join(files)}"
        return warning("folder", found, "rename them")
    return ok("folder", "no file in it hides a module")
