"""Notice that a framework trains on each rank separately, because the group has no app for it.

Without an app, fastai's Learner trains a copy of the model on each rank with all the data. So do the trainers of
Lightning, transformers and accelerate on CPUs, unless the cell asks for several processes.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddip.protocol.reports import Advice
from ddip.rank import user_namespace
from ddip.rank.runtime import current

MAX_NAMES = 1000
"""Number of names at which a cell's end looks, the newest first."""
NOTICE = "\x1b[33mddip: {path} ({kind}) {what}; {todo}\x1b[0m"
ALONE = "trains on each rank separately, with all the data"
TODO = "to train together, type %makedip -a {app} and recreate it"

_noticed: set[str] = set()
"""Apps whose absence was reported in this process."""
_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Steps that each trainer had taken alone when the last cell ended."""
has_app = False
"""True while an app is prepared on this rank."""


def _lone_steps_of_learner(learner: Any) -> int:
    divides = "fastai.distributed" in sys.modules or isinstance(learner.model, DistributedDataParallel)
    return 0 if divides else len(getattr(getattr(learner, "recorder", None), "values", ()))


def _lone_steps_of_trainer(trainer: Any) -> int:
    return int(trainer.global_step) if trainer.world_size == 1 else 0


def _lone_steps_of_hf_trainer(trainer: Any) -> int:
    steps = int(trainer.state.global_step)
    return steps if steps and trainer.args.world_size == 1 else 0


def _lone_steps_of_accelerator(accelerator: Any) -> int:
    return int(accelerator.num_processes == 1)  # it counts none


KINDS: tuple[tuple[str, str, str, Callable[[Any], int]], ...] = (
    ("fastai", "fastai.learner", "Learner", _lone_steps_of_learner),
    ("lightning", "lightning.pytorch.trainer.trainer", "Trainer", _lone_steps_of_trainer),
    ("lightning", "pytorch_lightning.trainer.trainer", "Trainer", _lone_steps_of_trainer),
    ("hf", "transformers.trainer", "Trainer", _lone_steps_of_hf_trainer),
    ("hf", "accelerate.accelerator", "Accelerator", _lone_steps_of_accelerator),
)
"""App, module and class of each kind of trainer, and the function that returns how far one has trained alone."""


def find_lone_trainers() -> Iterator[tuple[str, Any, int, Advice]]:
    """Yield each trainer that has trained alone, as (app that it needs, trainer, steps, what to do)."""
    found = [
        (app, getattr(sys.modules[path], name, None), steps) for app, path, name, steps in KINDS if path in sys.modules
    ]
    kinds = [(app, kind, steps_of) for app, kind, steps_of in found if kind is not None and not has_app]
    variables = user_namespace()
    for name in itertools.islice(reversed(list(variables)), MAX_NAMES) if kinds else ():
        value = variables[name]
        for app, kind, steps_of in kinds:
            if kind in type(value).__mro__:
                with contextlib.suppress(AttributeError):  # of a subclass, or one whose constructor has failed
                    if steps := steps_of(value):
                        yield app, value, steps, {"path": name, "what": ALONE, "todo": TODO.format(app=app)}


def report_lone_trainers(error: BaseException | None) -> None:
    """Print a notice about trainers that have trained alone in this cell, once for each app.

    Called after each cell without an app. Only the first rank prints, after a cell without an `error` on all ranks.
    """
    if not sys.modules.keys() & {path for app, path, _, _ in KINDS if app not in _noticed}:
        return
    is_common = error is None and current.is_everywhere() and dist.get_world_size() > 1 and dist.get_rank() == 0
    for app, trainer, steps, advice in find_lone_trainers():
        try:
            has_trained = steps > _steps.get(trainer, 0)
            _steps[trainer] = steps
        except TypeError:  # a subclass that cannot be hashed
            continue
        if has_trained and is_common and app not in _noticed:
            _noticed.add(app)
            print(NOTICE.format(kind=type(trainer).__name__, **advice))
