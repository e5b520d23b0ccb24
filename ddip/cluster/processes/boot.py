"""Run ``main()`` of a ddip module in a new process, without the working directory on its path.

Run as ``python -P .../ddip/cluster/processes/boot.py MODULE ARGUMENT ...``. The working directory is the notebook's
folder: with ``python -m``, a file ``random.py`` there would replace Python's module, and any code in a downloaded
folder could run. ddip itself is imported from the folder of this file, where the notebook found it, and not by a path
entry, which would also make its neighbours importable.
"""

from __future__ import annotations

import sys

INSTEAD = "is found instead of the standard library's"


def main() -> None:
    """Run ``main()`` of the module in the first argument; on an exception, print it and exit with code 1."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file, before any other import: its modules have short names
    import os
    import traceback

    try:
        import importlib.util

        folder = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
        spec = importlib.util.spec_from_file_location("ddip", os.path.join(folder, "__init__.py"))
        assert spec is not None and spec.loader is not None
        package = sys.modules["ddip"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        importlib.import_module("ddip.protocol.warning_errors").set_aside()
        module = importlib.import_module(sys.argv[1])
        sys.argv[:] = [str(module.__file__), *sys.argv[2:]]
        module.main()
    except Exception:
        traceback.print_exc()
        for name, file in hidden_modules().items():
            print(f"{file} {INSTEAD} {name}; rename it", file=sys.stderr)
        sys.exit(1)


def hidden_modules() -> dict[str, str]:
    """Return by module name the path of each file on ``sys.path`` that hides a standard library module."""
    import os
    from importlib.machinery import PathFinder

    library = os.path.dirname(os.__file__)
    found = {}
    for name in sorted(sys.stdlib_module_names.difference(sys.builtin_module_names)):
        spec = PathFinder.find_spec(name)
        origin = None if spec is None else spec.origin
        if origin and not origin.startswith(library) and os.path.basename(os.path.dirname(origin)) != "lib-dynload":
            found[name] = origin
    return found


if __name__ == "__main__":
    main()
