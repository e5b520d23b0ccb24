"""Restore or report process-wide settings that a cell has left changed, such as gradients, autocast or default dtype.

Code that changes such a setting temporarily (``torch.no_grad()``, ``optimizer.step``) restores it at its end. If an
exception hits the few instructions that restore it, all later cells run with the changed setting. Interrupts are
delayed for such code (``libraries.py``), but only briefly, and errors are not delayed at all.

Each setting is read when a cell begins and when it has ended. If the two values differ, one rule decides:

    the traceback shows that the code which would have restored it was cut off      ddip restores it
    otherwise the cell has set it, on purpose or by mistake                         it stays, and is reported

That code is recognized by its frames in the traceback: a function of a library, or one called by a ``with`` statement,
whose code names one of the functions that change the setting. If a user calls ``torch.set_grad_enabled(False)`` in a
cell that fails later, the setting stays and the notebook prints the line that restores it. After a cell that succeeded,
the notebook prints nothing, unless the cell has left its ranks with different values.

A new rank (after a repair, or in a larger group) gets the settings in `CARRIED`, the variables of ``os.environ`` and
entries of ``sys.path`` that cells have changed on the existing ranks, and the state of each process-wide random number
generator that is the same on all of them.

Handled elsewhere or not at all: signal handlers and trace functions (``aside.py``), ``sys.stdout`` and ``sys.stderr``
(``mending.py``), other changes of random number generators, and new names in ``os.environ``, which imports add.
"""

from __future__ import annotations

import decimal
import importlib
import os
import pickle
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch

from ddip.protocol import compat_torch
from ddip.protocol.reports import ChangedSetting
from ddip.rank.runtime.libraries import is_librarys

DEVICES = ("cpu", "cuda")
"""Device types whose autocast setting is read."""
ENVIRONMENT, FILTERS = "environment", "warning filters"
"""Keys of two settings. Only ``warnings.catch_warnings()`` replaces the filter list; other code changes the list."""
NUMERIC = ("default dtype", "deterministic algorithms", "matmul precision", "cuDNN")
"""Settings on which results depend, which a save has. Others may be set only for the block in which it is taken."""
CARRIED = ("gradients", "anomaly mode", *NUMERIC)
"""Settings that a new rank takes over besides the directory."""
RANDOM = "random numbers"
"""Word in the keys of states of random number generators."""
DIRECTORY, SAME_DIRECTORY, PATH = "working directory", "unchanged working directory", "sys.path"
"""Keys of what a new rank takes over; the second is only for ranks on the same host."""
OF_A_RANK = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER|TORCHELASTIC|DDIP|SLURM|PMI|OMPI)_\w+|\w+_VISIBLE_DEVICES"
    r"|\w+_SOCKET_IFNAME|(OLD)?PWD|HOSTNAME|TMPDIR|(TORCHINDUCTOR|TRITON)_CACHE_DIR)"
)
"""Environment variables that differ by rank or host; torch sets the last ones when it compiles."""
CUDNN_FLAGS = ("enabled", "benchmark", "deterministic")
CHAINED = 20
"""Limit of exceptions in a chain that are inspected."""
_entered: list[Any] = []
"""Entered torch contexts that stay entered until this process ends, because nothing else changes their setting."""


