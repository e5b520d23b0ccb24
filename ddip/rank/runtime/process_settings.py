"""Settings of the whole process that a cell may leave changed: gradients off, autocast on, another default dtype.

Code that changes such a setting for a while (``torch.no_grad()``, ``optimizer.step``) changes it back when it ends. An
exception within the few instructions that change it back leaves it changed for all cells to come. An interrupt waits
for such code (``libraries.py``), but not for long, and a fault does not wait at all.

Each setting is read when a cell begins and when it has ended. If they differ, one rule decides:

    the traceback shows that the code which should have changed it back was cut off     ddip puts it back
    else the cell has set it, on purpose or by mistake                                  it stays, and is reported

That code is recognized by its frames in the traceback: a function of a library, or what a ``with`` statement calls,
which names one of the functions that change the setting. A user who types ``torch.set_grad_enabled(False)`` in a cell
that fails later keeps that; the notebook prints the line that restores it. The notebook prints nothing after a cell
that went well, unless the cell has left its ranks with different values.

A new rank (after a repair, or in a larger group) gets those of `CARRIED`, the variables of ``os.environ`` and the
entries of ``sys.path`` that cells have changed on the ranks that were there before.

What is not in the table: signal handlers and trace functions (``aside.py``), ``sys.stdout`` and ``sys.stderr``
(``mending.py``), generators, and names that are new in ``os.environ``, which imports add.
"""

from __future__ import annotations

import decimal
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch

from ddip.protocol import compat_torch
from ddip.protocol.reports import SettingLeft
from ddip.rank.runtime.libraries import is_librarys

DEVICES = ("cpu", "cuda")
"""Those for which autocast is looked at."""
ENVIRONMENT, FILTERS = "environment", "warning filters"
"""The list of filters is another one exactly within ``warnings.catch_warnings()``; all other code changes the list."""
CARRIED = ("gradients", "anomaly mode", "default dtype", "deterministic algorithms", "matmul precision", "cuDNN")
"""Settings that a new rank takes over, beside its directory: results depend on them."""
DIRECTORY, SAME_DIRECTORY, PATH = "working directory", "unchanged working directory", "sys.path"
"""The second is for ranks on the same host only."""
OF_A_RANK = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER|TORCHELASTIC|DDIP|SLURM|PMI|OMPI)_\w+|\w+_VISIBLE_DEVICES"
    r"|\w+_SOCKET_IFNAME|(OLD)?PWD|HOSTNAME|TMPDIR|(TORCHINDUCTOR|TRITON)_CACHE_DIR)"
)
"""Variables that differ by rank or host; torch sets the last ones when it compiles."""
CUDNN_FLAGS = ("enabled", "benchmark", "deterministic")
CHAINED = 20
"""Exceptions that are looked at, of a chain."""
_entered: list[Any] = []
"""Contexts of torch that are entered until this process ends: there is no other way to change what they change."""


@dataclass(frozen=True)
class Setting:
    """One setting: how it is read and changed, and who changes it."""

    read: Callable[[], Any]
    put: Callable[[Any], object]
    setters: frozenset[str]
    """Names in the code of functions that change it."""
    left: Callable[[Any, Any], str]
    """How a user would call the value after the cell; its arguments are that of before, and that of after."""
    restore: Callable[[Any, Any], str]
    """What a user types to have the former one again; the same arguments."""
    differs_by_rank: bool = False
    """May ranks have different values without anybody asking why?"""


def _call(name: str, value: Any) -> str:
    return f"{name}({value!r})"


def _autocast() -> tuple[Any, ...]:
    """Also how many ``with`` statements are within each other: torch empties its cache of cast weights at the last."""
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    devices = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES)
    return nesting, torch.is_autocast_cache_enabled(), *devices


def _put_autocast(value: tuple[Any, ...]) -> None:
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


def _put_inference(value: bool) -> None:
    _entered.append(torch.inference_mode(value))
    _entered[-1].__enter__()


def _modes() -> tuple[Any, list[Any]]:
    """What ``with torch.device(...)``, ``torch.set_default_device`` and modes of ``torch.overrides`` have entered."""
    return torch.utils._device.CURRENT_DEVICE, torch.overrides._get_current_function_mode_stack()


def _put_modes(value: tuple[Any, list[Any]]) -> None:
    for _ in torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    torch.utils._device.CURRENT_DEVICE, modes = value
    for mode in modes:
        torch.overrides._push_mode(mode)


