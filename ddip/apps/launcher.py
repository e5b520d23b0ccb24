"""Make ``notebook_launcher`` in a cell use the ranks instead of starting processes.

Mends, in accelerate 1: in a process of a group it forks again, or refuses because CUDA or an Accelerator is in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import accelerate
from accelerate import launchers, state
from accelerate.utils import patch_environment

from ddip.apps import patches, rank_exchange

CALLED = "\x1b[90mnotebook_launcher: the ranks are running already; {} runs on each\x1b[0m"


@contextlib.contextmanager
def _fresh_accelerate_state() -> Iterator[None]:
    """Reset accelerate's settings, so that the function's first Accelerator chooses them, as in a new process.

    Without a new Accelerator, the former settings are restored.
    """
    shared = [kind._shared_state for kind in (state.AcceleratorState, state.PartialState, state.GradientState)]
    before = [dict(values) for values in shared]
    for values in shared:
        values.clear()
    try:
        yield
    finally:
        for values, former in zip(shared, before, strict=True):
            if not values:
                values.update(former)


def apply_patches() -> None:
    """Make ``notebook_launcher`` call its function in this process."""
    original = launchers.notebook_launcher

    def notebook_launcher(
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        num_processes: int | None = None,
        mixed_precision: str = "no",
        *more_args: Any,
        **settings: Any,
    ) -> None:
        """Call `function` on this rank, as on all others; the group determines the other settings.

        Raises ValueError if `num_processes` is not the number of ranks.
        """
        __tracebackhide__ = True
        if num_processes not in (None, rank_exchange.world_size()):
            actual = f"the group has {rank_exchange.world_size()} ranks"
            raise ValueError(
                f"notebook_launcher(num_processes={num_processes}): {actual}; leave it out, or type "
                f"%makedip -n {num_processes} first"
            )
        print(CALLED.format(getattr(function, "__name__", function)))
        with _fresh_accelerate_state(), patch_environment(ACCELERATE_MIXED_PRECISION=mixed_precision):
            function(*args)

    patches.set_attribute(launchers, "notebook_launcher", notebook_launcher)
    patches.set_attribute(accelerate, "notebook_launcher", notebook_launcher)
    patches.replace_imports("notebook_launcher", original, notebook_launcher)
