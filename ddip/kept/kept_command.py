"""``python -m ddip groups``: list the groups of this user on this machine, and end kept ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ddip.cluster.processes import ownership
from ddip.errors import BadInput
from ddip.kept import kept_folder


def main(options: Sequence[str]) -> int:
    """Run the command with `options`; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddip groups", description="List your groups on this machine, and end kept ones."
    )
    parser.add_argument("--end", metavar="NAME", nargs="+", default=[], help="End these kept groups.")
    return end_kept(parser.parse_args(options).end) if options else list_groups()


def list_groups() -> int:
    """Print each kept group, and each group of a running notebook; return 0."""
    kept = kept_folder.list_kept()
    for one in kept:
        holder = one.holder()
        kept_for = kept_folder.keep_time_text(one.seconds)
        state = f"held by {holder}" if holder else f"kept for {kept_for}; %makedip --attach {one.name}"
        print(f"{one.name}  keeper {one.pid}  {state}")
    keepers = {one.pid for one in kept}
    for run in ownership.list_runs():
        if run.owner_lives and run.owner.pid not in keepers:
            count = f"{run.processes} process{'es' * (run.processes != 1)}"
            print(f"group of process {run.owner.pid}  {count}  ends with its notebook")
    if not kept:
        print("no kept groups; %makedip --keep starts one")
    return 0


def end_kept(names: Sequence[str]) -> int:
    """End the kept groups `names`; return 1 if one does not exist or does not end."""
    kept, code = kept_folder.list_kept(), 0
    for name in names:
        try:
            named = kept_folder.find_named(kept, name, "--end")
        except BadInput as error:
            print(error, file=sys.stderr)
            code = 1
            continue
        if named.end():
            print(f"ended {name}")
        else:
            print(f"--end {name}: keeper {named.pid} does not end; kill it", file=sys.stderr)
            code = 1
    return code
