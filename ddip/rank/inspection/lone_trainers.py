"""Notice that a framework trains on each rank separately, because the group has no app for it.

Without an app, fastai's Learner trains a copy of the model on each rank with all the data. So do the trainers of
Lightning, transformers and accelerate on CPUs, unless the cell asks for several processes.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddip.protocol.reports import Advice
from ddip.rank import user_namespace
from ddip.rank.runtime import current

MAX_NAMES = 1000
"""Number of names at which a cell's end looks, the newest first."""
NOTICE = "\x1b[33mddip: {path}, a {kind}, {what}; {todo}\x1b[0m"
ALONE = "has trained on each rank separately, with all the data"
TODO = "to train together, type %makedip -a {app} and recreate it"

_noticed: set[str] = set()
"""Apps whose absence was reported in this process."""


def _is_lone_learner(learner: Any) -> bool:
    has_trained = bool(getattr(getattr(learner, "recorder", None), "values", ()))
    divides = "fastai.distributed" in sys.modules or isinstance(learner.model, DistributedDataParallel)
    return has_trained and not divides


def _is_lone_trainer(trainer: Any) -> bool:
    return bool(trainer.global_step > 0 and trainer.world_size == 1)


def _is_lone_hf_trainer(trainer: Any) -> bool:
    return bool(trainer.state.global_step > 0 and trainer.args.world_size == 1)


def _is_lone_accelerator(accelerator: Any) -> bool:
    return bool(accelerator.num_processes == 1)


KINDS: tuple[tuple[str, str, str, Callable[[Any], bool]], ...] = (
    ("fastai", "fastai.learner", "Learner", _is_lone_learner),
    ("lightning", "lightning.pytorch.trainer.trainer", "Trainer", _is_lone_trainer),
    ("lightning", "pytorch_lightning.trainer.trainer", "Trainer", _is_lone_trainer),
    ("hf", "transformers.trainer", "Trainer", _is_lone_hf_trainer),
    ("hf", "accelerate.accelerator", "Accelerator", _is_lone_accelerator),
)
"""App, module and class of each kind of trainer, and the function that tells whether one trains alone."""


def find_lone_trainers() -> Iterator[tuple[str, Advice]]:
    """Yield the app that each trainer which has trained alone needs, and what to do."""
    found = [
        (app, getattr(sys.modules[path], name, None), is_alone)
        for app, path, name, is_alone in KINDS
        if path in sys.modules
    ]
    kinds = [(app, kind, is_alone) for app, kind, is_alone in found if kind is not None]
    variables = user_namespace()
    for name in itertools.islice(reversed(list(variables)), MAX_NAMES) if kinds else ():
        for app, kind, is_alone in kinds:
            if kind in type(variables[name]).__mro__:
                with contextlib.suppress(AttributeError):  # of a subclass, or one whose constructor has failed
                    if is_alone(variables[name]):
                        yield app, {"path": name, "what": ALONE, "todo": TODO.format(app=app)}


def report_lone_trainers(error: BaseException | None) -> None:
    """Print a notice about trainers that have trained alone, once for each app.

    Called after each cell without an app. Only the first rank prints, after a cell without an `error` on all ranks.
    """
    modules = sys.modules.keys() & {path for app, path, _, _ in KINDS if app not in _noticed}
    if error is not None or not modules or not current.is_everywhere() or dist.get_rank() or dist.get_world_size() == 1:
        return
    for app, advice in find_lone_trainers():
        if app not in _noticed:
            _noticed.add(app)
            print(NOTICE.format(kind=type(user_namespace()[advice["path"]]).__name__, **advice))
