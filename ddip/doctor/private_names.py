"""Check that the installed libraries have the private names that ddip uses.

All but torch are imported in a process of its own (`main`), since some take seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.protocol.compat import Names, NamesReport


def tables() -> list[Names]:
    """Return the names of all libraries but torch."""
    from ddip.apps import compat_fastai, compat_hf, compat_lightning
    from ddip.protocol import compat_ipyparallel, compat_ipython

    return [
        *(compat_ipyparallel.NOTEBOOK, compat_ipyparallel.CONTROLLER, compat_ipyparallel.ENGINE),
        *(compat_ipython.RANK_KERNEL, compat_ipython.RANK_SHELL, compat_ipython.NOTEBOOK),
        *(compat_fastai.FASTAI, compat_fastai.FASTCORE, *compat_hf.BY_MODULE.values(), *compat_lightning.TABLES),
    ]


def main() -> None:
    """Search the installed libraries for the names, and print a list of reports as one line of JSON."""
    reports = [names.report() for names in tables() if names.is_installed]
    sys.stdout.write(f"{json.dumps(reports)}\n")


def judge_names(check: str, reports: Sequence[NamesReport]) -> Check:
    """Return the check of this name for the `reports` of one or more libraries."""
    lines, lacking, tested = [], False, {}
    for report in reports:
        title = f"{report['library']} {report['version']}"
        found = [f"{feature} (missing: {', '.join(names)})" for feature, names in report["off"].items()]
        if report["lacks"]:
            lacking = True
            found.append(f"missing: {', '.join(report['lacks'])}")
        newest = report["tested"].split()[-1]
        if not found and _numbers(report["version"]) > _numbers(newest):
            found.append(f"newer than {newest}, and has all private names")
        lines += [f"{title}: {line}" for line in found]
        if found:
            tested[report["library"]] = report["tested"]
    lines = list(dict.fromkeys(lines))
    advice = f"ddip is tested with {', '.join(f'{name} {versions}' for name, versions in tested.items())}"
    if lacking:
        return failed(check, "\n".join(lines), advice)
    if lines:
        return warning(check, "\n".join(lines), advice)
    libraries = ", ".join(dict.fromkeys(report["library"] for report in reports))
    return ok(check, f"{libraries}: all private names that ddip uses are there")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]
