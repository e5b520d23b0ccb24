"""``Learner.fit`` on all ranks: the data divided, the gradients averaged, every loss and every decision the same.

Mends, in fastai 2.8.12: nothing is distributed without ``distrib_ctx``, which fails on the CPU; a learner stays wrapped
after an error, in autocast, with the loss function of MixUp, and its table and files open; each rank sees its own loss,
so that callbacks decide differently and strand each other; ranks but the first lose their logger.
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
from ddip.apps.fastai.distribution import metrics
from ddip.apps.fastai.job import Job
from ddip.apps.fastai.passing import Passing

_jobs: list[Job] = []
"""The fit under way, if one is."""


class OfDdip(Passing):
    """Works while the learner trains; gone when it has."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, event_name: str) -> None:
        """As fastai's, which puts words of its own before those of an error."""
        if event_name not in _inner_loop or self.learn.training:
            getattr(self, event_name, noop)()


class DdipFirst(OfDdip):
    """Before all other callbacks."""

    order = -1000

    def before_fit(self) -> None:
        if not self.job.begun:  # a callback that validates comes here, too
            self.job.begin()

    def before_train(self) -> None:
        self.job.begin_epoch(may_drop=_may_drop(self.learn))

    def before_batch(self) -> None:
        self.job.begin_step()

    def after_pred(self) -> None:
        self.job.unwrap()

    def after_loss(self) -> None:
        self.job.count_used()

    def after_backward(self) -> None:
        self.job.end_backward()

    def after_batch(self) -> None:
        """Every rank records the loss of all, and decides by it."""
        self.job.unwrap()
        self.job.finish_loss_allreduce()
        if self.job.is_filler:
            self.job.kept = metrics.before(self.job.metrics)
        elif any(metrics.needs_batches(metric) for metric in self.job.metrics):
            self.job.seen.add(self.learn)

    def after_train(self) -> None:
        self.job.share_buffers()
        if self.job.metrics:
            metrics.merge(self.learn, self.job.metrics, self.job.seen)

    def after_fit(self) -> None:
        self.job.share_buffers()  # where the fit was cancelled in the middle of an epoch


class DdipLast(OfDdip):
    """After all others."""

    order = 1000

    def before_batch(self) -> None:
        self.job.wrap()

    def after_pred(self) -> None:
        if len(self.learn.yb):
            self.job.reductions.find_out(self.learn.loss_func, self.learn.pred, self.learn.yb)

    def after_loss(self) -> None:
        self.job.reductions.say()
        self.job.start_loss_allreduce()

    def before_backward(self) -> None:
        if self.job.weight != 1:
            self.learn.loss_grad = self.job.weighted_loss(self.learn.loss_grad)

    def after_batch(self) -> None:
        """A batch that fills up the last step is no batch for a metric."""
        if self.job.is_filler:
            metrics.back(self.job.metrics, self.job.kept)

    def after_validate(self) -> None:
        """What the recorder has written down may be a callback's own: rank 0's counts."""
        recorder = getattr(self.learn, "recorder", None)
        if recorder is not None:
            recorder.log = type(recorder.log)(rank_exchange.broadcast_object(list(recorder.log)))


def is_distributed_by_user(learn: Learner) -> bool:
    """Has the user wrapped the model, or added fastai's own callback? Then nothing is done twice."""
    wrapped = isinstance(learn.model, DistributedDataParallel | DataParallel)
    return wrapped or any(isinstance(callback, DistributedTrainer) for callback in learn.cbs)


def _may_drop(learn: Learner) -> bool:
    """Is there a callback that is not fastai's and may make a batch shorter?"""
    methods = [getattr(callback, name, None) for callback in learn.cbs for name in ("before_batch", "after_pred")]
    homes = [getattr(method, "__module__", None) for method in methods if method is not None]
    return any(home is None or not home.startswith(("fastai.", "ddip.apps.")) for home in homes)


@contextlib.contextmanager
def _tidy(learn: Learner, added: list[Any]) -> Iterator[None]:
    """An error or an interrupt leaves the learner as it was before, but for what it has learned."""
    names = ("model", "loss_func", "logger", "create_mbar", "dls")
    kept = {name: vars(learn)[name] for name in names if name in vars(learn)}
    callbacks = list(learn.cbs)
    try:
        yield
    except BaseException:
        for name, value in kept.items():
            setattr(learn, name, value)
        for callback in [callback for callback in learn.cbs if callback not in callbacks]:
            learn.remove_cb(callback)
        for callback in [*callbacks, *added]:
            _close(callback)
            finder.restore(callback, learn)
        learn._end_cleanup()
        raise


def _close(callback: Any) -> None:
    """End what `callback` would have ended."""
    if not isinstance(callback, Callback):
        return  # a class, of which fit had not made a callback yet
    callback.run = True
    file = vars(callback).get("file")
    if hasattr(file, "close"):
        file.close()
    if isinstance(callback, HookCallback):
        callback._remove()
    for name in ("mbar", "pbar"):
        vars(callback).pop(name, None)


def apply() -> None:
    """Train on all ranks."""
    plain = Learner.fit

    @functools.wraps(plain)
    def fit(self: Learner, n_epoch: int, *args: Any, **kwargs: Any) -> None:
        if not rank_exchange.on_all_ranks() or _jobs or is_distributed_by_user(self):
            with _tidy(self, _added(args, kwargs)), precision.ended(self):
                plain(self, n_epoch, *args, **kwargs)
            return
        job = Job(self)
        _jobs.append(job)
        try:
            ours = [DdipFirst(job), DdipLast(job)]
            with _tidy(self, _added(args, kwargs)), precision.ended(self), self.added_cbs(ours):
                plain(self, _epochs(self, n_epoch, args, kwargs), *args, **kwargs)
        finally:
            _jobs.remove(job)
            job.end()

    patches.patch(Learner, "fit", fit)
    patches.patch(training, "find_bs", _items_of_step)


def _items_of_step(batch: Any) -> float:
    """For GradientAccumulation, which in fastai 2.8.12 counts a rank's own items: ranks step at different times."""
    training_now = bool(_jobs) and bool(_jobs[-1].learn.training)
    return _jobs[-1].items if training_now else find_bs(batch)


def _added(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The callbacks that a call of fit adds."""
    return list(L(kwargs.get("cbs", args[2] if len(args) > 2 else None)))


def _epochs(learn: Learner, n_epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """``lr_find`` asks for as many epochs as one process would need for its steps; an epoch has fewer steps here."""
    for callback in _added(args, kwargs):
        if isinstance(callback, LRFinder):
            steps = -(-len(learn.dls.train) // rank_exchange.world_size())
            return int(callback.num_it) // max(steps, 1) + 1
    return n_epoch
