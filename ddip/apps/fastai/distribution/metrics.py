"""Metrics over the batches of all ranks, equal to those of one process, and the same on every rank.

Mends, in fastai 2.8.12: a metric is the mean over the ranks of each batch's, padding included, and one that keeps a
state of its own (``Dice``, ``CorpusBLEUMetric``) knows one rank's batches only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from fastai import metrics as known
from fastai.learner import AvgLoss, AvgMetric, Learner, Metric
from fastai.torch_core import to_detach

from ddip.apps import rank_exchange
from ddip.apps.fastai.distribution import plan

SUMS = (
    (AvgMetric.accumulate, ("total", "count")),
    (AvgLoss.accumulate, ("total", "count")),
    (known.LossMetric.accumulate, ("total", "count")),
    (known.Dice.accumulate, ("inter", "union")),
    (known.DiceMulti.accumulate, ("inter", "union")),
    (known.CorpusBLEUMetric.accumulate, ("pred_len", "targ_len", "corrects", "counts")),
)
"""Metrics whose state is a sum over batches, by the method that adds to it."""
LISTS = ((known.AccumMetric.accumulate, ("preds", "targs")),)
"""Those that keep a list with an item for each batch."""


def _names(metric: Metric, table: Sequence[tuple[Any, tuple[str, ...]]]) -> tuple[str, ...]:
    return next((names for method, names in table if type(metric).accumulate is method), ())


def needs_batches(metric: Metric) -> bool:
    """Is it one of the user's, of which nothing is known but that it wants to see every batch in turn?"""
    return not _names(metric, SUMS) and not _names(metric, LISTS) and type(metric).accumulate is not Metric.accumulate


class Seen:
    """What a user's own metrics are shown again: each batch, when all ranks are through."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def add(self, learn: Learner) -> None:
        """One more batch of this rank."""
        names = ("xb", "yb", "pred", "loss")
        self.batches.append({name: to_detach(getattr(learn, name), cpu=True, gather=False) for name in names})

    def show(self, learn: Learner, metric: Metric, batches: list[dict[str, Any]]) -> None:
        """Have `metric` accumulate `batches`, as it would have in one process."""
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


def merge(learn: Learner, metrics: Sequence[Metric], seen: Seen) -> None:
    """Give each of `metrics` what the ranks have accumulated together; a collective."""
    states = [{name: vars(metric).get(name) for name in _state_names(metric)} for metric in metrics]
    replayed = [metric for metric in metrics if needs_batches(metric)]
    everyone = rank_exchange.gather_objects((states, seen.batches if replayed else []))
    for number, metric in enumerate(metrics):
        theirs = [states[number] for states, _ in everyone]
        for name in _names(metric, SUMS):
            setattr(metric, name, _sum([state[name] for state in theirs]))
        for name in _names(metric, LISTS):
            setattr(metric, name, plan.in_order([state[name] for state in theirs]))
    batches = plan.in_order([batches for _, batches in everyone])
    for metric in replayed:
        seen.show(learn, metric, batches)


def _state_names(metric: Metric) -> tuple[str, ...]:
    return _names(metric, SUMS) or _names(metric, LISTS)


def _sum(values: list[Any]) -> Any:
    """Of numbers, or of each item of lists and dictionaries of numbers."""
    if isinstance(values[0], dict):
        keys = list(dict.fromkeys(key for value in values for key in value))
        return {key: sum(value.get(key, 0) for value in values) for key in keys}
    if isinstance(values[0], list):
        return [sum(items) for items in zip(*values, strict=True)]
    return sum(values)


def before(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """The states of `metrics` now, for ``back``."""
    return [{name: _apart(value) for name, value in vars(metric).items()} for metric in metrics]


def back(metrics: Sequence[Metric], states: list[dict[str, Any]]) -> None:
    """Put `metrics` back to what they were."""
    for metric, state in zip(metrics, states, strict=True):
        vars(metric).update(state)


def _apart(value: Any) -> Any:
    """A copy of what is added to in its place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict) else value
