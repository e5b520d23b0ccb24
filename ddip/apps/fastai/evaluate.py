"""``validate``, ``get_preds``, and the validation of each epoch: every batch on one rank, the results on all.

Mends, in fastai 2.8.12: ``get_preds`` returns a permutation, ``validate`` counts padding, and outside ``distrib_ctx``
each gathers from ranks that may not be there (``maybe_gather``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fastai import torch_core
from fastai.callback.core import FetchPredsCallback, GatherPredsCallback
from fastai.learner import Learner

from ddip.apps import patches, rank_exchange
from ddip.apps.fastai import precision
from ddip.apps.fastai.distribution import metrics, plan, randomness, rank_loaders
from ddip.apps.fastai.fit import OfDdip
from ddip.apps.fastai.passing import Passing
from ddip.rank.objects.checksum import checksum

GATHERED = ("inputs", "preds", "targets", "losses")
"""Of GatherPredsCallback: lists with an item for each batch."""


class DdipMerge(Passing):
    """Puts together what the ranks have made of their batches, before anything else looks at it."""

    order = -1000

    def __init__(self, shard: Any) -> None:
        self.shard = shard
        self.seen = metrics.Seen()

    def _is_meant(self) -> bool:
        """Is it this evaluation, and not another one within it?"""
        return self.learn.dl is self.shard

    def after_batch(self) -> None:
        if self._is_meant() and any(metrics.needs_batches(metric) for metric in self._metrics()):
            self.seen.add(self.learn)

    def after_validate(self) -> None:
        if not self._is_meant():
            return
        metrics.merge(self.learn, self._metrics(), self.seen)
        for callback in self.learn.cbs:
            if isinstance(callback, GatherPredsCallback):
                _gather(callback)

    def _metrics(self) -> list[Any]:
        recorder = getattr(self.learn, "recorder", None)
        return [] if recorder is None else list(recorder._valid_mets)


def _gather(callback: GatherPredsCallback) -> None:
    mine = {name: value for name in GATHERED if isinstance(value := vars(callback).get(name), list)}
    everyone = rank_exchange.gather_objects(mine)
    for name in mine:
        setattr(callback, name, plan.in_order([theirs[name] for theirs in everyone]))


def _agreed_seed(learn: Learner, dl: Any) -> int | None:
    """A seed for the order of `dl`; None if each rank has to make all of its batches."""
    if (
        not rank_exchange.on_all_ranks()
        or not rank_loaders.is_divisible(dl)
        or rank_loaders.carries_state(dl, learn)
        or _saves_batches(learn)
    ):
        return None
    training = any(isinstance(callback, OfDdip) for callback in learn.cbs)
    model = () if training else checksum(rank_exchange.parameters_and_buffers(learn.model))
    seed = randomness.Seeds.draw().python
    told = rank_exchange.gather_objects((rank_loaders.looks(dl), rank_exchange.fingerprint(model), seed))
    same = all(one[:2] == told[0][:2] for one in told)  # each works with data, or a model, of its own otherwise
    return told[0][2] if same else None


def _saves_batches(learn: Learner) -> bool:
    """Is each batch written to a file, named by its number? Then each rank makes all of them."""
    gatherers = [callback for callback in learn.cbs if isinstance(callback, GatherPredsCallback)]
    return any(one.save_preds is not None or one.save_targs is not None for one in gatherers)


def _by_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of one item, or of a logger that works on rank 0 only: a rank may well be alone in asking for it."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rank_exchange.single_process_mode():
            return method(self, *args, **kwargs)

    return run


def _kinds_of(kind: type) -> list[type]:
    subclasses: list[type] = kind.__subclasses__()
    return [kind, *(below for subclass in subclasses for below in _kinds_of(subclass))]


def apply() -> None:
    """Divide evaluations among the ranks."""
    whole = Learner._do_epoch_validate

    @functools.wraps(whole)
    def divided(self: Learner, ds_idx: int = 1, dl: Any = None) -> None:
        if dl is None:
            dl = self.dls[ds_idx]
        with precision.ended(self):
            seed = _agreed_seed(self, dl)
            if seed is None:
                whole(self, ds_idx, dl)
                return
            shard = rank_loaders.of_evaluation(dl, seed)
            with randomness.kept(), self.added_cbs([DdipMerge(shard)]):
                whole(self, ds_idx, shard)

    patches.patch(Learner, "_do_epoch_validate", divided)
    for kind in _kinds_of(Learner):
        if "predict" in vars(kind):
            patches.patch(kind, "predict", _by_itself(vars(kind)["predict"]))
    patches.patch(FetchPredsCallback, "after_validate", _by_itself(FetchPredsCallback.after_validate))
    patches.patch(torch_core, "maybe_gather", lambda x, axis=0: x)
