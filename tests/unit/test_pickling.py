"""Pickling: the pickle, its out-of-band buffers, and the message of a failure."""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
import random
import sys
import textwrap
import threading
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ddip.protocol.objects.pickling import ALIGNED, INLINE, Graph, Loader, Pickled, Pickler, dump_all, pickle_value

LARGE = 2 * INLINE


def round_trip(value: Any) -> Any:
    """Pickle and unpickle a value."""
    pickled, _ = pickle_value(value)
    memory = pickled.joined()
    assert len(memory) == pickled.room >= pickled.size
    return Pickled.of(memory, pickled.sizes).load()


def address_of(obj: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(obj))


def test_code_keeps_the_name_of_its_file() -> None:
    names: dict[str, Any] = {}
    exec(compile("def outer():\n    return lambda: 0", "<a cell>", "exec"), names)
    arrived = round_trip(names["outer"])
    assert [arrived.__code__.co_filename, arrived().__code__.co_filename] == ["<a cell>"] * 2


def test_every_unpicklable_object_is_named_and_nothing_is_packed() -> None:
    lock = threading.Lock()
    packed = dump_all({"a": [1, 2], "lock": lock, "locks": [lock], "f": lambda x: x + 1})
    assert not packed.pickled and list(packed.errors) == ["lock", "locks"]
    assert packed.errors["lock"].startswith("TypeError: cannot pickle '_thread.lock'")


def test_tensors_keep_gradients_parameters_and_views() -> None:
    values = {"p": torch.nn.Parameter(torch.ones(2)), "g": torch.ones(2, requires_grad=True), "v": torch.arange(6)[::2]}
    back, moved = {name: round_trip(value) for name, value in values.items()}, pickle_value(values)[1]
    assert not moved
    assert isinstance(back["p"], torch.nn.Parameter) and back["g"].requires_grad
    assert back["v"].tolist() == [0, 2, 4]


class UserTensor(torch.Tensor):
    """A user-defined class."""


def marked_tensor() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.mark = "kept"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.ones(0, 4),
        torch.ones(3).expand(5, 3),
        torch.arange(12).reshape(3, 4).T[1:, ::2],
        torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2).to_sparse(),
        torch.ones(2).as_subclass(UserTensor),
        marked_tensor(),
    ],
    ids=str,
)
@pytest.mark.parametrize("times", [1, LARGE])
@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 and 2.5, in pickle.loads
def test_a_tensor_arrives_as_if_torch_had_pickled_it(tensor: torch.Tensor, times: int) -> None:
    value = tensor if times == 1 or tensor.layout is not torch.strided else torch.stack([tensor.detach()] * times)
    here, theirs = round_trip(value), pickle.loads(pickle.dumps(value))
    assert type(here) is type(theirs) and here.dtype == theirs.dtype and here.layout == theirs.layout
    assert here.requires_grad == theirs.requires_grad and here.is_leaf == theirs.is_leaf
    assert vars(here).keys() == vars(theirs).keys() and here.is_conj() == theirs.is_conj()
    assert torch.equal(here.to_dense(), theirs.to_dense())
    if here.layout is torch.strided:
        assert here.stride() == theirs.stride() and here.storage_offset() == theirs.storage_offset()
        assert here.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


def test_hooks_of_a_tensor_stay_and_torch_says_so() -> None:
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    with pytest.warns(UserWarning, match="hooks"):
        assert round_trip(tensor).requires_grad


def test_a_tensor_on_meta_stays_on_meta() -> None:
    packed = dump_all({"m": torch.ones(2, device="meta")})
    assert packed.pickled["m"].load().device.type == "meta"
    assert packed.moved == []


def test_an_object_that_raises_during_pickling_is_named() -> None:
    class Bad:
        def __reduce__(self) -> str:
            raise RuntimeError("no way")

    assert dump_all({"bad": Bad()}).errors == {"bad": "RuntimeError: no way"}


