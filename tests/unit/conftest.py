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

from .scripted import Script, ScriptedGroup, nothing

NewGroup = Callable[..., ScriptedGroup]


@pytest.fixture(autouse=True)
def no_shell() -> Iterator[None]:
    """What is displayed where there is no shell makes IPython have one, whose profile later groups would take."""
    yield
    InteractiveShell.clear_instance()


@pytest.fixture(scope="module")
def ipython_of_the_module() -> Iterator[InteractiveShell]:
    """An IPython without history."""
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    yield shell
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()


@pytest.fixture
def shell(ipython_of_the_module: InteractiveShell) -> Iterator[InteractiveShell]:
    """The same one for each test, as if it were new: it takes a while to make."""
    shell = ipython_of_the_module
    magics = {kind: set(named) for kind, named in shell.magics_manager.magics.items()}
    callbacks = {event: list(called) for event, called in shell.events.callbacks.items()}
    transformers = list(shell.input_transformers_cleanup)
    yield shell
    for kind, named in shell.magics_manager.magics.items():
        for name in set(named) - magics[kind]:  # those that were there may have been loaded meanwhile
            del named[name]
    shell.events.callbacks.update(callbacks)
    shell.input_transformers_cleanup[:] = transformers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)  # of all that the process has, once a test
        shell.reset(new_session=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for that does not come: what scripted engines do, they do at once."""
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
        (ranks, "STOP_GRACE_SECONDS", 0.01),
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
    """Ranks that do not stop are given up at once."""
    monkeypatch.setattr(cell_state, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "STOP_SECONDS", 0.02)


@pytest.fixture
def new_group(quick: None) -> Iterator[NewGroup]:
    """Makes groups of scripted engines, of which a failed cell waits a hundredth of a second for the others."""
    made: list[ScriptedGroup] = []

    def make(n: int | None = 2, script: Script = nothing, **options: Any) -> ScriptedGroup:
        made.append(ScriptedGroup(n, script, **{"failure_grace": 0.01, **options}))
        return made[-1]

    yield make
    for group in made:
        group.shutdown()