@dataclass(frozen=True)
class Setting:
    """A process-wide setting, with functions that read, write and describe it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    setters: frozenset[str]
    """Names in the code of functions that change it."""
    describe: Callable[[Any, Any], str]
    """Returns a description of the value after the cell for users; its arguments are the values before and after."""
    restore: Callable[[Any, Any], str]
    """Returns the line that a user types to restore the value before; same arguments."""
    differs_by_rank: bool = False
    """True if different values on different ranks are normal."""


def _call_text(name: str, value: Any) -> str:
    return f"{name}({value!r})"


def _read_autocast() -> tuple[Any, ...]:
    """Return the nesting depth, the cache setting and, for each device, whether autocast is on and its dtype.

    The depth matters because torch empties its cache of cast weights when the outermost ``with`` statement ends.
    """
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    devices = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)
    return nesting, torch.is_autocast_cache_enabled(), *devices


def _write_autocast(value: tuple[Any, ...]) -> None:
    nesting, cached, *devices = value
    while torch.autocast_increment_nesting() <= nesting:
        pass
    while torch.autocast_decrement_nesting() > nesting:
        pass
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    for device, (enabled, dtype) in zip(DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _write_inference(value: bool) -> None:
    _entered.append(torch.inference_mode(value))
    _entered[-1].__enter__()


def _read_modes() -> tuple[Any, list[Any]]:
    """Return the default device and the stack of torch function modes."""
    return torch.utils._device.CURRENT_DEVICE, torch.overrides._get_current_function_mode_stack()


def _write_modes(value: tuple[Any, list[Any]]) -> None:
    for _ in torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    torch.utils._device.CURRENT_DEVICE, modes = value
    for mode in modes:
        torch.overrides._push_mode(mode)


def _restore_modes(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> str:
    device = None if before[0] is None else str(before[0])
    return _call_text("torch.set_default_device", device) if before[0] != after[0] else "torch.overrides._pop_mode()"


def _write_filters(value: list[Any]) -> None:
    warnings.filters = value  # type: ignore[assignment]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _read_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # the directory was removed
        return ""


def _read_environment() -> dict[Any, Any]:
    """Return a copy of the environment as bytes, a hundred times as fast as ``os.environ.copy()``."""
    return dict(os.environ._data)  # type: ignore[attr-defined]


def _write_environment(value: dict[Any, Any]) -> None:
    environment = os.environb
    for name in [name for name in environment if name not in value]:
        del environment[name]
    environment.update({name: text for name, text in value.items() if environment.get(name) != text})


def _changed_names(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    return [os.fsdecode(name) for name, value in before.items() if after.get(name) != value]


def _call_numpy(function: str) -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, function)() if numpy is not None else {}


def _numpy_writer(function: str) -> Callable[[dict[str, Any]], None]:
    return lambda value: getattr(sys.modules["numpy"], function)(**value) if value else None


def _on_or_off(what: str) -> Callable[[Any, Any], str]:
    return lambda before, after: f"{what} {'enabled' if after else 'disabled'}"


def _read_cudnn() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cudnn, name) for name in CUDNN_FLAGS)


def _write_cudnn(value: tuple[bool, ...]) -> None:
    for name, flag in zip(CUDNN_FLAGS, value, strict=True):
        setattr(torch.backends.cudnn, name, flag)


SETTINGS = {
    "gradients": Setting(
        torch.is_grad_enabled,
        torch.set_grad_enabled,
        frozenset({"set_grad_enabled", "_set_grad_enabled"}),
        _on_or_off("gradients"),
        lambda before, _: _call_text("torch.set_grad_enabled", before),
    ),
    "inference mode": Setting(
        torch.is_inference_mode_enabled,
        _write_inference,
        frozenset({"_inference_mode_context"}),
        _on_or_off("inference mode"),
        lambda before, _: f"torch.inference_mode({before}).__enter__()",
    ),
    "autocast": Setting(
        _read_autocast,
        _write_autocast,
        frozenset({"set_autocast_enabled", "autocast_increment_nesting", "autocast_decrement_nesting"}),
        lambda before, after: "autocast entered" if after[0] > before[0] else "autocast changed",
        lambda before, after: (
            "; ".join(
                f"torch.set_autocast_enabled({device!r}, {was[0]}); torch.set_autocast_dtype({device!r}, {was[1]})"
                for device, was, now in zip(DEVICES, before[2:], after[2:], strict=True)
                if was != now
            )
            or f"torch.set_autocast_cache_enabled({before[1]})"
        ),
    ),
    "anomaly mode": Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        frozenset({"set_anomaly_enabled"}),
        lambda before, after: _on_or_off("anomaly detection")(before[0], after[0]),
        lambda before, _: f"torch.set_anomaly_enabled{before}",
    ),
    "default dtype": Setting(
        torch.get_default_dtype,
        torch.set_default_dtype,
        frozenset({"set_default_dtype", "_set_default_dtype"}),
        lambda _, after: f"the default dtype {after}",
        lambda before, _: f"torch.set_default_dtype({before})",
    ),
    "default device": Setting(
        _read_modes,
        _write_modes,
        frozenset({"_pop_mode", "_push_mode", "CURRENT_DEVICE"}),
        lambda before, after: f"the default device {after[0]}" if before[0] != after[0] else "a torch function mode on",
        _restore_modes,
    ),
    "deterministic algorithms": Setting(
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        frozenset({"use_deterministic_algorithms", "_set_deterministic_algorithms", "set_deterministic_debug_mode"}),
        _on_or_off("deterministic algorithms"),
        lambda before, _: _call_text("torch.set_deterministic_debug_mode", before),
    ),
    "matmul precision": Setting(
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        frozenset({"set_float32_matmul_precision"}),
        lambda _, after: f"the float32 matmul precision {after!r}",
        lambda before, _: _call_text("torch.set_float32_matmul_precision", before),
    ),
    "cuDNN": Setting(
        _read_cudnn,
        _write_cudnn,
        frozenset({"set_flags"}),
        lambda _, after: f"cuDNN's flags {after}",
        lambda before, _: "; ".join(
            f"torch.backends.cudnn.{name} = {value}" for name, value in zip(CUDNN_FLAGS, before, strict=True)
        ),
    ),
    "threads": Setting(
        torch.get_num_threads,
        torch.set_num_threads,
        frozenset({"set_num_threads"}),
        lambda _, after: f"{after} threads for torch",
        lambda before, _: _call_text("torch.set_num_threads", before),
        differs_by_rank=True,
    ),
    FILTERS: Setting(
        lambda: warnings.filters,
        _write_filters,
        frozenset({FILTERS}),
        lambda *_: "warnings.catch_warnings() entered",
        lambda *_: "warnings.resetwarnings()",
        differs_by_rank=True,
    ),
    ENVIRONMENT: Setting(
        _read_environment,
        _write_environment,
        frozenset({"environ", "_unpatch_dict"}),
        lambda before, after: f"os.environ changed ({', '.join(_changed_names(before, after))})",
        lambda before, after: "; ".join(
            f"os.environ[{name!r}] = {os.fsdecode(before[os.fsencode(name)])!r}"
            for name in _changed_names(before, after)
        ),
        differs_by_rank=True,
    ),
    DIRECTORY: Setting(
        _read_directory,
        os.chdir,
        frozenset({"chdir"}),
        lambda _, after: f"the working directory {after}",
        lambda before, _: _call_text("os.chdir", before),
        differs_by_rank=True,
    ),
    "numpy's errors": Setting(
        lambda: _call_numpy("geterr"),
        _numpy_writer("seterr"),
        frozenset({"seterr", "_extobj_contextvar"}),
        lambda _, after: f"np.seterr changed ({after})",
        lambda before, _: f"np.seterr(**{before})",
    ),
    "numpy's print options": Setting(
        lambda: _call_numpy("get_printoptions"),
        _numpy_writer("set_printoptions"),
        frozenset({"set_printoptions", "format_options"}),
        lambda *_: "numpy's print options changed",
        lambda before, _: f"np.set_printoptions(**{before})",
    ),
    "decimal's context": Setting(
        lambda: (decimal.getcontext().prec, decimal.getcontext().rounding),
        lambda value: decimal.setcontext(decimal.Context(prec=value[0], rounding=value[1])),
        frozenset({"setcontext"}),
        lambda _, after: f"decimal's context changed {after}",
        lambda before, _: f"decimal.getcontext().prec, decimal.getcontext().rounding = {before}",
    ),
}
if not compat_torch.is_on(compat_torch.DEVICES):
    del SETTINGS["default device"]
_before: dict[str, Any] = {}
"""Settings when the current cell began."""
_start: dict[str, Any] = {}
"""Settings that a new rank takes over, as they were before the first cell."""
own_folders: set[str] = set()
"""Entries of ``sys.path`` that ddip has added."""


def begin_cell() -> None:
    """Read all settings when a cell begins, in 20 to 30 microseconds."""
    _before.clear()
    for name, setting in SETTINGS.items():
        _before[name] = setting.read()


def end_cell(error: BaseException | None) -> list[ChangedSetting]:
    """Restore or report the settings that a cell has changed; `error` is the exception that ended the cell, if any.

    A setting is restored if `error` may have cut off code that would have restored it; the others are returned.
    """
    changed: list[ChangedSetting] = []
    cut_off: set[str] | None = None
    for name, before in _before.items():
        setting = SETTINGS[name]
        after = setting.read()
        if after is before or (after == before and name != FILTERS):
            continue
        if cut_off is None:
            cut_off = _names_in_cut_off_code(error)
        if setting.setters & cut_off:
            setting.write(before)
        elif name != ENVIRONMENT or _changed_names(before, after):
            description, line = setting.describe(before, after), setting.restore(before, after)
            changed.append(ChangedSetting(left=description, restore=line, differs_by_rank=setting.differs_by_rank))
    return changed


def _names_in_cut_off_code(error: BaseException | None) -> set[str]:
    """Return the names in code that `error` may have ended before it could restore settings.

    That is code of libraries and of ``with`` statements in the tracebacks of `error` and its causes. Any error adds
    FILTERS; ``environ`` counts only in ``with`` statements, since most functions only read it.
    """
    names: set[str] = set() if error is None else {FILTERS}
    for link in _error_chain(error):
        for code, in_with in _cut_off_code(link.__traceback__):
            names.update(
                name for name in code.co_names if in_with or name != "environ"
            )  # most functions only read os.environ
    return names


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes: an interrupt may have arrived while another error was propagating."""
    for _ in range(CHAINED):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _cut_off_code(trace: TracebackType | None) -> Iterator[tuple[CodeType, bool]]:
    """Yield code of libraries that the cell has called, and all code called by ``with`` statements.

    The flag is True for the latter.
    """
    in_cell = in_with = False
    while trace is not None:
        code = trace.tb_frame.f_code
        is_library = is_librarys(code.co_filename)
        in_cell |= not is_library
        in_with |= code.co_name in ("__enter__", "__exit__")
        if in_with or (in_cell and is_library):
            yield code, in_with
        trace = trace.tb_next