def _restore_modes(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> str:
    device = None if before[0] is None else str(before[0])
    return _call("torch.set_default_device", device) if before[0] != after[0] else "torch.overrides._pop_mode()"


def _put_filters(value: list[Any]) -> None:
    warnings.filters = value  # type: ignore[assignment]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # somebody has removed it
        return ""


def _environment() -> dict[Any, Any]:
    """``os.environ.copy()`` takes a hundred times as long."""
    return dict(os.environ._data)  # type: ignore[attr-defined]


def _put_environment(value: dict[Any, Any]) -> None:
    now = os.environb
    for name in [name for name in now if name not in value]:
        del now[name]
    now.update({name: text for name, text in value.items() if now.get(name) != text})


def _changed_names(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    return [os.fsdecode(name) for name, value in before.items() if after.get(name) != value]


def _numpy(function: str) -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, function)() if numpy is not None else {}


def _put_numpy(function: str) -> Callable[[dict[str, Any]], None]:
    return lambda value: getattr(sys.modules["numpy"], function)(**value) if value else None


def _onoff(what: str) -> Callable[[Any, Any], str]:
    return lambda before, after: f"{what} {'enabled' if after else 'disabled'}"


def _cudnn() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cudnn, name) for name in CUDNN_FLAGS)


def _put_cudnn(value: tuple[bool, ...]) -> None:
    for name, flag in zip(CUDNN_FLAGS, value, strict=True):
        setattr(torch.backends.cudnn, name, flag)


