"""Make data loaders for one rank: copies of the user's loaders that yield only this rank's batches.

Mends, in fastai 2.8.12 (``DistributedDL``): ``validate`` and ``get_preds`` count its padding, and ``get_preds``
loses the order unless the size is a multiple of batch size times ranks; with ``drop_last``, its slices of a small data
set contain no batch; it calls ``.cuda()`` on the CPU; each rank of a language model shuffles the texts differently.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fastai.callback.rnn import ModelResetter
from fastai.data.load import DataLoader, _FakeLoader
from fastai.learner import Learner
from fastai.text.data import LMDataLoader, SortedDL
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from ddip.apps import rank_exchange
from ddip.apps.fastai.distribution import plan, randomness

SAMPLE = 64
"""Maximum number of items that are compared to check that ranks have the same data."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ORDERS_DIFFER = (
    "the samplers of the ranks' DataLoaders yield different items: seed their generators equally on all ranks, and do "
    "not use DistributedSampler, since the app divides the batches among the ranks"
)


def carries_state(dl: Any, learn: Learner) -> bool:
    """Return whether the model of `learn` carries state between batches of `dl`, as language models do."""
    if _is_language_model_loader(dl):
        return True
    resets = any(isinstance(callback, ModelResetter) for callback in learn.cbs)
    return resets and isinstance(dl, DataLoader) and not dl.shuffle and not isinstance(dl, SortedDL)


def _is_language_model_loader(dl: Any) -> bool:
    return isinstance(dl, LMDataLoader)


def is_divisible(dl: Any) -> bool:
    """Return whether single batches of `dl` can be made without making all: it has a length and an index."""
    if isinstance(dl, DataLoader):
        return bool(dl.indexed) and dl.n is not None
    counted = isinstance(dl, TorchLoader) and dl.batch_sampler is not None
    return counted and not isinstance(dl.dataset, IterableDataset)


# -- comparison of data between ranks


def summarize_data(dl: Any) -> dict[str, Any]:
    """Summarize the data of `dl` for comparison: kind, sizes, and a fingerprint of some items."""
    summary = {"kind": type(dl).__name__, "items": _count_items(dl), "batch size": _batch_size(dl), "batches": len(dl)}
    return {**summary, "sample": _sample_fingerprint(dl)}


def _count_items(dl: Any) -> int:
    return int(dl.n) if isinstance(dl, DataLoader) else len(dl.dataset)


def _batch_size(dl: Any) -> int:
    return int((dl.bs if isinstance(dl, DataLoader) else dl.batch_size) or 1)


def _sample_fingerprint(dl: Any) -> int:
    """Return a fingerprint of some items, and of their order if the user has fixed it."""
    fixed_order = vars(dl).get("get_idxs")
    order = tuple(fixed_order()) if fixed_order is not None else ()
    try:
        items = None if _is_language_model_loader(dl) else getattr(dl, "items", None)
        texts = [] if items is None else _item_texts(items)
    except Exception:  # an item that cannot be shown as text
        texts = []
    return rank_exchange.fingerprint_value((order, texts))


def _item_texts(items: Any) -> list[str]:
    picks = sorted({round(i * (len(items) - 1) / (SAMPLE - 1)) for i in range(SAMPLE)}) if len(items) else []
    if hasattr(items, "iloc"):
        return [str(items.iloc[picks].to_csv())]
    return [ADDRESS.sub("", repr(items[pick])) for pick in picks]


# -- shards


def training_shard(dl: Any, learn: Learner, seed: int) -> tuple[Any, plan.Plan]:
    """Return a loader of this rank's batches of `dl` for one epoch, and the plan. A collective.

    The batches are in one process's order. `seed` is for loaders that shuffle by the global generators, which differ
    between ranks during training.
    """
    rank_plan = plan.Plan((), (), ())

    def select_batches(sizes: list[int]) -> Sequence[int]:
        nonlocal rank_plan
        rank_plan = plan.assign_training_batches(
            sizes,
            rank_exchange.rank(),
            rank_exchange.world_size(),
            in_runs=carries_state(dl, learn),
            drop_last=_drops_last(dl, learn),
        )
        return rank_plan.batches

    shard = _make_shard(dl, seed, select_batches)
    return shard, rank_plan


