"""The data loaders of one rank: copies of the user's that yield this rank's batches only.

Mends, in fastai 2.8.12 (``DistributedDL``): its padding is counted by ``validate`` and in ``get_preds``, whose order is
lost unless the size divides by batch size x ranks; its slices of a small data set make no batch at all with
``drop_last``; it calls ``.cuda()`` on the CPU; each rank of a language model shuffles the texts its own way.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterable, Sequence
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
"""Items that are looked at to tell whether the ranks have the same data."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def carries_state(dl: Any, learn: Learner) -> bool:
    """Does the model of `learn` carry what it has read from one batch of `dl` to the next, as language models do?"""
    if _is_of_texts_in_a_row(dl):
        return True
    resets = any(isinstance(callback, ModelResetter) for callback in learn.cbs)
    return resets and isinstance(dl, DataLoader) and not dl.shuffle and not isinstance(dl, SortedDL)


def _is_of_texts_in_a_row(dl: Any) -> bool:
    return isinstance(dl, LMDataLoader)


def is_divisible(dl: Any) -> bool:
    """Can batches of `dl` be told apart without making them all?"""
    if isinstance(dl, DataLoader):
        return bool(dl.indexed) and dl.n is not None
    counted = isinstance(dl, TorchLoader) and dl.batch_sampler is not None
    return counted and not isinstance(dl.dataset, IterableDataset)


# -- the same data?


def looks(dl: Any) -> dict[str, Any]:
    """What `dl` would yield, in short: how much, and a sample of the items."""
    told = {"kind": type(dl).__name__, "items": _length(dl), "batch size": _bs(dl), "batches": len(dl)}
    return {**told, "sample": _sample(dl)}


def _length(dl: Any) -> int:
    return int(dl.n) if isinstance(dl, DataLoader) else len(dl.dataset)


def _bs(dl: Any) -> int:
    return int((dl.bs if isinstance(dl, DataLoader) else dl.batch_size) or 1)


def _sample(dl: Any) -> int:
    """A fingerprint of some items, and of the order if that has been fixed."""
    fixed = vars(dl).get("get_idxs")
    order = tuple(fixed()) if fixed is not None else ()
    try:
        items = None if _is_of_texts_in_a_row(dl) else getattr(dl, "items", None)
        texts = [] if items is None else _texts(items)
    except Exception:  # an item that cannot be told
        texts = []
    return rank_exchange.fingerprint((order, texts))


def _texts(items: Any) -> list[str]:
    picks = sorted({round(i * (len(items) - 1) / (SAMPLE - 1)) for i in range(SAMPLE)}) if len(items) else []
    if hasattr(items, "iloc"):
        return [str(items.iloc[picks].to_csv())]
    return [ADDRESS.sub("", repr(items[pick])) for pick in picks]


# -- shards


def of_training(dl: Any, learn: Learner, seed: int) -> tuple[Any, plan.Plan]:
    """This rank's part of one epoch, shuffled by `seed`, and the plan behind it."""
    made = plan.Plan((), (), ())

    def own(sizes: list[int]) -> Sequence[int]:
        nonlocal made
        made = plan.training(sizes, rank_exchange.rank(), rank_exchange.world_size(), in_runs=carries_state(dl, learn))
        return made.batches

    shard = _shard(dl, seed, own)
    return shard, made


def of_evaluation(dl: Any, seed: int) -> Any:
    """This rank's batches of `dl`."""
    return _shard(dl, seed, lambda sizes: plan.evaluation(len(sizes), rank_exchange.rank(), rank_exchange.world_size()))


Own = Callable[[list[int]], Sequence[int]]
"""Sizes of all batches -> numbers of this rank's."""


def _shard(dl: Any, seed: int, own: Own) -> Any:
    with randomness.seeded(seed):
        if not isinstance(dl, DataLoader):
            return _torch_shard(dl, own)
        dl.rng = random.Random(seed)
        _settle(dl)
        idxs = list(dl.get_idxs())
    batches = own(plan.sizes_of(len(idxs), _bs(dl), bool(dl.drop_last)))
    return _copy(dl, plan.items_of(idxs, _bs(dl), batches), len(batches))


def _settle(dl: Any) -> None:
    """Texts of a language model are shuffled where they are: from the same order on every rank."""
    if _is_of_texts_in_a_row(dl):
        order = list(dl.items.idxs)
        if len(set(rank_exchange.gather_numbers(rank_exchange.fingerprint(order)))) > 1:
            dl.items.idxs[:] = rank_exchange.broadcast_object(order)
            dl.make_chunks()


def _copy(dl: Any, idxs: list[Any], steps: int) -> Any:
    """A loader as `dl`, of its own class too, that yields `steps` batches of the items `idxs`."""
    shard = copy.copy(dl)
    shard.__class__ = type(type(dl).__name__, (type(dl),), {"__len__": lambda _: steps})
    shard.get_idxs = lambda: idxs
    fake = dl.fake_l
    shard.fake_l = _FakeLoader(
        shard, fake.pin_memory, fake.num_workers, fake.timeout, fake.persistent_workers, fake.pin_memory_device
    )
    return shard


def _torch_shard(dl: TorchLoader[Any], own: Own) -> TorchLoader[Any]:
    """Of a loader of torch, which fastai takes as well."""
    batches: Iterable[list[int]] | None = dl.batch_sampler
    assert batches is not None
    whole = list(batches)
    return TorchLoader(
        dl.dataset,
        batch_sampler=[whole[batch] for batch in own([len(batch) for batch in whole])],
        num_workers=dl.num_workers,
        collate_fn=dl.collate_fn,
        pin_memory=dl.pin_memory,
        timeout=dl.timeout,
        worker_init_fn=dl.worker_init_fn,
        multiprocessing_context=dl.multiprocessing_context,
        generator=dl.generator,
    )
