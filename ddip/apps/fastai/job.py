"""Run one fit on all ranks: align their state, divide the batches, and average losses and gradients."""

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
from ddip.rank.objects.checksum import tensor_checksums
from ddip.sharded import contents

NO_SYNC: dict[str, Any] = (
    {"init_sync": False} if "init_sync" in inspect.signature(DistributedDataParallel).parameters else {}
)
"""Arguments that make DDP skip its initial synchronization, as the models are equal; torch before 2.5 has none."""
_used: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Parameters that have been trained, by model and name; True if every rank has been seen to use the parameter."""


class Job:
    """One fit of one learner, distributed over all ranks."""

    def __init__(self, learn: Learner) -> None:
        self.learn = learn
        self.seeds = randomness.Seeds(0, 0, 0)
        self.common: dict[str, Any] | None = None
        """The states of the random generators that all ranks had before the fit; None until it begins."""
        self.plan = plan.Plan((), (), ())
        self.epochs = 0
        self.model: nn.Module | None = None
        """The learner's own model while the wrapper replaces it; otherwise None."""
        self.record = metrics.BatchRecord()
        """Batches of the training set, for metrics that need them."""
        self.saved_metrics: list[dict[str, Any]] = []
        """States of the metrics before a filler batch."""
        self.reductions = Reductions()
        self._may_shorten = False
        self._full_size = 0.0
        """Size of the batch before callbacks could shorten it; items."""
        self._used: tuple[float, float] | None = None
        """Items used in this step by this rank and by all ranks, if they were counted."""
        self._wrapper: nn.Module | None = None
        self._wrapped_trainable: tuple[bool, ...] = ()
        """``requires_grad`` of each parameter when the wrapper was made."""
        self._probing = False
        self._loss: torch.Tensor | None = None
        self._work: Any = None

    # -- start with equal state on all ranks

    @property
    def begun(self) -> bool:
        """True after `begin`, that is, once the ranks have the same state."""
        return self.common is not None

    def begin(self) -> None:
        """Give rank 0's model, optimizer and seeds to all ranks, then seed each differently. A collective.

        `end` restores the common random state. Raises TypeError if the data cannot be divided, and ValueError on all
        ranks if they have different data.
        """
        learn = self.learn
        learn.model.to(getattr(learn.dls, "device", None))
        if not rank_loaders.is_divisible(learn.dls.train):
            raise TypeError(NOT_DIVISIBLE.format(kind=type(learn.dls.train).__name__))
        self.seeds = randomness.Seeds.draw()
        common = contents.process_generators()
        facts = {
            "data": rank_loaders.summarize_data(learn.dls.train),
            "epochs": learn.n_epoch,
            "model": rank_exchange.fingerprint_value(
                tensor_checksums(rank_exchange.parameters_and_buffers(learn.model))
            ),
            "optimizer": _optimizer_fingerprint(learn),
            "seeds": self.seeds,
        }
        all_facts = rank_exchange.gather_objects(facts)
        _require_same(all_facts)
        self.seeds = all_facts[0]["seeds"]
        if len({rank_facts["model"] for rank_facts in all_facts}) > 1:
            rank_exchange.broadcast_tensors(rank_exchange.parameters_and_buffers(learn.model))
        if len({rank_facts["optimizer"] for rank_facts in all_facts}) > 1:
            _broadcast_optimizer(learn)
        self.common = common
        self.seeds.seed_all(more=1 + rank_exchange.rank())

    def begin_epoch(self, *, may_shorten: bool) -> None:
        """Select this rank's part of the training data for the next epoch. A collective.

        All ranks shuffle alike. If `may_shorten` is true on any rank, a callback may remove items from batches, and
        each step counts its items.
        """
        self.epochs += 1
        self._may_shorten = any(rank_exchange.gather_numbers(may_shorten))
        self.record = metrics.BatchRecord()
        seed = (self.seeds.python + self.epochs) % 2**62
        self.learn.dl, self.plan = rank_loaders.training_shard(self.learn.dl, self.learn, seed)

    @property
    def metrics(self) -> list[Any]:
        """The metrics of the training set."""
        recorder = getattr(self.learn, "recorder", None)
        return [] if recorder is None else list(recorder._train_mets[1:])

    # -- a step

    @property
    def step(self) -> int:
        """Number of the current batch in its epoch, from 0."""
        return int(self.learn.iter)

    @property
    def weight(self) -> float:
        """Factor of this rank's loss. The mean over ranks of the weighted losses is the loss of one process.

        It is final once the used items are counted. It is 0 for a filler batch, whose loss may be NaN: multiply with
        `weighted_loss`.
        """
        weight = self.plan.weights[self.step]
        if self.reductions.reduction_of(self.learn.loss_func) == "sum":
            return float(rank_exchange.world_size()) if weight else 0.0
        if self._used is not None and self._used[1]:
            return self._used[0] * rank_exchange.world_size() / self._used[1]
        return weight

    @property
    def is_filler(self) -> bool:
        """True if this rank repeats a batch only because other ranks still have one."""
        return self.plan.weights[self.step] == 0

    @property
    def items(self) -> float:
        """Number of items of this step, as a mean over the ranks."""
        return self.plan.items[self.step] if self._used is None else self._used[1] / rank_exchange.world_size()

    def begin_step(self) -> None:
        """Note the size of a new batch."""
        self._used = None
        if self._may_shorten:
            self._full_size = _batch_size(self.learn)

    def count_used(self) -> None:
        """Count the items that the ranks use, if callbacks may have removed some. Then a collective."""
        if self._may_shorten:
            planned = self.plan.weights[self.step] * self.plan.items[self.step]
            mine = planned * _batch_size(self.learn) / self._full_size if self._full_size else 0.0
            self._used = mine, rank_exchange.sum_number(mine)

    def weighted_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times `weight`; with weight 0 it is 0, even if the loss is NaN or infinite."""
        return torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0 if self.weight == 0 else loss * self.weight

    def start_loss_allreduce(self) -> None:
        """Begin to average the weighted loss over the ranks, asynchronously during the backward pass."""
        self._loss = self.weighted_loss(self.learn.loss.detach().float().mean()) / rank_exchange.world_size()
        self._work = dist.all_reduce(self._loss, async_op=True)

    def finish_loss_allreduce(self) -> None:
        """Wait for the averaged loss and make it the learner's loss."""
        if self._work is not None:
            self._work.wait()
            self.learn.loss, self._work = self._loss, None

    def wrap(self) -> None:
        """Replace the learner's model, kept in `model`, with a wrapper that averages gradients over the ranks.

        The wrapper is reused until parameters are frozen or unfrozen.
        """
        model = self.learn.model
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
        if trained != self._wrapped_trainable:  # a callback may freeze and unfreeze, as fastai's for GANs does
            self._drop_wrapper()
            self._wrapped_trainable = trained
        if self._wrapper is None:
            self._wrapper = self._wrapper_of(model)
        if self._wrapper is not model:
            self.model, self.learn.model = model, self._wrapper

    def unwrap(self) -> None:
        """Restore the learner's own model."""
        if self.model is not None:
            self.learn.model, self.model = self.model, None

    def _wrapper_of(self, model: nn.Module) -> nn.Module:
        trainable = _trainable_parameters(model)
        used = _used.get(model, {})
        self._probing = not trainable.keys() <= used.keys()
        if self._probing:  # until used parameters are known, `end_backward` averages gradients
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
        """Average the gradients of newly trainable parameters, and note which parameters are used.

        All ranks must call it after each backward pass. It acts only in the first one after the model got trainable
        parameters whose use is unknown, as after unfreezing: DDP could search for unused parameters in each step, but
        that takes time.
        """
        if not self._probing:
            return
        self._probing = False
        trainable = _trainable_parameters(self.learn.model)
        flags_by_rank = rank_exchange.gather_objects([parameter.grad is not None for parameter in trainable.values()])
        used = dict(zip(trainable, zip(*flags_by_rank, strict=True), strict=True))
        for name, parameter in trainable.items():
            if any(used[name]):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                rank_exchange.average_tensor(parameter.grad)
        known = _used.setdefault(self.learn.model, {})
        known.update({name: all(by_rank) for name, by_rank in used.items()})
        self._wrapper = None

    def _drop_wrapper(self) -> None:
        if self._wrapper is not None and self._wrapper is not self.learn.model:
            wrappers.discard_wrapper(self._wrapper)
        self._wrapper = None

    # -- end

    def share_buffers(self) -> None:
        """Copy rank 0's buffers, such as batch norm statistics, to all ranks, as DDP does in each step."""
        rank_exchange.broadcast_tensors(list(self.learn.model.buffers()))

    def end(self) -> None:
        """Unwrap the model and restore the common random state, after success or failure."""
        self.unwrap()
        self._drop_wrapper()
        if self.common is not None:
            contents.set_process_generators(self.common)


