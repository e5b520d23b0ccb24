"""Run ``Learner.fit`` on all ranks: divide data, average gradients, and give all ranks the same loss to decide by.

Mends, in fastai 2.8.12: nothing is distributed without ``distrib_ctx``, which fails on the CPU; after an error, a
learner stays wrapped, in autocast, with the loss function of MixUp, and with its table and files open; each rank sees
its own loss, so that callbacks decide differently and ranks wait for each other; only rank 0 keeps its logger.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from fastai.callback import training
from fastai.callback.core import Callback, _inner_loop
from fastai.callback.hook import HookCallback
from fastai.callback.schedule import LRFinder
from fastai.distributed import DistributedTrainer
from fastai.learner import Learner
from fastai.torch_core import find_bs
from fastcore.basics import noop
from fastcore.foundation import L
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddip.apps import patches, rank_exchange
from ddip.apps.fastai import finder, precision
from ddip.apps.fastai.distribution import metrics, rank_loaders
from ddip.apps.fastai.job import Job

_jobs: list[Job] = []
"""The running fit; empty if there is none."""


class TemporaryCallback(Callback):
    """Callback for one call, pickled as a plain Callback so that an exported learner does not need ddip."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Callback, ())


class TrainingCallback(TemporaryCallback):
    """Callback that is active only while the learner trains, and removed afterwards."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, event_name: str) -> None:
        """Run the event's method directly, as fastai would add its own words to an error."""
        if event_name not in _inner_loop or self.learn.training:
            getattr(self, event_name, noop)()


class DdipFirst(TrainingCallback):
    """Steps of the job that run before all other callbacks."""

    order = -1000

    def before_fit(self) -> None:
        if not self.job.begun:  # a callback that runs a validation gets here again
            self.job.begin()

    def before_train(self) -> None:
        self.job.begin_epoch(may_shorten=_may_shorten_batches(self.learn))

    def before_batch(self) -> None:
        self.job.begin_step()

    def after_pred(self) -> None:
        self.job.unwrap()

    def after_loss(self) -> None:
        self.job.count_used()

    def after_backward(self) -> None:
        self.job.end_backward()

    def after_batch(self) -> None:
        """Replace this rank's loss with that of all ranks, for records and decisions."""
        self.job.unwrap()
        self.job.finish_loss_allreduce()
        if self.job.is_filler:
            self.job.saved_metrics = metrics.save_states(self.job.metrics)
        elif any(metrics.needs_batches(metric) for metric in self.job.metrics):
            self.job.record.add(self.learn)

    def after_train(self) -> None:
        self.job.share_buffers()
        if self.job.metrics:
            metrics.merge_states(self.learn, self.job.metrics, self.job.record)

    def after_fit(self) -> None:
        self.job.share_buffers()  # the fit may have been cancelled within an epoch


class DdipLast(TrainingCallback):
    """Steps of the job that run after all other callbacks."""

    order = 1000

    def before_batch(self) -> None:
        self.job.wrap()

    def after_pred(self) -> None:
        if len(self.learn.yb):
            self.job.reductions.determine(self.learn.loss_func, self.learn.pred, self.learn.yb)

    def after_loss(self) -> None:
        self.job.reductions.report_unclear()
        self.job.start_loss_allreduce()

    def before_backward(self) -> None:
        if self.job.weight != 1:
            self.learn.loss_grad = self.job.weighted_loss(self.learn.loss_grad)

    def after_batch(self) -> None:
        """Restore the metrics after a filler batch, which must not count."""
        if self.job.is_filler:
            metrics.restore_states(self.job.metrics, self.job.saved_metrics)

    def after_validate(self) -> None:
        """Use rank 0's log on all ranks, since a callback may have logged a value of its own."""
        recorder = getattr(self.learn, "recorder", None)
        if recorder is not None:
            recorder.log = type(recorder.log)(rank_exchange.broadcast_object(list(recorder.log)))


