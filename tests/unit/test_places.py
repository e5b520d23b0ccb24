"""Places of ranks, in words."""

from __future__ import annotations

from types import CodeType
from typing import Any

from ddip.output.tables.tables import places_text, stacks_text
from ddip.protocol.dump import place_in
from ddip.protocol.location import Stack, StackLocation
from ddip.rank.runtime import stacks, stores

WAITS = StackLocation("all_reduce", 12, 4, "dist.all_reduce(x)", "distributed_c10d.py:3 in all_reduce")
DUMP = """Current thread 0x01 (most recent call first):
  File "/lib/old.py", line 1 in old

Current thread 0x01 (most recent call first):
  File "/lib/torch/linear.py", line 125 in forward
  File "/tmp/ipykernel_7/123.py", line 3 in deep
  File "/tmp/ipykernel_7/123.py", line 4 in <module>
"""


def test_equal_ranks_share_a_line() -> None:
    places = {0: StackLocation(state="idle"), 1: WAITS, 2: WAITS, 3: StackLocation(state="ended"), 4: None}
    assert places_text(places).splitlines() == [
        "  rank 0: idle",
        "  ranks 1, 2: all_reduce, cell [12] line 4: dist.all_reduce(x)",
        "  rank 3: ended",
        "  rank 4: no answer",
    ]


def test_a_place_outside_cells_is_a_line_of_a_file() -> None:
    assert str(StackLocation("fit", inner="train.py:88 in fit")) == "train.py:88 in fit"
    assert str(StackLocation()) == "awaiting something"


def test_the_place_of_a_rank_omits_polling_of_the_store() -> None:
    """A rank sampled at that moment was reported as "rank 1: lexists", the others in ``new_group``."""

    def frame_entry(name: str, file: str) -> tuple[CodeType, int]:
        scope: dict[str, Any] = {}
        exec(compile(f"def {name}(): ...", file, "exec"), scope)
        return scope[name].__code__, 1

    stack = [
        frame_entry("lexists", "genericpath.py"),
        frame_entry("_has_keys", stores.__file__),
        frame_entry("new_group", "distributed_c10d.py"),
    ]
    assert stacks._locate_lines(stack).function == "new_group"
    assert stacks._locate_lines(stack[2:]).function == "new_group"


def test_equal_stacks_are_shown_once() -> None:
    stack = Stack(WAITS, {"main": "  cell [12], line 4", "Thread-1": "  x"})
    shown = stacks_text({0: stack, 1: stack, 2: None})
    assert shown == "ranks 0, 1\n  main:\n    cell [12], line 4\n  Thread-1:\n    x\nrank 2\n  no answer"


def test_the_last_stack_that_was_written_down_counts() -> None:
    assert str(place_in(DUMP)) == "forward, line 3 of the cell, and it does not answer: C code may hold the interpreter"
    assert (
        str(place_in("Current thread 0x01\n  <no Python frame>\n"))
        == "somewhere, and it does not answer: C code may hold the interpreter"
    )
