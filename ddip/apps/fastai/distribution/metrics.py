"""Compute metrics over the batches of all ranks: the values of one process, the same on every rank.

Mends, in fastai 2.8.12: a metric is the mean over ranks of its values per batch, padding included, and one with its own
state (``Dice``, ``CorpusBLEUMetric``) covers the batches of one rank only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from fastai import metrics as fastai_metrics
from fastai.learner import AvgLoss, AvgMetric, Learner, Metric
from fastai.torch_core import to_detach

from ddip.apps import rank_exchange
from ddip.apps.fastai.distribution import plan

SUMS = (
    (AvgMetric.accumulate, ("total", "count")),
    (AvgLoss.accumulate, ("total", "count")),
    (fastai_metrics.LossMetric.accumulate, ("total", "count")),
    (fastai_metrics.Dice.accumulate, ("inter", "union")),
    (fastai_metrics.DiceMulti.accumulate, ("inter", "union")),
    (fastai_metrics.CorpusBLEUMetric.accumulate, ("pred_len", "targ_len", "corrects", "counts")),
)
"""Metrics whose state is a sum over batches: the method that adds to it, and the attributes."""
LISTS = ((fastai_metrics.AccumMetric.accumulate, ("preds", "targs")),)
"""Metrics whose state is a list with one item per batch: the method and the attributes."""


def _attributes_in(metric: Metric, table: Sequence[tuple[Any, tuple[str, ...]]]) -> tuple[str, ...]:
    return next((names for method, names in table if type(metric).accumulate is method), ())


def needs_batches(metric: Metric) -> bool:
    """Return whether `metric` is unknown to ddip, so that it must see every batch in turn."""
    return (
        not _attributes_in(metric, SUMS)
        and not _attributes_in(metric, LISTS)
        and type(metric).accumulate is not Metric.accumulate
    )


class BatchRecord:
    """Batches of this rank, to replay all ranks' batches to unknown metrics at the end of the epoch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def add(self, learn: Learner) -> None:
        """Record the current batch of this rank, on the CPU."""
        names = ("xb", "yb", "pred", "loss")
        self.batches.append({name: to_detach(getattr(learn, name), cpu=True, gather=False) for name in names})

    def replay(self, learn: Learner, metric: Metric, batches: list[dict[str, Any]]) -> None:
        """Reset `metric` and have it accumulate `batches` one by one, as it would in a single process."""
        metric.reset()
        before = {name: getattr(learn, name, None) for name in ("xb", "yb", "pred", "loss", "iter")}
        try:
            for number, batch in enumerate(batches):
                for name, value in batch.items():
                    setattr(learn, name, learn._set_device(value) if name in ("xb", "yb") else value)
                learn.pred = learn._set_device(batch["pred"])
                learn.iter = number
                metric.accumulate(learn)
        finally:
            for name, value in before.items():
                setattr(learn, name, value)


def merge_states(learn: Learner, metrics: Sequence[Metric], record: BatchRecord) -> None:
    """Give each metric on each rank the state accumulated over the batches of all ranks. A collective.

    `record`: predictions and targets of this rank's batches. A metric for which `needs_batches` is true accumulates the
    gathered batches again, since its state cannot be added up.
    """
    states = [{name: vars(metric).get(name) for name in _state_attributes(metric)} for metric in metrics]
    replayed = [metric for metric in metrics if needs_batches(metric)]
    all_ranks = rank_exchange.gather_objects((states, record.batches if replayed else []))
    for number, metric in enumerate(metrics):
        rank_states = [states[number] for states, _ in all_ranks]
        for name in _attributes_in(metric, SUMS):
            setattr(metric, name, _add_up([state[name] for state in rank_states]))
        for name in _attributes_in(metric, LISTS):
            setattr(metric, name, plan.in_order([state[name] for state in rank_states]))
    batches = plan.in_order([batches for _, batches in all_ranks])
    for metric in replayed:
        record.replay(learn, metric, batches)


def _state_attributes(metric: Metric) -> tuple[str, ...]:
    return _attributes_in(metric, SUMS) or _attributes_in(metric, LISTS)


def _add_up(values: list[Any]) -> Any:
    """Add up numbers, or lists or dictionaries of numbers item by item."""
    if isinstance(values[0], dict):
        keys = list(dict.fromkeys(key for value in values for key in value))
        return {key: sum(value.get(key, 0) for value in values) for key in keys}
    if isinstance(values[0], list):
        return [sum(items) for items in zip(*values, strict=True)]
    return sum(values)


def save_states(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return the current states of `metrics`, for `restore_states`."""
    return [{name: _copy_mutable(value) for name, value in vars(metric).items()} for metric in metrics]


def restore_states(metrics: Sequence[Metric], states: list[dict[str, Any]]) -> None:
    """Set `metrics` to states from `save_states`."""
    for metric, state in zip(metrics, states, strict=True):
        vars(metric).update(state)


def _copy_mutable(value: Any) -> Any:
    """Return a copy of a value that metrics change in place; other values unchanged."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict) else value
