"""The contents of a call of in_torchddp, and what it leaves out."""

from __future__ import annotations

import io
import pickle
import textwrap
from typing import Any

import pytest
import torch

from ddip.call import packing
from ddip.errors import TransferError
from ddip.protocol.objects.calls import Call


def pack_call(code: str, *needed: str, imports: str = "") -> tuple[Call, packing.CallPayload]:
    """Return the call of the function ``fn`` that `code` defines in a notebook."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(code), variables)
    payload = packing.CallPayload(variables, {"__main__"})
    call = packing.pack_call(variables["fn"], (), {}, {name: variables[name] for name in needed}, imports, payload)
    return call, payload


def received_values(call: Call) -> dict[str, Any]:
    """Return the received values of the names that the function uses."""
    unpickler = pickle.Unpickler(io.BytesIO(call.packed), buffers=call.buffers)
    return {name: unpickler.load() for name in call.values}


def test_objects_that_functions_use_are_packed_recursively() -> None:
    call, _ = pack_call(
        """
        import math
        a, b, unused = 1, [2], 3
        class Shift:
            by = 0
            def __call__(self, x): return inner(x) + a
        def inner(x): return math.floor(x)
        def fn(x): return [Shift()(y) for y in (lambda: b)()]
        """
    )
    assert (sorted({*call.own}), sorted(received_values(call)), [*call.references], call.left) == (
        ["Shift", "fn", "inner"],
        ["Shift", "a", "b", "fn", "inner"],
        ["math"],
        {},
    )


def test_shared_objects_are_packed_once_and_attributes_are_not_names() -> None:
    call, _ = pack_call("large, real = bytearray(2_000_000), 1\ndef fn(): return large, (3).real", "large")
    assert (call.own, sorted(received_values(call)), call.references, call.left) == (["fn"], ["fn"], {}, {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("__import__('threading').Lock()", "TypeError: cannot pickle '_thread.lock' object; create it in the function"),
        ("bytes(1_000_001)", "it is larger than 1 MB; add x to need="),
        ("__import__('torch').zeros(1_000_000)[:2]", "it is larger than 1 MB; add x to need="),
        ("(lambda: lock)", None),
    ],
)
def test_large_or_unpicklable_objects_are_left_out(value: str, reason: str | None) -> None:
    call, _ = pack_call(f"x = {value}\ndef fn(): return x")
    assert call.left == ({} if reason is None else {"x": reason})


def test_a_large_tensor_is_not_copied_to_learn_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_copy(self: object, *args: object) -> None:
        raise AssertionError("it was copied")

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", fail_on_copy)
    call, _ = pack_call("import torch\nx = {'weight': torch.zeros(1_000_000)}\ndef fn(): return x")
    assert call.left == {"x": "it is larger than 1 MB; add x to need="}


def test_used_packages_and_modules_are_recorded() -> None:
    call, payload = pack_call(
        """
        import xml.etree.ElementTree, torch
        from json import dumps
        def fn(): return xml.etree.ElementTree.fromstring(dumps(torch.ones(1)))
        """
    )
    assert {"xml", "json", "torch"} <= payload.packages
    assert {"xml.etree", "xml.etree.ElementTree"} <= set(call.modules)
    assert not any(name.startswith("torch.distributed") for name in call.modules)
    assert packing.packages_of("from . import x\nimport a.b as c, d\nfrom e.f import *") == {"a", "d", "e"}


def test_every_unpicklable_object_is_named() -> None:
    code = "import threading\nlock, fine = threading.Lock(), 1\ndef fn(x=lock): pass"
    with pytest.raises(TransferError, match="the function .*; lock "):
        pack_call(code, "fine", "lock")
