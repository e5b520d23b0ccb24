"""Objects of the session take the saved state in place, as a new object would take it."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddip.rank.saves import save_pickler
from ddip.rank.saves.save_pickler import Loading, SavePickler
from ddip.rank.saves.variables import find_keys, group_keys, structure_of


class Cached(nn.Linear):
    """A module whose cache is not pickled; a new object begins with an empty one."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.cache: list[Any] = []
        self.calls = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cache = []


class Connected(nn.Linear):
    """A module with a connection that is not pickled, and that only its constructor opens."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.connection: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "connection"}


class Fails(nn.Linear):
    """A module that cannot be unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError("no such server")


class Counts(nn.Linear):
    """A module that changes the state that it takes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.facts = {"of": [{"loads": 0}]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["facts"]["of"][0]["loads"] += 1
        super().__setstate__(state)


class Reduced(nn.Linear):
    """A module whose class decides how it is created again."""

    def __reduce__(self) -> Any:
        return Reduced, (self.in_features, self.out_features), self.state_dict()


class FromNumbers(nn.Module):
    """A module that is pickled without its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": self.weight.tolist()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(state["numbers"]))


def save(**variables: Any) -> Callable[[dict[str, Any]], Callable[[], None]]:
    """Save `variables`; the result loads them into a dictionary, and returns the step that fills existing ones."""
    file, buffers = io.BytesIO(), list[Any]()
    pickler = SavePickler(file, buffers, group_keys(find_keys(variables)), {})
    pickler.dump(variables)
    storages = {number: slot.tensor.clone().untyped_storage() for number, slot in enumerate(pickler.slots)}

    def load(existing: dict[str, Any]) -> Callable[[], None]:
        loading = Loading(storages, find_keys(existing), set(variables))
        token = save_pickler.current.set(loading)
        try:
            existing |= pickle.loads(file.getvalue(), buffers=buffers)
        finally:
            save_pickler.current.reset(token)

        def fill() -> None:
            for step in loading.fills:
                step()

        return fill

    return load


class Shuffled:
    """A sampler that draws when an epoch begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6).tolist())

    def __len__(self) -> int:
        return 6


def test_persistent_workers_start_again_without_another_random_number() -> None:
    how: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader: Any = DataLoader(range(6), 2, sampler=Shuffled(), **how)  # type: ignore[arg-type]
    unused: Any = DataLoader(range(6), 2, sampler=Shuffled(), **how)  # type: ignore[arg-type]
    list(loader)
    load, state = save(both=(loader, unused)), torch.get_rng_state()

    def continue_with(*loaders: Any) -> list[Any]:
        torch.set_rng_state(state)
        return [(batch.tolist(), torch.rand(1)) for loader in loaders for _ in range(2) for batch in loader]

    variables: dict[str, Any] = {}
    load(variables)
    expected = continue_with(loader, unused)
    assert continue_with(*variables["both"]) == expected
    assert type(variables["both"][0]._iterator) is type(loader._iterator)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules_compute_after_a_load_in_place(kind: Any) -> None:
    net = kind(3, 4)
    expected = net(torch.ones(2, 3))[0]
    load = save(net=net)
    with torch.no_grad():
        net.weight_ih_l0.zero_()
    load({"net": net})()
    assert torch.equal(net(torch.ones(2, 3))[0], expected)


def test_a_module_takes_its_state_as_when_it_is_unpickled() -> None:
    net = Cached()
    weight, calls = net.weight, net._forward_hooks
    load = save(net=net)
    net.calls, net.cache, net.later = 3, [1], 1  # type: ignore[assignment]
    load({"net": net})()
    assert (net.calls, net.cache, hasattr(net, "later")) == (0, [], False)
    assert net.weight is weight and net._forward_hooks is calls


def test_a_module_that_changes_its_state_takes_it_once() -> None:
    net = Counts()
    load = save(net=net)
    load({"net": net})()
    assert net.facts == {"of": [{"loads": 1}]}


def test_attributes_that_a_class_does_not_pickle_are_kept() -> None:
    net = Connected()
    connection = net.connection
    load = save(net=net)
    load({"net": net})()
    assert net.connection is connection


def test_a_module_that_cannot_be_unpickled_stays() -> None:
    net = Fails(2, 2)
    load = save(net=net)
    with pytest.raises(OSError, match="no such server"):
        load({"net": net})


def test_a_module_that_pickles_other_things_than_its_parts_is_made_anew() -> None:
    for net in (FromNumbers(), Reduced(2, 2)):
        assert structure_of(net) == structure_of(nn.Sequential(net)) == ""
    assert structure_of(nn.Sequential(nn.GRU(2, 2), Cached()))


def test_a_process_wide_generator_is_not_copied() -> None:
    loaded: dict[str, Any] = {}
    save(pick=random.choice)(loaded)
    assert loaded["pick"].__self__ is random.choice.__self__  # type: ignore[attr-defined]


def test_a_sparse_tensor_still_requires_a_gradient() -> None:
    loaded: dict[str, Any] = {}
    save(leaf=torch.eye(2).to_sparse().requires_grad_())(loaded)
    assert loaded["leaf"].requires_grad and loaded["leaf"].layout is torch.sparse_coo
