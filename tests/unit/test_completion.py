"""Tab on the line of a ddip magic."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from ipykernel.ipkernel import IPythonKernel
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from IPython.terminal import ptutils

from ddip.notebook.cell_magics import CellMagics
from ddip.notebook.magics import DipMagics
from ddip.notebook.objects import ObjectMagics
from ddip.notebook.state_magics import TrainingMagics

from .scripted import ScriptedGroup


@pytest.fixture
def magics(shell: InteractiveShell) -> Iterator[DipMagics]:
    """Register ddip's magics, with a group of three ranks."""
    magics = DipMagics(shell)
    shell.register_magics(magics, ObjectMagics(magics), CellMagics(magics), TrainingMagics(magics))
    with ScriptedGroup(3) as magics.group:
        magics.group.push({"frames": 1, "fraction": 2, "model": 3})
        yield magics
    magics.hints.close()


def offered(magics: DipMagics, typed: str) -> list[str]:
    """Return the lines that Tab offers after `typed`."""
    with provisionalcompleter():
        found = list(magics.shell.Completer.completions(typed, len(typed)))
    return [typed[: one.start] + one.text + typed[one.end :] for one in found]


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        ("%dipull fra", ["%dipull frames", "%dipull fraction"]),
        (
            "x = 1\n  a = %dipull model,fra",
            ["x = 1\n  a = %dipull model,frames", "x = 1\n  a = %dipull model,fraction"],
        ),
        ("%dipull frames, fra", ["%dipull frames, fraction"]),
        ("%dipull -r 1 mo", ["%dipull -r 1 model"]),
        ("%dipull model as fra", []),
        ("%dipull model --now --ti", ["%dipull model --now --timeout"]),
        ("%dipull nothing_like_it", []),
        ("%dipush my_", ["%dipush my_data"]),
        ("%makedip --re", ["%makedip --restart", "%makedip --repair"]),
        ("%makedip -a fas", ["%makedip -a fastai"]),
        ("%makedip --app=fas", ["%makedip --app=fastai"]),
        ("%makedip -t ", []),
        (
            "%makedip --repair --from ",
            ["%makedip --repair --from 0", *(f"%makedip --repair --from {r}" for r in (1, 2))],
        ),
        ("%makedip --repair --from 0 mo", ["%makedip --repair --from 0 model"]),
        ("%%dip -S al", ["%%dip -S all"]),
        ("%%dip -r 0,", ["%%dip -r 0,all", "%%dip -r 0,1", "%%dip -r 0,2"]),
        ("%%dip -q ", ["%%dip -q remote", "%%dip -q local", "%%dip -q everywhere"]),
        ("%autodip o", ["%autodip on", "%autodip off"]),
        ('%autodip on -a "-S al', ['%autodip on -a "-S all']),
        ("%dipcells ", ["%dipcells -a", "%dipcells --all"]),
        ("%dipsync --from 1 fra", ["%dipsync --from 1 frames", "%dipsync --from 1 fraction"]),
        ("%dipper ", []),
    ],
)
def test_tab_offers_what_the_magic_accepts(magics: DipMagics, typed: str, lines: list[str]) -> None:
    magics.shell.user_ns.update(my_data=1, _my_hidden=2)
    assert offered(magics, typed) == lines


def test_tab_offers_paths(magics: DipMagics, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    assert offered(magics, f"%%dip --log {tmp_path}/l") == [f"%%dip --log {tmp_path}/log/"]


def test_tab_offers_no_ranks_without_a_group(magics: DipMagics) -> None:
    assert magics.group is not None
    magics.group.shutdown()
    assert offered(magics, "%dipull fra") == offered(magics, "%%dip -r 1") == []


def test_ipython_completes_other_lines(magics: DipMagics) -> None:
    assert "%dipull" in offered(magics, "%dipul")
    assert offered(magics, "%%dip local\nmagi_no_such") == []
    assert "isinstance" in offered(magics, "isinst")


def test_front_ends_complete_by_the_method_that_ddip_replaces() -> None:
    for caller in (IPythonKernel._experimental_do_complete, ptutils.IPythonPTCompleter):
        assert ".completions(" in inspect.getsource(caller)
