"""Find common mistakes of distributed training that one rank can detect on its own, for ``%dipcheck``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ddip.protocol.reports import Advice, AdviceReport
from ddip.rank.inspection.lone_trainers import find_lone_trainers
from ddip.rank.inspection.state_history import history
from ddip.rank.inspection.state_report import role_at, variable_of
from ddip.rank.inspection.walk import Walk

SHOWN_NAMES = 3
DISTRIBUTES_LOADERS = ("Trainer", "Fabric", "Accelerator", "Learner", "Seq2SeqTrainer", "SFTTrainer")
"""Classes that divide the data among the ranks themselves, whatever sampler the user's loader has."""
DROPOUTS = (torch.nn.modules.dropout._DropoutNd,)

_epochs: weakref.WeakKeyDictionary[DistributedSampler[Any], list[int]] = weakref.WeakKeyDictionary()
"""Epochs of each sampler, one entry per iteration over it."""


@functools.cache
def watch_samplers() -> None:
    """Record the epoch of each `DistributedSampler` iteration from now on, as samplers do not."""
    iterate = DistributedSampler.__iter__

    @functools.wraps(iterate)
    def wrapper(self: DistributedSampler[Any]) -> Iterator[Any]:
        iterator = iterate(self)
        _epochs.setdefault(self, []).append(self.epoch)
        return iterator

    DistributedSampler.__iter__ = wrapper  # type: ignore[method-assign]


def find_advice(names: list[str], size: int) -> AdviceReport:
    """Look for mistakes in the variables `names` (all if empty) on a rank of a group of `size` ranks.

    Returns the advice found, the names of the checked variables, and the number of checked objects.
    """
    walk = history.walk_now(checksums=False, keep=True)
    found = [*_optimizer_advice(walk), *_module_advice(walk), *_sampler_advice(walk)]
    if size > 1:
        found += _loader_advice(walk)
        found += [advice for *_, advice in find_lone_trainers()]
    selected = [entry for entry in found if not names or variable_of(entry["path"]) in names]
    checked_names = walk.names.intersection(names) if names else walk.names
    generators = (
        0 if names else sum(role_at(path, walk) == "generator" for path in walk.objects if path.startswith("<"))
    )
    return {"advice": selected, "names": sorted(checked_names), "objects": len(checked_names) + generators}


def _shorten_list(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN_NAMES} more" if len(listed) > SHOWN_NAMES else ""
    return f"{', '.join(listed[:SHOWN_NAMES])}{more}"


def _optimizer_advice(walk: Walk) -> Iterator[Advice]:
    optimizers = {path: walk.objects[path] for path in walk.optimizers}
    optimized = {id(p) for opt in optimizers.values() for group in opt.param_groups for p in group["params"]}
    optimizer_prefixes = tuple(f"{path}." for path in optimizers)
    owned = {id(p) for path in walk.modules for p in walk.objects[path].parameters()}
    owned |= {
        id(value) for path, value in walk.objects.items() if not path.startswith(optimizer_prefixes)
    }  # tensors that are in no model
    for path, optimizer in optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        orphaned = [p for p in parameters if id(p) not in owned]
        if orphaned:
            what = f"{len(orphaned)} of its {len(parameters)} parameters belong to no model in the variables"
            yield {"path": path, "what": what, "todo": "recreate the optimizer from the model's parameters"}
    for path in walk.modules:
        trained = [(name, p) for name, p in walk.objects[path].named_parameters() if p.requires_grad]
        missing = [name for name, p in trained if id(p) not in optimized]
        if missing and len(missing) < len(trained):
            what = (
                f"{len(missing)} of {len(trained)} trainable parameters are in no optimizer: {_shorten_list(missing)}"
            )
            yield {"path": path, "what": what, "todo": "give them to the optimizer, or requires_grad_(False)"}


def _module_advice(walk: Walk) -> Iterator[Advice]:
    for path in walk.modules:
        module = walk.objects[path]
        if module.training:
            disabled = [n for n, m in module.named_modules() if isinstance(m, DROPOUTS) and m.p > 0 and not m.training]
            if disabled:
                todo = f"{path}.train() before the training"
                yield {"path": path, "what": f"trains, with dropout off in {_shorten_list(disabled)}", "todo": todo}


def _sampler_advice(walk: Walk) -> Iterator[Advice]:
    for path, role in walk.roles.items():
        sampler = walk.objects[path]
        if role == "sampler" and isinstance(sampler, DistributedSampler) and sampler.shuffle:
            epochs = _epochs.get(sampler, [])
            if len(epochs) > 1 and len(set(epochs)) == 1:
                what = f"has shuffled {len(epochs)} epochs in the same order: set_epoch was never called"
                yield {"path": path, "what": what, "todo": f"{path}.set_epoch(epoch) before each epoch"}


def _loader_advice(walk: Walk) -> Iterator[Advice]:
    if any(type(value).__name__ in DISTRIBUTES_LOADERS for value in walk.objects.values()):
        return
    for path, role in walk.roles.items():
        loader = walk.objects[path]
        if role != "loader" or type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
            continue
        todo = "for training: sampler=DistributedSampler(dataset)"
        if isinstance(loader.sampler, RandomSampler):
            what = "shuffles without a DistributedSampler: ranks do not divide the data among them"
            yield {"path": path, "what": what, "todo": todo}
        elif isinstance(loader.sampler, SequentialSampler):
            yield {"path": path, "what": "gives every rank the same data in the same order", "todo": todo}