def test_storages_arrive() -> None:
    packed = dump_all({"s": torch.arange(3, dtype=torch.int16).untyped_storage()})
    assert (packed.errors, packed.moved) == ({}, [])
    assert packed.pickled["s"].load().tolist() == [0, 0, 1, 0, 2, 0]
    assert round_trip(torch.UntypedStorage(0)).nbytes() == 0


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(LARGE),
        torch.arange(float(LARGE)).to(torch.bfloat16),
        torch.ones(LARGE, dtype=torch.cfloat).conj(),
        torch.eye(LARGE // 100).to_sparse(),
        torch.eye(2).to_sparse().requires_grad_(),
        torch.nn.Parameter(torch.ones(LARGE)),
        torch.ones(LARGE).as_subclass(getattr(torch.nn, "Buffer", torch.nn.Parameter)),
        torch.empty(0),
    ],
    ids=["long", "bfloat16", "conjugated", "sparse", "sparse leaf", "parameter", "subclass", "empty"],
)
def test_tensors_of_all_kinds_arrive(value: torch.Tensor) -> None:
    back = round_trip(value)
    assert type(back) is type(value) and back.dtype == value.dtype and back.requires_grad == value.requires_grad
    assert torch.equal(back.to_dense(), value.to_dense())


@pytest.mark.parametrize("value", [np.ones(LARGE), np.asfortranarray(np.ones((300, 200))), np.ones((400, 400))[::2]])
def test_arrays_arrive_and_can_be_written_to(value: np.ndarray) -> None:  # type: ignore[type-arg]
    back = round_trip(value)
    assert (back == value).all() and back.flags.f_contiguous == value.flags.f_contiguous
    back[:] = 2


def test_memory_of_arrays_and_tensors_is_not_copied_for_pickling() -> None:
    array, tensor = np.zeros(LARGE, np.uint8), torch.zeros(LARGE, dtype=torch.uint8)
    frame = pd.DataFrame({"x": np.zeros(LARGE)})
    pickled, _ = pickle_value({"array": array, "tensor": tensor, "frame": frame, "small": np.zeros(10)})
    assert pickled.sizes[1:] == [LARGE, LARGE, 8 * LARGE] and pickled.sizes[0] < LARGE
    assert address_of(pickled.parts[1]) == address_of(array) and address_of(pickled.parts[2]) == tensor.data_ptr()


def test_large_objects_use_the_loaded_memory_with_aligned_addresses() -> None:
    pickled, _ = pickle_value([torch.zeros(LARGE), np.zeros(LARGE), "odd" * 7, torch.zeros(LARGE)])
    memory = bytearray(ALIGNED) + pickled.joined()
    first, second, _, third = Pickled.of(memory, pickled.sizes, begin=ALIGNED).load()
    begin = address_of(memory)
    places = [first.data_ptr() - begin, second.ctypes.data - begin, third.data_ptr() - begin]
    assert all(0 < place < len(memory) and place % ALIGNED == 0 for place in places)


def test_large_tensors_cannot_be_resized_but_small_ones_can() -> None:
    assert round_trip(torch.zeros(3)).resize_(LARGE).shape == (LARGE,)
    with pytest.raises(RuntimeError, match="not resizable"):
        round_trip(torch.zeros(LARGE)).resize_(2 * LARGE)
    assert round_trip(torch.zeros(LARGE)).clone().resize_(2 * LARGE).shape == (2 * LARGE,)


def test_tensors_that_share_memory_still_share_it_after_sending() -> None:
    whole = torch.zeros(LARGE)
    tied = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    tied[1].weight = tied[0].weight
    assert pickle_value({"whole": whole, "part": whole[5:10], "row": whole.detach()})[0].size < 5 * LARGE
    back = round_trip({"whole": whole, "part": whole[5:10]})
    back["whole"][5] = 7
    assert back["part"][0] == 7
    arrived = round_trip(tied)
    assert arrived[1].weight is arrived[0].weight and arrived[0].weight.requires_grad


