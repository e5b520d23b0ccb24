"""Divide ``validate``, ``get_preds`` and the validation of each epoch: one rank per batch, results on all ranks.

Mends, in fastai 2.8.12: ``get_preds`` returns a permutation, ``validate`` counts padding, and outside ``distrib_ctx``
both gather from ranks that may not run the cell (``maybe_gather``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastai import torch_core
from fastai.callback.core import FetchPredsCallback, GatherPredsCallback
from fastai.learner import Learner

from ddip.apps import patches, rank_exchange
from ddip.apps.fastai import precision
from ddip.apps.fastai.distribution import metrics, plan, randomness, rank_loaders
from ddip.apps.fastai.fit import TemporaryCallback, TrainingCallback
from ddip.rank.objects.checksum import tensor_checksums

GATHERED = ("inputs", "preds", "targets", "losses")
"""Attributes of GatherPredsCallback that are lists with one item per batch."""


class DdipMerge(TemporaryCallback):
    """Callback that merges metrics and predictions of all ranks before any other callback reads them."""

    order = -1000

    def __init__(self, shard: Any) -> None:
        self.shard = shard
        self.record = metrics.BatchRecord()

    def _is_own_loader(self) -> bool:
        """Return whether the current loader is this evaluation's, not that of an evaluation within it."""
        return self.learn.dl is self.shard

    def after_batch(self) -> None:
        if self._is_own_loader() and any(metrics.needs_batches(metric) for metric in self._metrics()):
            self.record.add(self.learn)

    def after_validate(self) -> None:
        if not self._is_own_loader():
            return
        metrics.merge_states(self.learn, self._metrics(), self.record)
        for callback in self.learn.cbs:
            if isinstance(callback, GatherPredsCallback):
                _gather_predictions(callback)

    def _metrics(self) -> list[Any]:
        recorder = getattr(self.learn, "recorder", None)
        return [] if recorder is None else list(recorder._valid_mets)


def _gather_predictions(callback: GatherPredsCallback) -> None:
    mine = {name: value for name in GATHERED if isinstance(value := vars(callback).get(name), list)}
    everyone = rank_exchange.gather_objects(mine)
    for name in mine:
        setattr(callback, name, plan.in_order([theirs[name] for theirs in everyone]))


def _agreed_seed(learn: Learner, dl: Any) -> int | None:
    """Return a common seed for the order of `dl`, or None if each rank must process all batches.

    A collective if all ranks run the cell.
    """
    if (
        not rank_exchange.on_all_ranks()
        or not rank_loaders.is_divisible(dl)
        or rank_loaders.carries_state(dl, learn)
        or _saves_batches(learn)
    ):
        return None
    training = any(isinstance(callback, TrainingCallback) for callback in learn.cbs)
    model = () if training else tensor_checksums(rank_exchange.parameters_and_buffers(learn.model))
    seed = randomness.Seeds.draw().python
    proposals = rank_exchange.gather_objects(
        (rank_loaders.summarize_data(dl), rank_exchange.fingerprint_value(model), seed)
    )
    if any(proposal[:2] != proposals[0][:2] for proposal in proposals):
        return None  # each rank has its own data or model
    return int(proposals[0][2])


def _saves_batches(learn: Learner) -> bool:
    """Return whether each batch is saved to a file named by its number; then each rank processes all."""
    gatherers = [callback for callback in learn.cbs if isinstance(callback, GatherPredsCallback)]
    return any(callback.save_preds is not None or callback.save_targs is not None for callback in gatherers)


def _run_single_process(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `method` in single-process mode, as ranks may call it alone.

    Examples are ``predict`` on one item, and a logger that only works on rank 0.
    """
    with rank_exchange.single_process_mode():
        return method(*args, **kwargs)


def _validate_divided(validate: Callable[..., None], self: Learner, ds_idx: int = 1, dl: Any = None) -> None:
    if dl is None:
        dl = self.dls[ds_idx]
    with precision.autocast_left_on_error(self):
        seed = _agreed_seed(self, dl)
        if seed is None:
            validate(self, ds_idx, dl)
            return
        shard = rank_loaders.evaluation_shard(dl, seed)
        with randomness.preserved_rng(), self.added_cbs([DdipMerge(shard)]):
            validate(self, ds_idx, shard)


def _class_and_subclasses(kind: type) -> list[type]:
    subclasses: list[type] = kind.__subclasses__()
    return [kind, *(below for subclass in subclasses for below in _class_and_subclasses(subclass))]


def apply_patches() -> None:
    """Patch fastai to divide evaluations among the ranks."""
    patches.wrap_function(Learner, "_do_epoch_validate", _validate_divided)
    for kind in _class_and_subclasses(Learner):
        if "predict" in vars(kind):
            patches.wrap_function(kind, "predict", _run_single_process)
    patches.wrap_function(FetchPredsCallback, "after_validate", _run_single_process)
    patches.set_attribute(torch_core, "maybe_gather", lambda x, axis=0: x)