# -- for a new rank


def note_start() -> None:
    """Record the settings before this rank's first cell."""
    _start.update({name: SETTINGS[name].read() for name in (*CARRIED, "threads", DIRECTORY, ENVIRONMENT)})
    _start[PATH] = list(sys.path)
    _start[RANDOM] = torch.initial_seed()


def note_threads(count: int) -> None:
    """Note the number of torch threads that ddip has set."""
    _start["threads"] = count


def start_settings() -> tuple[int, str]:
    """Return the number of torch threads that ddip has set, and the folder in which this rank has started."""
    return int(_start["threads"]), str(_start[DIRECTORY])


def set_own_variable(name: str, value: str) -> None:
    """Set an environment variable for ddip, which does not count as changed by a cell."""
    os.environ[name] = value
    _start.get(ENVIRONMENT, {})[os.fsencode(name)] = os.fsencode(value)


def find_changed() -> dict[str, bytes]:
    """Return the settings that cells have changed since the rank's start, pickled, so that a new rank can adopt them.

    A key is the name of a torch setting or of the working directory, ``sys.path``, ``$NAME`` of a variable, or has
    `RANDOM` for the state of a generator, changed or not; torch's is only there if a cell has seeded it.
    """
    found: dict[str, Any] = {}
    if directory := _read_directory():
        found[DIRECTORY if directory != _start[DIRECTORY] else SAME_DIRECTORY] = directory
    before, after = _start[ENVIRONMENT], _read_environment()
    for name in [os.fsdecode(name) for name in {**before, **after} if before.get(name) != after.get(name)]:
        if not OF_A_RANK.fullmatch(name):
            found[f"${name}"] = os.environ.get(name)
    path = [entry for entry in sys.path if entry not in own_folders]
    if path != _start[PATH]:
        first = next((index for index, entry in enumerate(path) if entry in _start[PATH]), len(path))
        added = [entry for entry in path[first:] if entry not in _start[PATH]]
        found[PATH] = path[:first], added, [entry for entry in _start[PATH] if entry not in path]
    found |= {name: value for name in CARRIED if (value := SETTINGS[name].read()) != _start[name]}
    found |= _read_generators()
    return {name: pickle.dumps(value) for name, value in found.items()}