def test_an_optimizer_arrives_with_its_model() -> None:
    net = torch.nn.Linear(200, 200)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    new_net, new_optimizer = round_trip((net, optimizer))
    assert new_optimizer.param_groups[0]["params"][0] is new_net.weight
    assert torch.equal(new_optimizer.state[new_net.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    new_net(torch.ones(1, 200)).sum().backward()
    new_optimizer.step()


def test_pickled_objects_in_garbage_are_collected_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    graph = Graph(Pickler)
    graph.add("numbers", [1, 2])
    cycle: list[Any] = [graph, graph.pickled()]
    cycle.append(cycle)
    del graph, cycle
    gc.collect()
    assert reports == []


def test_a_pickle_without_extra_memory_contains_all_data() -> None:
    file = io.BytesIO()
    Pickler(file).dump([torch.ones(LARGE), np.ones(LARGE)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor, array = pickle.loads(file.getvalue())
    assert tensor.sum() == array.sum() == LARGE


def test_hooks_of_a_module_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    model.register_forward_hook(lambda module, args, out: out * 0 + 3)
    pickled, _ = pickle_value(model)
    (number,) = model._forward_hooks
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", number)  # as in another process
    received = pickled.load()
    received.register_forward_hook(lambda module, args, out: out * 2)
    assert received(torch.ones(1, 1)).item() == 6


def test_a_value_of_a_transfer_precedes_the_variable_that_its_functions_read() -> None:
    variables: dict[str, Any] = {"__name__": "__main__", "scale": 1}
    exec("def read(): return scale", variables)
    packed = dump_all({"read": variables["read"], "scale": 5, "other": variables["read"]})
    loader = Loader(packed.pickled)
    assert {name: loader.load(name) for name in packed.pickled}["scale"] == 5


def test_process_wide_generators_are_those_of_the_receiver() -> None:
    choice, randn = round_trip((random.choice, np.random.randn))
    assert choice.__self__ is random.choice.__self__ and randn.__self__ is np.random.randn.__self__  # type: ignore[attr-defined]
    loader = torch.utils.data.DataLoader([1], generator=torch.default_generator)
    assert round_trip(loader).generator is torch.default_generator
    own = random.Random(1)
    bits, copied = round_trip((np.random.Generator(np.random.mtrand._rand._bit_generator), own))  # type: ignore[attr-defined]
    assert bits.bit_generator is np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    assert copied is not own and copied.random() == own.random()


SHARED = """
    w = torch.zeros(3, requires_grad=True); b = torch.nn.Parameter(torch.zeros(1)); bare = torch.optim.SGD([w, b])
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)); opt = torch.optim.SGD(net.parameters())
    class Trainer: pass
    trainer = Trainer(); trainer.model = torch.nn.Linear(2, 1)
    trainer.opt = torch.optim.SGD(trainer.model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(trainer.opt, 1)
    nets = {"a": [torch.nn.Linear(2, 1)]}; of_nets = torch.optim.SGD(nets["a"][0].parameters())
    enc = torch.nn.Embedding(5, 3); dec = torch.nn.Linear(3, 5, bias=False); dec.weight = enc.weight
    of_both = torch.optim.SGD([*enc.parameters()])
    layers = [torch.nn.Linear(2, 1)]; built = torch.nn.Sequential(*layers); params = [*built.parameters()]
    for p in params: pass
    compiled = torch.nn.Sequential(built)
    model = torch.nn.Linear(1, 1); learner = Trainer(); learner.model = model; learner.parts = {"opt": sched}
    data = torch.ones(2); alias = [data]
"""
APART = {
    "bare": ["bare holds w", "bare holds b"],
    "w b": [],
    "w b bare": [],
    "opt": ["opt holds parameters of net"],
    "net": [],
    "trainer": [],
    "trainer sched": [],
    "sched": ["sched holds parameters of trainer"],
    "of_nets": ["of_nets holds parameters of nets"],
    "nets": [],
    "enc": ["enc holds parameters of dec"],
    "dec": ["dec holds parameters of enc"],
    "enc dec": [],
    "of_both": ["of_both holds parameters of enc", "of_both holds parameters of dec"],
    "built": [],
    "layers": ["layers holds a part of built"],
    "compiled": ["compiled holds built"],
    "model": [],
    "learner": ["learner holds model", "learner holds parameters of trainer"],
    "data": [],
}
"""Links that are named when the names of a line are sent without the others."""


@pytest.mark.parametrize("line", APART)
def test_objects_that_other_variables_share_are_named(line: str) -> None:
    variables: dict[str, Any] = {"torch": torch, "many": [*range(10_000)], "__name__": "__main__"}
    exec(textwrap.dedent(SHARED), variables)
    values = {name: variables[name] for name in line.split()}
    assert dump_all(values, variables=variables).shares == APART[line]
