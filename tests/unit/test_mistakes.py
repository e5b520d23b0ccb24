"""Mistyped magics: the suggested line can be parsed, and keeps the rest of what was typed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddip.errors import BadInput
from ddip.notebook.arguments import parse_line
from ddip.notebook.magics import DipMagics


@pytest.mark.parametrize(
    ("typed", "better"),
    [
        ("4", "-n 4"),
        ("4 -a fastai", "-n 4 -a fastai"),
        ("-N 2", "-n 2"),
        ("-n 2 --restrat", "-n 2 --restart"),
        ("-n 2 -repair", "-n 2 --repair"),
        ("--nproc_per_node 2", "-n 2"),
        ("--nproc-per-node=2 -a fastai", "-n 2 -a fastai"),
        ("-np 2", "-n 2"),
        ("--num_processes 4", "-n 4"),
        ("—n 2", "-n 2"),
        ("–n 2 —repair", "-n 2 --repair"),
        ("-i 1", "-i"),
        ("-k 2", "-k"),
        ("--repair 1", "--repair"),
        ("-r 4", "-r -n 4"),
        ("--sideways 3", ""),
        ("-n 2 --stall-timeuot=5", ""),
        ("-n 2 --sideways", ""),
        ("-n 2 3", ""),
        ("-g 0 1 --sideways", ""),
    ],
)
def test_makedip_suggests_the_intended_line_if_possible(typed: str, better: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_line(DipMagics.makedip, "%makedip", typed)
    message = str(caught.value)
    assert message.startswith(f"%makedip {typed}: ")
    if better:
        assert message == f"%makedip {typed}: type %makedip {better}"
    else:
        assert ": type %makedip" not in message and message.endswith("%makedip? lists the options")


def test_an_option_without_its_value_lists_possible_values() -> None:
    with pytest.raises(BadInput, match="-n: .*Number of ranks"):
        parse_line(DipMagics.makedip, "%makedip", "-n")


def test_a_semicolon_ending_a_line_is_ignored() -> None:
    assert parse_line(DipMagics.makedip, "%makedip", "-n 2;").n == "2"


def test_the_value_after_a_misspelt_option_is_kept() -> None:
    with pytest.raises(BadInput, match="type %%dip --timeout=60 -r 0$"):
        parse_line(DipMagics.dip, "%%dip", "--timout=60 -r 0")


INTERRUPTED = """
import signal, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

class Presses:
    def find_spec(self, name, *_):
        if name == "ddip.group.group":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

config = Config()
config.DipMagics.warm = False
config.HistoryManager.enabled = False
shell = InteractiveShell(config=config)
shell.run_line_magic("load_ext", "ddip")
sys.meta_path.insert(0, Presses())
print(repr(shell.run_cell("%makedip -n 2").error_in_exec))
"""


def test_interrupting_makedip_during_the_import_of_ddip_shows_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    expected = "%makedip was interrupted before it began; nothing has changed"
    assert done.stdout.splitlines()[-1] == f"RequestInterrupted({expected!r})", done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