def _batch_size(learn: Learner) -> float:
    """Return the number of items in the batch; 1 if it is unknown."""
    first = item_find(learn.yb if len(learn.yb) else learn.xb)
    return float(first.shape[0]) if getattr(first, "ndim", 0) else 1.0


def _trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


NOT_DIVISIBLE = (
    "the training data cannot be divided among the ranks: their {kind} has no length, or cannot be indexed. Give it a "
    "dataset with __len__ and __getitem__; ddip divides it"
)
DIFFERENT = (
    "the ranks have different training data: {what} {differ}. Create the DataLoaders and call fit in cells on all "
    "ranks, with the same data on each; ddip divides them"
)


def _require_same(all_facts: list[dict[str, Any]]) -> None:
    rows = [{**rank_facts["data"], "epochs": rank_facts["epochs"]} for rank_facts in all_facts]
    for what in rows[0]:
        values = [row[what] for row in rows]
        if len(set(values)) > 1:
            if what == "sample":
                raise ValueError(DIFFERENT.format(what="their items", differ="differ, though not in number"))
            differ = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(DIFFERENT.format(what=f"{what}:", differ=differ))


def _optimizer_fingerprint(learn: Learner) -> int:
    tensors: list[torch.Tensor] = []

    def to_plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return "tensor"
        if isinstance(value, dict):
            return [(str(key), to_plain(item)) for key, item in value.items()]
        if isinstance(value, str | int | float | bool | None):
            return value
        return [to_plain(item) for item in value] if hasattr(value, "__iter__") else repr(value)

    state = to_plain(learn.opt.state_dict())
    trained = [parameter.requires_grad for parameter in learn.model.parameters()]
    return rank_exchange.fingerprint_value(
        (state, trained, getattr(learn.opt, "frozen_idx", 0), tensor_checksums(tensors))
    )


def _broadcast_optimizer(learn: Learner) -> None:
    trained = [parameter.requires_grad for parameter in learn.model.parameters()]
    state = to_detach(learn.opt.state_dict(), cpu=True, gather=False)  # each rank has a different GPU
    state, trained, frozen = rank_exchange.broadcast_object((state, trained, getattr(learn.opt, "frozen_idx", 0)))
    learn.opt.load_state_dict(state)
    for parameter, known in getattr(learn.opt, "state", {}).items():
        known.update(to_device(dict(known), parameter.device))
    learn.opt.frozen_idx = frozen
    for parameter, requires_grad in zip(learn.model.parameters(), trained, strict=True):
        parameter.requires_grad_(requires_grad)