def is_distributed_by_user(learn: Learner) -> bool:
    """Return whether the user distributes the fit: a wrapped model, or fastai's DistributedTrainer."""
    wrapped = isinstance(learn.model, DistributedDataParallel | DataParallel)
    return wrapped or any(isinstance(callback, DistributedTrainer) for callback in learn.cbs)


def _may_shorten_batches(learn: Learner) -> bool:
    """Return whether a callback from outside fastai may remove items from a batch."""
    methods = [getattr(callback, name, None) for callback in learn.cbs for name in ("before_batch", "after_pred")]
    homes = [getattr(method, "__module__", None) for method in methods if method is not None]
    return any(home is None or not home.startswith(("fastai.", "ddip.apps.")) for home in homes)


@contextlib.contextmanager
def _undo_on_error(learn: Learner, added: list[Any]) -> Iterator[None]:
    """After an error or an interrupt, restore the learner, but not its parameters."""
    names = ("model", "loss_func", "logger", "create_mbar", "dls")
    attributes = {name: vars(learn)[name] for name in names if name in vars(learn)}
    callbacks = list(learn.cbs)
    try:
        yield
    except BaseException:
        for name, value in attributes.items():
            setattr(learn, name, value)
        for callback in [callback for callback in learn.cbs if callback not in callbacks]:
            learn.remove_cb(callback)
        for callback in [*callbacks, *added]:
            _close_callback(callback)
            finder.undo_search(callback, learn)
        learn._end_cleanup()
        raise


def _close_callback(callback: Any) -> None:
    """Close files, bars and hooks of `callback`, as its ``after_fit`` would have done."""
    if not isinstance(callback, Callback):
        return  # a class that fit had not instantiated yet
    callback.run = True
    file = vars(callback).get("file")
    if hasattr(file, "close"):
        file.close()
    if isinstance(callback, HookCallback):
        callback._remove()
    for name in ("mbar", "pbar"):
        vars(callback).pop(name, None)


def apply_patches() -> None:
    """Patch ``Learner.fit`` to train on all ranks."""
    original = Learner.fit

    @functools.wraps(original)
    def fit(self: Learner, n_epoch: int, *args: Any, **kwargs: Any) -> None:
        if not rank_exchange.on_all_ranks() or _jobs or is_distributed_by_user(self):
            with _undo_on_error(self, _added_callbacks(args, kwargs)), precision.autocast_left_on_error(self):
                original(self, n_epoch, *args, **kwargs)
            return
        job = Job(self)
        _jobs.append(job)
        try:
            job_callbacks = [DdipFirst(job), DdipLast(job)]
            with (
                _undo_on_error(self, _added_callbacks(args, kwargs)),
                precision.autocast_left_on_error(self),
                self.added_cbs(job_callbacks),
            ):
                original(self, _epochs_to_run(self, n_epoch, args, kwargs), *args, **kwargs)
        finally:
            _jobs.remove(job)
            job.end()

    patches.set_attribute(Learner, "fit", fit)
    patches.set_attribute(training, "find_bs", _step_items)


def _step_items(batch: Any) -> float:
    """Return the mean number of items per rank in this step, for GradientAccumulation.

    In fastai 2.8.12 it counts the rank's own items, so that ranks would step at different times.
    """
    training_now = bool(_jobs) and bool(_jobs[-1].learn.training)
    return _jobs[-1].items if training_now else find_bs(batch)


def _added_callbacks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the callbacks that a call of fit adds."""
    return list(L(kwargs.get("cbs", args[2] if len(args) > 2 else None)))


def _epochs_to_run(learn: Learner, n_epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of epochs to run.

    ``lr_find`` computes `n_epoch` for the steps of one process. On several ranks an epoch has fewer steps.
    """
    for callback in _added_callbacks(args, kwargs):
        if isinstance(callback, LRFinder):
            steps = rank_loaders.count_training_steps(learn.dls.train, learn)
            return int(callback.num_it) // max(steps, 1) + 1
    return n_epoch
