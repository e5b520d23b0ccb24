"""Check that the installed libraries have the private names that ddip uses.

torch's are looked up in the process that imports it. Those of other libraries are searched for in their sources, since
the import of a framework can take a minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.protocol.compat import Names


class NamesReport(TypedDict):
    """Results of the search for the names of one library."""

    library: str
    version: str
    tested: str
    lacks: list[str]
    """Missing names that a group or an app cannot work without."""
    off: dict[str, list[str]]
    """Features that are off, each with the private names that it needs and the library lacks."""


def name_tables() -> list[Names]:
    """Return the names of all libraries but torch."""
    from ddip.apps import compat_fastai, compat_hf, compat_lightning
    from ddip.protocol import compat_ipyparallel, compat_ipython

    return [
        *(compat_ipyparallel.NOTEBOOK, compat_ipyparallel.CONTROLLER, compat_ipyparallel.ENGINE),
        *(compat_ipython.RANK_KERNEL, compat_ipython.RANK_SHELL, compat_ipython.NOTEBOOK),
        *(compat_fastai.FASTAI, compat_fastai.FASTCORE, *compat_hf.BY_MODULE.values(), *compat_lightning.TABLES),
    ]


def report_missing(names: Names, has: Callable[[str], bool]) -> NamesReport:
    """Return the names that the library lacks; `has` returns whether it has a name."""
    off = {feature: [name for name in needed if not has(name)] for feature, needed in names.features.items()}
    return {
        "library": names.library,
        "version": names.version,
        "tested": names.tested,
        "lacks": [name for name in names.core if not has(name)],
        "off": {feature: missing for feature, missing in off.items() if missing},
    }


def is_in_source(path: str) -> bool:
    """Return whether the source of a library contains the name with this dotted path.

    The source is that of the module which the first parts of `path` name; it must contain the other parts as words.
    Returns True if no source is found. "a.b or a.c" are the names of different versions, of which one is enough.
    """
    if " or " in path:
        return any(map(is_in_source, path.split(" or ")))
    library, *words = path.split(".")
    spec = find_spec(library)
    if spec is None or not spec.origin:
        return True
    file = Path(spec.origin)
    while words and file.name == "__init__.py":
        below = file.parent / words[0]
        candidates = [below / "__init__.py", below.with_suffix(".py")]
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        if found is None:
            break
        file, words = found, words[1:]
    return not file.is_file() or all(word in _file_words(file) for word in words if word != "__wrapped__")


@cache
def _file_words(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace")))


def check_names() -> Check:
    """Search for the private names in the sources of the installed libraries, except torch."""
    return judge_names("names", [report_missing(names, is_in_source) for names in name_tables() if names.is_installed])


def judge_names(check: str, reports: Sequence[NamesReport]) -> Check:
    """Return the result of the check named `check`, for the `reports` of one or more libraries."""
    lines, tested = [], {}
    for one in reports:
        found = [f"{feature} (missing: {', '.join(names)})" for feature, names in one["off"].items()]
        if one["lacks"]:
            found.append(f"missing: {', '.join(one['lacks'])}")
        newest = one["tested"].split()[-1]
        if not found and _version_numbers(one["version"]) > _version_numbers(newest):
            found.append(f"newer than {newest}, and has all private names")
        if found:
            tested[one["library"]] = one["tested"]
        lines += [f"{one['library']} {one['version']}: {line}" for line in found]
    if not lines:
        libraries = ", ".join(dict.fromkeys(one["library"] for one in reports))
        return ok(check, f"{libraries}: all private names that ddip uses exist")
    result = failed if any(one["lacks"] for one in reports) else warning
    advice = f"ddip is tested with {', '.join(f'{library} {versions}' for library, versions in tested.items())}"
    return result(check, "\n".join(dict.fromkeys(lines)), advice)


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]
