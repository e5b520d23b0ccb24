"""``notebook_launcher`` in a cell: the processes that it would start are there.

Mends, in accelerate 1: in a process of a group it forks once more, or refuses since CUDA or an Accelerator is in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import accelerate
from accelerate import launchers, state
from accelerate.utils import patch_environment

from ddip.apps import patches, rank_exchange

CALLED = "\x1b[90mnotebook_launcher: the ranks are there; {} runs on each of them\x1b[0m"


@contextlib.contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """The first Accelerator of a process decides on its settings; those of before are put back if no other is made."""
    shared = [kind._shared_state for kind in (state.AcceleratorState, state.PartialState, state.GradientState)]
    before = [dict(one) for one in shared]
    for one in shared:
        one.clear()
    try:
        yield
    finally:
        for one, values in zip(shared, before, strict=True):
            if not one:
                one.update(values)


def apply() -> None:
    """Have it call the function here."""
    own = launchers.notebook_launcher

    def notebook_launcher(
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        num_processes: int | None = None,
        mixed_precision: str = "no",
        *others: Any,
        **settings: Any,
    ) -> None:
        """Call `function` on this rank, as on all others; the rest of the settings is the group's own.

        Raises ValueError if `num_processes` is not the number of ranks.
        """
        __tracebackhide__ = True
        if num_processes not in (None, rank_exchange.size()):
            there = f"the group has {rank_exchange.size()} ranks"
            raise ValueError(
                f"notebook_launcher(num_processes={num_processes}): {there}; leave it out, or type "
                f"%makedip -n {num_processes} first"
            )
        print(CALLED.format(getattr(function, "__name__", function)))
        with _as_in_a_new_process(), patch_environment(ACCELERATE_MIXED_PRECISION=mixed_precision):
            function(*args)

    patches.patch(launchers, "notebook_launcher", notebook_launcher)
    patches.patch(accelerate, "notebook_launcher", notebook_launcher)
    patches.put_everywhere("notebook_launcher", own, notebook_launcher)