SETTINGS = {
    "gradients": Setting(
        torch.is_grad_enabled,
        torch.set_grad_enabled,
        frozenset({"set_grad_enabled", "_set_grad_enabled"}),
        _onoff("gradients"),
        lambda before, _: _call("torch.set_grad_enabled", before),
    ),
    "inference mode": Setting(
        torch.is_inference_mode_enabled,
        _put_inference,
        frozenset({"_inference_mode_context"}),
        _onoff("inference mode"),
        lambda before, _: f"torch.inference_mode({before}).__enter__()",
    ),
    "autocast": Setting(
        _autocast,
        _put_autocast,
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
        lambda before, after: _onoff("anomaly detection")(before[0], after[0]),
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
        _modes,
        _put_modes,
        frozenset({"_pop_mode", "_push_mode", "CURRENT_DEVICE"}),
        lambda before, after: f"the default device {after[0]}" if before[0] != after[0] else "a torch function mode on",
        _restore_modes,
    ),
    "deterministic algorithms": Setting(
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        frozenset({"use_deterministic_algorithms", "_set_deterministic_algorithms", "set_deterministic_debug_mode"}),
        _onoff("deterministic algorithms"),
        lambda before, _: _call("torch.set_deterministic_debug_mode", before),
    ),
    "matmul precision": Setting(
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        frozenset({"set_float32_matmul_precision"}),
        lambda _, after: f"the float32 matmul precision {after!r}",
        lambda before, _: _call("torch.set_float32_matmul_precision", before),
    ),
    "cuDNN": Setting(
        _cudnn,
        _put_cudnn,
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
        lambda before, _: _call("torch.set_num_threads", before),
        differs_by_rank=True,
    ),
    FILTERS: Setting(
        lambda: warnings.filters,
        _put_filters,
        frozenset({FILTERS}),
        lambda *_: "warnings.catch_warnings() entered",
        lambda *_: "warnings.resetwarnings()",
        differs_by_rank=True,
    ),
    ENVIRONMENT: Setting(
        _environment,
        _put_environment,
        frozenset({"environ", "_unpatch_dict"}),
        lambda before, after: f"os.environ changed ({', '.join(_changed_names(before, after))})",
        lambda before, after: "; ".join(
            f"os.environ[{name!r}] = {os.fsdecode(before[os.fsencode(name)])!r}"
            for name in _changed_names(before, after)
        ),
        differs_by_rank=True,
    ),
    DIRECTORY: Setting(
        _directory,
        os.chdir,
        frozenset({"chdir"}),
        lambda _, after: f"the working directory {after}",
        lambda before, _: _call("os.chdir", before),
        differs_by_rank=True,
    ),
    "numpy's errors": Setting(
        lambda: _numpy("geterr"),
        _put_numpy("seterr"),
        frozenset({"seterr", "_extobj_contextvar"}),
        lambda _, after: f"np.seterr changed ({after})",
        lambda before, _: f"np.seterr(**{before})",
    ),
    "numpy's print options": Setting(
        lambda: _numpy("get_printoptions"),
        _put_numpy("set_printoptions"),
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
_start: dict[str, Any] = {}
"""The settings that a new rank takes over, as they were before the first cell."""
own_folders: set[str] = set()
"""Entries of ``sys.path`` that are ddip's."""


def begin_cell() -> None:
    """A cell begins; takes 20 to 30 microseconds."""
    _before.clear()
    for name, setting in SETTINGS.items():
        _before[name] = setting.read()


def end_cell(error: BaseException | None) -> list[SettingLeft]:
    """The cell has ended, perhaps with `error`: put back what was cut off; returns what else has another value now."""
    left: list[SettingLeft] = []
    cut_off: set[str] | None = None
    for name, before in _before.items():
        setting = SETTINGS[name]
        after = setting.read()
        if after is before or (after == before and name != FILTERS):
            continue
        if cut_off is None:
            cut_off = _names_cut_off(error)
        if setting.setters & cut_off:
            setting.put(before)
        elif name != ENVIRONMENT or _changed_names(before, after):
            told = setting.left(before, after), setting.restore(before, after), setting.differs_by_rank
            left.append(SettingLeft(left=told[0], restore=told[1], differs_by_rank=told[2]))
    return left


def _names_cut_off(error: BaseException | None) -> set[str]:
    """Names in the code of all functions that should have changed something back, and that `error` has ended."""
    names: set[str] = set() if error is None else {FILTERS}
    for one in _chain(error):
        for code, in_with in _cut_off(one.__traceback__):
            names.update(name for name in code.co_names if in_with or name != "environ")  # many only read that
    return names


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, and what it came of: an interrupt may have come while another error was on its way."""
    for _ in range(CHAINED):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _cut_off(trace: TracebackType | None) -> Iterator[tuple[CodeType, bool]]:
    """Code of libraries that the cell has called, and of all that ``with`` statements have; the latter is marked."""
    in_cell = in_with = False
    while trace is not None:
        code = trace.tb_frame.f_code
        of_library = is_librarys(code.co_filename)
        in_cell |= not of_library
        in_with |= code.co_name in ("__enter__", "__exit__")
        if in_with or (in_cell and of_library):
            yield code, in_with
        trace = trace.tb_next


# -- for a new rank


def note_start() -> None:
    """This rank is about to run its first cell: note what it has before."""
    _start.update({name: SETTINGS[name].read() for name in (*CARRIED, DIRECTORY, ENVIRONMENT)})
    _start[PATH] = list(sys.path)


def find_changed() -> dict[str, bytes]:
    """Return what cells have changed of the settings that a new rank takes over, pickled; ``$`` begins variables."""
    found: dict[str, Any] = {}
    if directory := _directory():
        found[DIRECTORY if directory != _start[DIRECTORY] else SAME_DIRECTORY] = directory
    before, now = _start[ENVIRONMENT], _environment()
    for name in [os.fsdecode(name) for name in {**before, **now} if before.get(name) != now.get(name)]:
        if not OF_A_RANK.fullmatch(name):
            found[f"${name}"] = os.environ.get(name)
    path = [entry for entry in sys.path if entry not in own_folders]
    if path != _start[PATH]:
        first = next((place for place, entry in enumerate(path) if entry in _start[PATH]), len(path))
        added = [entry for entry in path[first:] if entry not in _start[PATH]]
        found[PATH] = path[:first], added, [entry for entry in _start[PATH] if entry not in path]
    found |= {name: now for name in CARRIED if (now := SETTINGS[name].read()) != _start[name]}
    return {name: pickle.dumps(value) for name, value in found.items()}


def take_over(changed: dict[str, bytes]) -> list[tuple[str, str]]:
    """Set what another rank has found changed; return what differed here, each with an error or ``""``."""
    told = []
    for name in sorted(changed, key=lambda name: (name in CARRIED, name == PATH, name.startswith("$"))):
        value = pickle.loads(changed[name])
        if name == PATH:
            done = PATH if _take_path(*value) else "", ""
        elif name.startswith("$"):
            done = _take_variable(name[1:], value), ""
        else:
            done = _take_setting(SETTINGS[DIRECTORY if name == SAME_DIRECTORY else name], value)
        if done[0]:
            told.append(done)
    return told


def _take_path(first: list[str], last: list[str], removed: list[str]) -> bool:
    before = list(sys.path)
    kept = [entry for entry in before if entry not in (*first, *last, *removed)]
    sys.path[:] = [*first, *kept, *last]
    return sys.path != before


def _take_variable(name: str, value: str | None) -> str:
    if os.environ.get(name) == value:
        return ""
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
    return name


def _take_setting(setting: Setting, value: Any) -> tuple[str, str]:
    before = setting.read()
    if before == value:
        return "", ""
    try:
        setting.put(value)
    except Exception as error:
        return setting.left(before, value), f"{type(error).__name__}: {error}"
    return setting.left(before, value), ""
