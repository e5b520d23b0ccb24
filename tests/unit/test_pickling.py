"""What is pickled, and how its failure is told."""

from __future__ import annotations

import pickle
import threading

import torch

from ddip.protocol.pickling import dump_all


def test_each_value_is_packed_or_named() -> None:
    packed, errors, moved = dump_all({"a": [1, 2], "lock": threading.Lock(), "f": lambda x: x + 1})
    assert pickle.loads(packed["a"]) == [1, 2]
    assert pickle.loads(packed["f"])(1) == 2
    assert list(errors) == ["lock"] and errors["lock"].startswith("TypeError: cannot pickle '_thread.lock'")
    assert moved == []


def test_tensors_keep_gradients_parameters_and_views() -> None:
    values = {"p": torch.nn.Parameter(torch.ones(2)), "g": torch.ones(2, requires_grad=True), "v": torch.arange(6)[::2]}
    packed, errors, moved = dump_all(values)
    back = {name: pickle.loads(data) for name, data in packed.items()}
    assert (errors, moved) == ({}, [])
    assert isinstance(back["p"], torch.nn.Parameter) and back["g"].requires_grad
    assert back["v"].tolist() == [0, 2, 4]


def test_a_tensor_on_meta_stays_there() -> None:
    packed, _, moved = dump_all({"m": torch.ones(2, device="meta")})
    assert pickle.loads(packed["m"]).device.type == "meta"
    assert moved == []


def test_what_raises_while_it_is_pickled_is_named() -> None:
    class Bad:
        def __reduce__(self) -> str:
            raise RuntimeError("no way")

    assert dump_all({"bad": Bad()})[1] == {"bad": "RuntimeError: no way"}


def test_storages_arrive() -> None:
    packed, errors, moved = dump_all({"s": torch.arange(3, dtype=torch.int16).untyped_storage()})
    assert (errors, moved) == ({}, [])
    assert pickle.loads(packed["s"]).tolist() == [0, 0, 1, 0, 2, 0]
