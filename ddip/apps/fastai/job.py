"""One fit, on all ranks: what they begin with, whose batch is whose, and the mean of their gradients."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
import torch.distributed as dist
from fastai.learner import Learner
from fastai.torch_core import item_find, to_detach, to_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddip.apps import rank_exchange
from ddip.apps.fastai.distribution import metrics, plan, randomness, rank_loaders
from ddip.apps.fastai.distribution.reduction import Reductions
from ddip.rank.objects import wrappers
from ddip.rank.objects.checksum import checksum

NO_SYNC: dict[str, Any] = (
    {"init_sync": False} if "init_sync" in inspect.signature(DistributedDataParallel).parameters else {}
)
"""The models are the same already; before torch 2.5 the wrapper cannot be told so."""
_used: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Of the parameters of a model that have been trained, by name: has every rank been seen to use it?"""


class Job:
    """One fit of one learner."""

    def __init__(self, learn: Learner) -> None:
        self.learn = learn
        self.seeds = randomness.Seeds(0, 0, 0)
        self.common: randomness.State | None = None
        self.plan = plan.Plan((), (), ())
        self.epochs = 0
        self.model: nn.Module | None = None
        """The learner's own, while its place is taken by the wrapper."""
        self.seen = metrics.Seen()
        """Of the training set."""
        self.kept: list[dict[str, Any]] = []
        """States of the metrics before a batch that is none."""
        self.reductions = Reductions()
        self._may_drop = False
        self._whole = 0.0
        """This batch's size when it came, where callbacks may make it shorter."""
        self._used: tuple[float, float] | None = None
        """Items of this step, where they were counted: this rank's, all ranks'."""
        self._wrapper: nn.Module | None = None
        self._wrapped: tuple[bool, ...] = ()
        """Which parameters were trainable then."""
        self._probing = False
        self._loss: torch.Tensor | None = None
        self._work: Any = None

    # -- beginning: the same everywhere

    @property
    def begun(self) -> bool:
        """Have the ranks agreed?"""
        return self.common is not None

    def begin(self) -> None:
        """Have every rank begin with the same; raises ValueError on all of them if their data differ."""
        learn = self.learn
        learn.model.to(getattr(learn.dls, "device", None))
        if not rank_loaders.is_divisible(learn.dls.train):
            raise TypeError(NOT_DIVISIBLE.format(kind=type(learn.dls.train).__name__))
        self.seeds = randomness.Seeds.draw()
        common = randomness.State.now()
        told = {
            "data": rank_loaders.looks(learn.dls.train),
            "epochs": learn.n_epoch,
            "model": rank_exchange.fingerprint(checksum(rank_exchange.parameters_and_buffers(learn.model))),
            "optimizer": _print_of_optimizer(learn),
            "seeds": self.seeds,
        }
        everyone = rank_exchange.gather_objects(told)
        _require_same(everyone)
        self.seeds = everyone[0]["seeds"]
        if len({one["model"] for one in everyone}) > 1:
            rank_exchange.broadcast_tensors(rank_exchange.parameters_and_buffers(learn.model))
        if len({one["optimizer"] for one in everyone}) > 1:
            _share_optimizer(learn)
        self.common = common
        self.seeds.seed_all(more=1 + rank_exchange.rank())

    def begin_epoch(self, *, may_drop: bool) -> None:
        """Take this rank's part of the training data, as one seed shuffles it for all.

        `may_drop`: items are counted in each step, since a callback may take some out of a batch.
        """
        self.epochs += 1
        self._may_drop = any(rank_exchange.gather_numbers(may_drop))
        self.seen = metrics.Seen()
        seed = (self.seeds.python + self.epochs) % 2**62
        self.learn.dl, self.plan = rank_loaders.of_training(self.learn.dl, self.learn, seed)

    @property
    def metrics(self) -> list[Any]:
        """Those of the training set."""
        recorder = getattr(self.learn, "recorder", None)
        return [] if recorder is None else list(recorder._train_mets[1:])

    # -- a step

    @property
    def step(self) -> int:
        """Number of the current batch in its epoch, from 0."""
        return int(self.learn.iter)

    @property
    def weight(self) -> float:
        """Of this rank's loss: the mean over the ranks of what they have so weighted is that of one process."""
        weight = self.plan.weights[self.step]
        if self.reductions.of(self.learn.loss_func) == "sum":
            return float(rank_exchange.world_size()) if weight else 0.0
        if self._used is not None and self._used[1]:
            return self._used[0] * rank_exchange.world_size() / self._used[1]
        return weight

    @property
    def is_filler(self) -> bool:
        """Is this batch there only because other ranks have one?"""
        return self.plan.weights[self.step] == 0

    @property
    def items(self) -> float:
        """Of this step, as a mean over the ranks."""
        return self.plan.items[self.step] if self._used is None else self._used[1] / rank_exchange.world_size()

    def begin_step(self) -> None:
        """A batch has come."""
        self._used = None
        if self._may_drop:
            self._whole = _size(self.learn)

    def count_used(self) -> None:
        """What the ranks have used of their batches, where callbacks may have taken items out."""
        if self._may_drop:
            planned = self.plan.weights[self.step] * self.plan.items[self.step]
            mine = planned * _size(self.learn) / self._whole if self._whole else 0.0
            self._used = mine, rank_exchange.sum_number(mine)

    def weighted_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` as it counts; one that does not count is 0, also where it is the mean of nothing."""
        return torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0 if self.weight == 0 else loss * self.weight

    def start_loss_allreduce(self) -> None:
        """Begin to make one loss of all; the backward pass goes on meanwhile."""
        self._loss = self.weighted_loss(self.learn.loss.detach().float().mean()) / rank_exchange.world_size()
        self._work = dist.all_reduce(self._loss, async_op=True)

    def finish_loss_allreduce(self) -> None:
        """Have every rank record it."""
        if self._work is not None:
            self._work.wait()
            self.learn.loss, self._work = self._loss, None

    def wrap(self) -> None:
        """Put the wrapper that averages gradients where fastai calls the model."""
        model = self.learn.model
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
        if trained != self._wrapped:  # a callback may freeze and unfreeze, as that of GANs does
            self._drop()
            self._wrapped = trained
        if self._wrapper is None:
            self._wrapper = self._wrapper_of(model)
        if self._wrapper is not model:
            self.model, self.learn.model = model, self._wrapper

    def unwrap(self) -> None:
        """Give the learner its model back."""
        if self.model is not None:
            self.learn.model, self.model = self.model, None

    def _wrapper_of(self, model: nn.Module) -> nn.Module:
        trainable = _trainable(model)
        used = _used.get(model, {})
        self._probing = not trainable.keys() <= used.keys()
        if self._probing:  # until it is known which parameters are used, gradients are averaged by hand
            for parameter in trainable.values():
                parameter.grad = None
        if self._probing or not trainable:
            return model
        device = next(model.parameters()).device
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=not all(used[name] for name in trainable),
            **NO_SYNC,
        )

    def end_backward(self) -> None:
        """After a model's first backward it is known whether every parameter is used: always to look takes time."""
        if not self._probing:
            return
        self._probing = False
        trainable = _trainable(self.learn.model)
        theirs = rank_exchange.gather_objects([parameter.grad is not None for parameter in trainable.values()])
        used = dict(zip(trainable, zip(*theirs, strict=True), strict=True))
        for name, parameter in trainable.items():
            if any(used[name]):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                rank_exchange.average_tensor(parameter.grad)
        known = _used.setdefault(self.learn.model, {})
        known.update({name: all(by_rank) for name, by_rank in used.items()})
        self._wrapper = None

    def _drop(self) -> None:
        if self._wrapper is not None and self._wrapper is not self.learn.model:
            wrappers.drop(self._wrapper)
        self._wrapper = None

    # -- the end

    def share_buffers(self) -> None:
        """What a model counts by itself (batch norm) is rank 0's, as in any step."""
        rank_exchange.broadcast_tensors(list(self.learn.model.buffers()))

    def end(self) -> None:
        """However it ended."""
        self.unwrap()
        self._drop()
        if self.common is not None:
            self.common.restore()


def _size(learn: Learner) -> float:
    """How many items the batch has, if that can be told."""
    first = item_find(learn.yb if len(learn.yb) else learn.xb)
    return float(first.shape[0]) if getattr(first, "ndim", 0) else 1.0


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


NOT_DIVISIBLE = (
    "the training data cannot be divided among the ranks: their {kind} has no length, or cannot be indexed. Give it a "
    "dataset with __len__ and __getitem__; ddip divides it"
)
DIFFERENT = (
    "the ranks do not train on the same: {what} {differ}. Make the DataLoaders and call fit in cells on all ranks, "
    "with the same data on each; ddip divides them"
)


def _require_same(everyone: list[dict[str, Any]]) -> None:
    rows = [{**one["data"], "epochs": one["epochs"]} for one in everyone]
    for what in rows[0]:
        values = [row[what] for row in rows]
        if len(set(values)) > 1:
            if what == "sample":
                raise ValueError(DIFFERENT.format(what="their items", differ="differ, though not in number"))
            differ = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(DIFFERENT.format(what=f"{what}:", differ=differ))


def _print_of_optimizer(learn: Learner) -> int:
    tensors: list[torch.Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return "tensor"
        if isinstance(value, dict):
            return [(str(key), plain(item)) for key, item in value.items()]
        if isinstance(value, str | int | float | bool | None):
            return value
        return [plain(item) for item in value] if hasattr(value, "__iter__") else repr(value)

    state = plain(learn.opt.state_dict())
    trained = [parameter.requires_grad for parameter in learn.model.parameters()]
    return rank_exchange.fingerprint((state, trained, getattr(learn.opt, "frozen_idx", 0), checksum(tensors)))


def _share_optimizer(learn: Learner) -> None:
    trained = [parameter.requires_grad for parameter in learn.model.parameters()]
    state = to_detach(learn.opt.state_dict(), cpu=True, gather=False)  # another rank has another GPU
    state, trained, frozen = rank_exchange.broadcast_object((state, trained, getattr(learn.opt, "frozen_idx", 0)))
    learn.opt.load_state_dict(state)
    for parameter, known in getattr(learn.opt, "state", {}).items():
        known.update(to_device(dict(known), parameter.device))
    learn.opt.frozen_idx = frozen
    for parameter, requires_grad in zip(learn.model.parameters(), trained, strict=True):
        parameter.requires_grad_(requires_grad)
