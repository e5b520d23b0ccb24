"""Make ``lr_find`` leave model and optimizer unchanged.

Mends, in fastai 2.8.12: only rank 0 has the file that ``LRFinder`` saves, and the other ranks wait for it indefinitely;
after an error or an interrupt the model keeps the weights of the search.
"""

from __future__ import annotations

import copy
from typing import Any

from fastai.callback.schedule import LRFinder, ParamScheduler
from fastai.learner import Learner

from ddip.apps import patches


class SavedState:
    """Copy of a learner's model and optimizer states in memory."""

    def __init__(self, learn: Learner) -> None:
        self.model = {name: value.detach().cpu().clone() for name, value in learn.model.state_dict().items()}
        self.opt = copy.deepcopy(learn.opt.state_dict())

    def restore(self, learn: Learner) -> None:
        """Load the saved parameters, buffers and optimizer state into `learn`, on this rank."""
        learn.model.load_state_dict(self.model)
        learn.opt.load_state_dict(self.opt)


def apply_patches() -> None:
    """Patch LRFinder to keep the saved state in memory on each rank."""

    def before_fit(self: LRFinder) -> None:
        ParamScheduler.before_fit(self)
        self.saved = SavedState(self.learn)
        self.best_loss = float("inf")

    def after_fit(self: LRFinder) -> None:
        self.learn.opt.zero_grad()
        undo_search(self, self.learn)

    patches.set_attribute(LRFinder, "before_fit", before_fit)
    patches.set_attribute(LRFinder, "after_fit", after_fit)


def undo_search(callback: Any, learn: Learner) -> None:
    """Undo the search of an LRFinder that has begun one; other callbacks are ignored."""
    saved = vars(callback).pop("saved", None) if isinstance(callback, LRFinder) else None
    if saved is not None:
        saved.restore(learn)