def _read_generators() -> dict[str, Any]:
    found: dict[str, Any] = {f"Python's {RANDOM}": random.getstate()}
    if "numpy.random" in sys.modules:
        found[f"NumPy's {RANDOM}"] = sys.modules["numpy.random"].get_state()
    if torch.initial_seed() != _start[RANDOM]:
        found[f"torch's {RANDOM}"] = bytes(torch.get_rng_state().tolist())
        if torch.cuda.is_initialized():
            found[f"CUDA's {RANDOM}"] = bytes(torch.cuda.get_rng_state().tolist())
    return found


def _apply_generator(name: str, state: Any) -> tuple[str, str]:
    try:
        if name.startswith("Python"):
            random.setstate(state)
        elif name.startswith("NumPy"):
            importlib.import_module("numpy.random").set_state(state)
        else:
            library: Any = torch.cuda if name.startswith("CUDA") else torch
            library.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))
    except Exception as error:
        return name, f"{type(error).__name__}: {error}"
    return name, ""


def take_over(changed: dict[str, bytes]) -> list[tuple[str, str]]:
    """Apply the settings that `find_changed` returned on another rank.

    Returns a description of each setting that differed on this rank, with an error or "".
    """
    applied = []
    for name in sorted(changed, key=lambda name: (name in CARRIED, name == PATH, name.startswith("$"))):
        value = pickle.loads(changed[name])
        if name == PATH:
            outcome = PATH if _apply_path(*value) else "", ""
        elif name.startswith("$"):
            outcome = _apply_variable(name[1:], value), ""
        elif RANDOM in name:
            outcome = _apply_generator(name, value)
        else:
            outcome = _apply_setting(SETTINGS[DIRECTORY if name == SAME_DIRECTORY else name], value)
        if outcome[0]:
            applied.append(outcome)
    return applied


def _apply_path(first: list[str], last: list[str], removed: list[str]) -> bool:
    before = list(sys.path)
    kept = [entry for entry in before if entry not in (*first, *last, *removed)]
    sys.path[:] = [*first, *kept, *last]
    return sys.path != before


def _apply_variable(name: str, value: str | None) -> str:
    if os.environ.get(name) == value:
        return ""
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
    return name


def _apply_setting(setting: Setting, value: Any) -> tuple[str, str]:
    before = setting.read()
    if before == value:
        return "", ""
    try:
        setting.write(value)
    except Exception as error:
        return setting.describe(before, value), f"{type(error).__name__}: {error}"
    return setting.describe(before, value), ""
