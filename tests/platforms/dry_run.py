"""Check that pip would upgrade no package of a platform's image to install ddip; run in an environment with its pins.

    python tests/platforms/dry_run.py WHEEL_OR_FOLDER

Prints what pip would install. Only ipyparallel may be upgraded: Colab's and Kaggle's 8.8 lacks what ddip needs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

MAY_CHANGE = {"ddip", "ipyparallel"}


def installed_version(name: str) -> str:
    """Return the installed version of a package; an empty text if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def planned_installs(source: str) -> dict[str, str]:
    """Return the versions that pip would install for `source`, by package."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", source]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in report["install"]}


def main(source: str) -> int:
    planned = planned_installs(source)
    for name, version in planned.items():
        print(f"{name}: {installed_version(name) or 'new'} -> {version}")
    upgraded = {name for name in planned if installed_version(name)} - MAY_CHANGE
    if upgraded:
        print(f"pip would upgrade {', '.join(sorted(upgraded))}, which the platform's own packages need")
    return 1 if upgraded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
