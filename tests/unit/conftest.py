"""Groups of scripted engines."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddip.group import group as group_module
from ddip.group import status, stopping
from ddip.group.cells import cell_state, cells, running
from ddip.group.members import members, ranks, watch
from ddip.group.process_group import fitness, process_group

from .scripted import Script, ScriptedGroup, do_nothing

NewGroup = Callable[..., ScriptedGroup]


@pytest.fixture(autouse=True)
def no_shell() -> Iterator[None]:
    """Remove the IPython shell that a display creates: later groups would use its profile."""
    yield
    InteractiveShell.clear_instance()


@pytest.fixture(scope="module")
def ipython_of_the_module() -> Iterator[InteractiveShell]:
    """Create an IPython shell without history."""
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    yield shell
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()


@pytest.fixture
def shell(ipython_of_the_module: InteractiveShell) -> Iterator[InteractiveShell]:
    """Return the module's shell, reset for each test because a new one takes a while to create."""
    shell = ipython_of_the_module
    magics = {kind: set(named) for kind, named in shell.magics_manager.magics.items()}
    callbacks = {event: list(called) for event, called in shell.events.callbacks.items()}
    transformers = list(shell.input_transformers_cleanup)
    yield shell
    for kind, named in shell.magics_manager.magics.items():
        for name in set(named) - magics[kind]:  # former magics may have been loaded since
            del named[name]
    shell.events.callbacks.update(callbacks)
    shell.input_transformers_cleanup[:] = transformers
    vars(shell.Completer).pop("completions", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)  # would collect all garbage of the process in each test
        shell.reset(new_session=False)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all waits: scripted engines do at once whatever they do."""
    for module, name, seconds in [
        (cell_state, "PATIENCE_SECONDS", 0.02),
        (cell_state, "STOP_GRACE_SECONDS", 0.01),
        (cell_state, "ASK_SECONDS", 0.02),
        (cell_state, "LOOK_SECONDS", 0.005),
        (cell_state, "IDLE_SECONDS", 0.005),
        (cell_state, "ENDING_SECONDS", 0.005),
        (cells, "LOOK_SECONDS", 0.005),
        (running, "STILL_SECONDS", 0.03),
        (cells, "ASLEEP_SECONDS", 0.0),
        (members, "ANSWER_SECONDS", 0.01),
        (ranks, "GRACE_SECONDS", 0.01),
        (ranks, "REQUEST_GRACE_SECONDS", 0.01),
        (stopping, "LOOK_SECONDS", 0.005),
        (fitness, "TRY_SECONDS", 0.05),
        (status, "ANSWER_SECONDS", 0.01),
        (group_module, "STACK_SECONDS", 0.01),
        (process_group, "TELL_SECONDS", 0.01),
        (watch, "PULSE_SECONDS", 0.005),
        (process_group, "ADOPT_SECONDS", 0.01),
    ]:
        assert isinstance(getattr(module, name), float)
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up immediately on ranks that do not stop."""
    monkeypatch.setattr(cell_state, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "STOP_SECONDS", 0.02)


@pytest.fixture
def new_group(short_waits: None) -> Iterator[NewGroup]:
    """Yield a function that creates scripted groups with a failure grace of 0.01 s."""
    groups: list[ScriptedGroup] = []

    def make_group(n: int | None = 2, script: Script = do_nothing, **options: Any) -> ScriptedGroup:
        groups.append(ScriptedGroup(n, script, **{"failure_grace": 0.01, **options}))
        return groups[-1]

    yield make_group
    for group in groups:
        group.shutdown()
