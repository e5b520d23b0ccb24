"""Run a script for torchrun on this rank, for a ``%diprun`` cell.

    notebook     %diprun train.py --lr 0.1  -->  a cell with this line, and the digest of the file
    every rank   own __main__, sys.argv, sys.path[0]  -->  the script's code  -->  its variables join those of cells

The script finds what a process of torchrun has: a ``__main__`` of its own, from which pickle and the workers of data
loaders get its classes and functions; the arguments; its folder as ``sys.path[0]``; a start method of multiprocessing
that nothing has set before; and its own modules (``script_modules.py``). As after IPython's ``%run``, its variables are
then added to those of cells, even after an error, so that pickle also finds its classes in later cells. Its functions
continue to read the script's own variables.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import linecache
import multiprocessing
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand

from ddip.protocol.cell_messages import ScriptFile
from ddip.rank import user_namespace
from ddip.rank.kernel import script_modules
from ddip.rank.runtime import current, stacks, tracebacks

MAGIC = "%diprun"
ALONE = f"{MAGIC} runs a script on the ranks: type it in a cell of its own, without other code"
tracebacks.HIDDEN.add(__name__)


@no_var_expand  # the notebook has done so
def run_script(line: str) -> None:
    """Run the script or module in `line`, the arguments of ``%diprun`` without its options.

    Raises what the script raises, except for an exit with code 0; UsageError if the cell has other code; OSError,
    ValueError or ImportError if this rank does not have the script of the notebook.
    """
    script = current.script_file()
    if script is None:
        raise UsageError(ALONE)
    words = shlex.split(line)
    if words[0] == "-m":
        name, *arguments = words[1:]
        folder = script["folder"] if os.path.isdir(script["folder"]) else os.getcwd()
        with _process_surroundings(folder, ["-m", *arguments]):
            spec = _find_module(name, folder)
            sys.argv[0] = str(spec.origin)
            _run_main(_make_main(spec.origin, spec), _code_of_module(spec))
    else:
        path, source = _read_script(words[0], script)
        shown = words[0] if os.path.abspath(words[0]) == path else path
        with _process_surroundings(os.path.dirname(os.path.realpath(path)), [shown, *words[1:]]):
            _run_main(_make_main(path), compile(source, path, "exec", dont_inherit=True))


def _run_main(module: ModuleType, code: CodeType) -> None:
    """Run `code` as the ``__main__`` of this process, then add its variables to those of cells."""
    stacks.script_files[code.co_filename] = os.path.basename(code.co_filename)
    linecache.checkcache(code.co_filename)
    with _replaced_main(module):
        try:
            exec(code, vars(module))
        except SystemExit as request:
            if request.code:
                raise


# -- the script


def _read_script(typed: str, script: ScriptFile) -> tuple[str, bytes]:
    """Return path and contents of the script.

    Raises OSError if there is none, and ValueError if it differs from that of the notebook. A relative path begins at
    the notebook's folder. On another host, which may lack that folder, it may also begin at the rank's folder.
    """
    typed = os.path.expanduser(typed)
    paths = [os.path.abspath(os.path.join(folder, typed)) for folder in (script["folder"], os.getcwd())]
    path = next(filter(os.path.isfile, paths), "")
    host = socket.gethostname()
    if not path:
        raise FileNotFoundError(f"{MAGIC} {typed}: {host} has no file {paths[0]}; copy the script to this host")
    source = Path(path).read_bytes()
    if sha256(source).hexdigest() != script["digest"]:
        raise ValueError(f"{MAGIC} {typed}: {path} on {host} differs from the notebook's script; copy it to this host")
    return path, source


def _find_module(name: str, folder: str) -> ModuleSpec:
    """Return the module `name`, or of a package its ``__main__``; raises ImportError.

    `folder` is already on ``sys.path``.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"{MAGIC} -m {name}: No module named {name!r} in {folder} or on sys.path")
    if spec.submodule_search_locations is None:
        return spec
    main = importlib.util.find_spec(f"{name}.__main__")
    if main is None:
        raise ImportError(f"{MAGIC} -m {name}: it is a package without a module __main__; type one of its modules")
    return main


def _code_of_module(spec: ModuleSpec) -> CodeType:
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, InspectLoader) else None
    if code is None:
        raise ImportError(f"{MAGIC} -m {spec.name}: it has no Python code to run")
    return code


def _make_main(path: str | None, spec: ModuleSpec | None = None) -> ModuleType:
    """Return a module with the attributes that Python gives to ``__main__``; `spec`: for ``-m``."""
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins, __spec__=spec, __cached__=None)
    if spec is not None:
        vars(module).update(__loader__=spec.loader, __package__=spec.parent, __cached__=spec.cached)
    elif path is not None:
        vars(module).update(__loader__=SourceFileLoader("__main__", path))
    return module


# -- its surroundings


@contextlib.contextmanager
@stacks.never_interrupted
def _replaced_main(module: ModuleType) -> Iterator[None]:
    """Make `module` the ``__main__`` of this process; at the end, give cells its variables."""
    former = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = former
        user_namespace().update({name: value for name, value in vars(module).items() if _is_variable(name)})


def _is_variable(name: str) -> bool:
    """Return whether `name` is a variable of the script, and not one that Python or IPython sets."""
    return bool(name.strip("_")) and not (name.startswith("__") and name.endswith("__"))


@contextlib.contextmanager
@stacks.never_interrupted
def _process_surroundings(folder: str, arguments: list[str]) -> Iterator[None]:
    """Give this process the command line of a script in `folder`, and restore its own at the end."""
    former = sys.argv
    start_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)  # so that the script may set it, as in a new process
    sys.argv = arguments
    try:
        with script_modules.exchange_modules(folder):
            yield
    finally:
        sys.argv = former
        if multiprocessing.get_start_method(allow_none=True) != start_method:
            multiprocessing.set_start_method(start_method, force=True)