def count_training_steps(dl: Any, learn: Learner) -> int:
    """Return the number of steps of an epoch in which the ranks divide `dl`."""
    return plan.count_steps(len(dl), rank_exchange.world_size(), drop_last=_drops_last(dl, learn))


def _drops_last(dl: Any, learn: Learner) -> bool:
    """Return whether an epoch leaves out an incomplete last step; a language model reads the whole text."""
    return bool(dl.drop_last) and not carries_state(dl, learn)


def evaluation_shard(dl: Any, seed: int) -> Any:
    """Return a loader of the batches of `dl` that this rank evaluates. A collective.

    `seed` as in `training_shard`.
    """
    return _make_shard(
        dl,
        seed,
        lambda sizes: plan.assign_evaluation_batches(len(sizes), rank_exchange.rank(), rank_exchange.world_size()),
    )


SelectBatches = Callable[[list[int]], Sequence[int]]
"""Function from the sizes of all batches to the numbers of this rank's batches."""


def _make_shard(dl: Any, seed: int, select: SelectBatches) -> Any:
    with randomness.seeded_rng(seed):
        if not isinstance(dl, DataLoader):
            return _torch_shard(dl, select)
        dl.rng = rank_exchange.broadcast_object(dl.rng)
        dl.randomize()  # as fastai does at the start of an epoch
        _align_texts(dl)
        idxs = list(dl.get_idxs())
    batches = select(plan.sizes_of(len(idxs), _batch_size(dl), bool(dl.drop_last)))
    return _copy_loader(dl, plan.items_of(idxs, _batch_size(dl), batches), len(batches))


def _align_texts(dl: Any) -> None:
    """Give rank 0's order of texts to all ranks, since a language model loader shuffles them in place.

    Does nothing for other loaders; else a collective.
    """
    if _is_language_model_loader(dl):
        order = list(dl.items.idxs)
        if len(set(rank_exchange.gather_numbers(rank_exchange.fingerprint_value(order)))) > 1:
            dl.items.idxs[:] = rank_exchange.broadcast_object(order)
            dl.make_chunks()


def _copy_loader(dl: Any, idxs: list[Any], steps: int) -> Any:
    """Return a copy of `dl`, of a subclass of its class, that yields `steps` batches of the items `idxs`."""
    shard = copy.copy(dl)
    shard.__class__ = _shard_class(type(dl), steps)
    shard.rng = copy.copy(dl.rng)  # iterating over the shard draws from it, and must not change the next epoch's order
    shard.get_idxs = partial(list, idxs)  # unlike a lambda, it can be pickled for workers that are not forked
    fake = dl.fake_l
    shard.fake_l = _FakeLoader(
        shard, fake.pin_memory, fake.num_workers, fake.timeout, fake.persistent_workers, fake.pin_memory_device
    )
    return shard


def _shard_class(base: type[Any], steps: int) -> type[Any]:
    """Return a subclass of the loader class `base` with `steps` batches, whose instances can be pickled."""
    members = {"__len__": lambda _: steps, "__reduce__": lambda shard: (_empty_shard, (base, steps), vars(shard))}
    return type(base.__name__, (base,), members)


def _empty_shard(base: type[Any], steps: int) -> Any:
    return object.__new__(_shard_class(base, steps))


def _torch_shard(dl: TorchLoader[Any], select: SelectBatches) -> TorchLoader[Any]:
    """Return a copy of a torch loader, which fastai also accepts, with this rank's batches. A collective.

    Raises ValueError on all ranks if their samplers differ: some items would be used twice and others not at all.
    """
    batches: Iterable[list[int]] | None = dl.batch_sampler
    assert batches is not None
    whole = list(batches)
    if len(set(rank_exchange.gather_numbers(rank_exchange.fingerprint_value(whole)))) > 1:
        raise ValueError(ORDERS_DIFFER)
    return TorchLoader(
        dl.dataset,
        batch_sampler=[whole[batch] for batch in select([len(batch) for batch in whole])],
        num_workers=dl.num_workers,
        collate_fn=dl.collate_fn,
        pin_memory=dl.pin_memory,
        timeout=dl.timeout,
        worker_init_fn=dl.worker_init_fn,
        multiprocessing_context=dl.multiprocessing_context,
        generator=dl.generator,
    )
