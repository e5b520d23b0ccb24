"""``lr_find``, which leaves model and optimizer as they were.

Mends, in fastai 2.8.12: only rank 0 has the file that ``LRFinder`` saves, and the others wait for it for ever; after an
error or an interrupt the model keeps what the search has made of it.
"""

from __future__ import annotations

import copy
from typing import Any

from fastai.callback.schedule import LRFinder, ParamScheduler
from fastai.learner import Learner

from ddip.apps import patches


class Saved:
    """A learner's model and optimizer, in memory, on the CPU."""

    def __init__(self, learn: Learner) -> None:
        self.model = {name: value.detach().cpu().clone() for name, value in learn.model.state_dict().items()}
        self.opt = copy.deepcopy(learn.opt.state_dict())

    def restore(self, learn: Learner) -> None:
        """Put them back."""
        learn.model.load_state_dict(self.model)
        learn.opt.load_state_dict(self.opt)


def apply() -> None:
    """Keep the state in memory on each rank."""

    def before_fit(self: LRFinder) -> None:
        ParamScheduler.before_fit(self)
        self.saved = Saved(self.learn)
        self.best_loss = float("inf")

    def after_fit(self: LRFinder) -> None:
        self.learn.opt.zero_grad()
        restore(self, self.learn)

    patches.patch(LRFinder, "before_fit", before_fit)
    patches.patch(LRFinder, "after_fit", after_fit)


def restore(callback: Any, learn: Learner) -> None:
    """Undo a search, if `callback` has begun one."""
    saved = vars(callback).pop("saved", None) if isinstance(callback, LRFinder) else None
    if saved is not None:
        saved.restore(learn)
