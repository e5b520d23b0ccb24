"""The walk over variables, on large objects."""

from __future__ import annotations

import enum
import importlib
import itertools
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from ddip.rank.inspection import kinds
from ddip.rank.inspection import walk as walks
from ddip.rank.inspection.walk import Walk


def test_a_large_array_is_summed_in_parts_without_a_copy() -> None:
    variables = {"large": np.zeros((8 << 20) * 4, np.uint8), "small": np.zeros(3)}
    quick = Walk(variables, process_wide=False).finish()
    assert "large" not in quick.values and "small" in quick.values and "large#type" in quick.values
    tracemalloc.start()
    try:
        full = Walk(variables, checksums=True, process_wide=False)
        pauses = sum(1 for _ in full.steps)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pauses >= 4 and peak < variables["large"].nbytes // 2
    variables["large"][12345678] = 1
    assert Walk(variables, checksums=True, process_wide=False).finish().values["large"] != full.values["large"]


def test_an_array_that_is_a_file_is_not_read(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.uint8, "w+", shape=(1 << 20,))
    found = Walk({"mapped": mapped, "part": mapped[::2]}, checksums=True, process_wide=False).finish()
    assert not {"mapped", "part"}.intersection(found.values)


def test_the_memory_order_does_not_change_a_sum() -> None:
    plain = np.arange(12.0).reshape(3, 4)
    variables = {"c": plain, "f": np.asfortranarray(plain), "strided": np.repeat(plain, 2, 0)[::2]}
    values = Walk(variables, process_wide=False).finish().values
    assert values["c"] == values["f"] == values["strided"]


@pytest.mark.filterwarnings("ignore")
def test_values_of_any_layout_are_compared() -> None:
    dense, other = torch.diag(torch.arange(1.0, 5.0)), torch.eye(4)
    layouts = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
    variables = {}
    for number, layout in enumerate(layouts):
        size = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        for name, tensor in (("one", dense), ("same", dense.clone()), ("other", other), ("moved", dense.flip(0))):
            variables[f"{name}{number}"] = tensor.to_sparse(layout=layout, blocksize=size)
    for name, tensor in (("one", dense), ("same", dense.clone()), ("other", other), ("moved", dense.flip(0))):
        variables[f"{name}5"] = torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
    values = Walk(variables, checksums=True, process_wide=False).finish().values
    for number in range(6):
        sums = [values[f"{name}{number}"] for name in ("one", "same", "other", "moved")]
        assert sums[0] == sums[1] and len(set(sums)) == 3


@pytest.mark.filterwarnings("ignore")
def test_tensors_with_unreadable_values_are_compared_by_version() -> None:
    variables = {"nested": torch.nested.nested_tensor([torch.ones(2)]), "meta": torch.ones(2, device="meta")}
    values = Walk(variables, checksums=True, process_wide=False).finish().values
    assert not {"nested", "meta"}.intersection(values) and values["nested#version"] == values["meta#version"] == 0


def test_a_large_set_is_not_sorted() -> None:
    values = Walk({"s": set(range(walks.MOST_MEMBERS + 1))}, process_wide=False).finish().values
    assert values == {"s#members": walks.MOST_MEMBERS + 1}


def test_every_state_of_an_optimizer_is_compared() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2 * walks.WHOLE_ITEMS)]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9)
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer.step()
    values = Walk({"opt": optimizer}, process_wide=False).finish().values
    assert sum(path.endswith("['momentum_buffer']") for path in values) == len(weights)


def test_a_number_without_a_text_has_a_sum() -> None:
    """Python refuses to convert an int with this many digits to text."""
    values = Walk({"a": 10**5000, "b": -(10**5000), "c": 10**5000}, process_wide=False).finish().values
    assert len({repr(value) for value in values.values()}) == 2


def test_a_key_whose_text_fails_ends_no_walk() -> None:
    class Key(enum.Enum):
        A = 1

        def __repr__(self) -> str:
            raise RuntimeError

    values = Walk({"d": {Key.A: 1, object(): 2}, "e": {Key.A: 1}, "s": {Key.A}}, process_wide=False).finish().values
    assert values["d[Key.A]"] == values["e[Key.A]"] == 1


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.array(["a", None, 1.5], object), lambda value: value.__setitem__(1, "b")),
        (np.full((40, 100), "a", object), lambda value: value.__setitem__((20, 50), "b")),
        (np.zeros(2, [("name", object), ("count", int)]), lambda value: value["name"].__setitem__(1, "b")),
        (bytearray(b"abc"), lambda value: value.__setitem__(1, 0)),
        (bytearray(5 << 20), lambda value: value.__setitem__(-1, 1)),
    ],
    ids=["objects", "many objects", "fields", "bytes", "many bytes"],
)
def test_changed_objects_of_arrays_and_bytes_are_found(value: Any, change: Callable[[Any], object]) -> None:
    values = [Walk({"v": value}, checksums=True, process_wide=False).finish().values["v"] for _ in range(2)]
    assert values[0] == values[1]
    change(value)
    assert Walk({"v": value}, checksums=True, process_wide=False).finish().values["v"] != values[0]


def test_attributes_of_a_bytearray_are_compared() -> None:
    class Buffer(bytearray):
        position = 0

    buffer = Buffer(b"abc")
    buffer.position = 2
    assert Walk({"v": buffer}, process_wide=False).finish().values["v.position"] == 2


def test_a_long_list_of_arrays_is_not_copied() -> None:
    variables = {"data": [np.zeros(1 << 16) for _ in range(walks.WHOLE_ITEMS + 1)]}
    tracemalloc.start()
    try:
        values = Walk(variables, checksums=True, process_wide=False).finish().values
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20 and "data#items" not in values


def test_the_sum_of_a_long_dictionary_has_no_order() -> None:
    keys = range(walks.WHOLE_ITEMS * 20)
    one, other = dict.fromkeys(keys, 0.5), dict.fromkeys(reversed(keys), 0.5)
    pairs = [(key, float(key)) for key in keys]

    def checksums_of_items() -> list[object]:
        variables = {"one": one, "other": other, "pairs": pairs}
        values = Walk(variables, checksums=True, process_wide=False).finish().values
        return [values[f"{name}#items"] for name in variables]

    first = checksums_of_items()
    assert first[0] == first[1]
    other[3000], pairs[3000] = 0.25, (1, 0.0)
    assert (
        checksums_of_items()[0] == first[0]
        and checksums_of_items()[1] != first[1]
        and checksums_of_items()[2] != first[2]
    )


def test_a_path_has_no_caches() -> None:
    path = Path("a") / "b"
    before = Walk({"path": path}, process_wide=False).finish().values
    assert str(path) and path.name and hash(path)
    assert Walk({"path": path}, process_wide=False).finish().values == before


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
@pytest.mark.parametrize("generator", [np.random.Generator, np.random.RandomState])
def test_generators_of_numpy_that_differ_are_found(generator: Any, kind: str) -> None:
    one, other = (generator(getattr(np.random, kind)(7)) for _ in range(2))
    with np.printoptions(threshold=3):  # as a user may set it: texts of arrays are abbreviated
        values = [Walk({"it": each}, process_wide=False).finish().values["it"] for each in (one, other)]
        assert values[0] == values[1]
        other.bytes(4)
        assert Walk({"it": other}, process_wide=False).finish().values["it"] != values[0]


def test_users_modules_are_found_in_any_order_of_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"users_module_{number}" for number in range(100)]
    for name in names:
        (tmp_path / f"{name}.py").touch()
    for imported in (names[:1], names[:1], names[1:90], names[90:]):  # also more than are looked at first
        for name in imported:
            importlib.import_module(name)
        found = [name for name, _ in kinds.user_modules() if name in names]
        assert found == sorted(name for name in names if name in sys.modules)
    for removed in (names[-1:], names[50:]):  # with the newest one, and with others
        for name in removed:
            sys.modules.pop(name, None)
        assert [name for name, _ in kinds.user_modules() if name in names] == sorted(
            n for n in names if n in sys.modules
        )
    importlib.import_module(names[70])
    assert names[70] in dict(kinds.user_modules())
    for name in names:
        sys.modules.pop(name, None)


def test_defaults_of_the_users_functions_are_compared() -> None:
    def collect(x: int, found: list[int] = [], *, seen: dict[str, int] = {}) -> None:  # noqa: B006
        found.append(x)
        seen["x"] = x

    collect(5)
    values = Walk({"f": collect, "library": torch.nn.functional.relu}, process_wide=False).finish().values
    assert values["f.__defaults__[0][0]"] == values["f.__kwdefaults__['seen']['x']"] == 5
    assert not any(path.startswith("library.__defaults__") for path in values)


def test_every_link_to_a_shared_object_is_recorded() -> None:
    shared = [1]
    walk = Walk({"a": [shared], "b": {"of": shared}, "c": shared}, keep=True, process_wide=False).finish()
    assert walk.objects["c"] is shared and walk.aliases == {"a[0]": "c", "b['of']": "c"}


def endless(items: list[int]) -> Iterator[int]:
    while True:
        yield from items


def with_attribute() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.momentum = torch.ones(2)  # type: ignore[attr-defined]
    return weight


def change_weight(model: Any) -> None:
    next(model.parameters()).data += 1


def class_with_default() -> Any:
    def count(self: object, seen: list[int] = [0]) -> None:  # noqa: B006
        seen[0] += 1

    return type("Counting", (), {"__module__": __name__, "count": count})


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (with_attribute, lambda weight: weight.momentum.add_(1)),
        (lambda: torch.compile(torch.nn.Linear(2, 2), backend="eager"), change_weight),
        (lambda: torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))), change_weight),
        (lambda: endless([1, 2, 3]), next),
        (lambda: itertools.cycle([1, 2, 3]), next),
        (lambda: itertools.islice([1, 2, 3], 2), next),
        (lambda: map(str, [1, 2, 3]), next),
        (class_with_default, lambda kind: kind().count()),
    ],
    ids=["a tensor's attribute", "compiled", "FX", "a loop", "cycle", "islice", "map", "a default"],
)
def test_changes_within_objects_of_libraries_are_found(
    make: Callable[[], Any], change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "is_user_module", lambda name: name == __name__)
    value = make()
    if hasattr(type(value), "__next__"):
        next(value)
    before = Walk({"v": value}, checksums=True, process_wide=False).finish().values
    assert Walk({"v": value}, checksums=True, process_wide=False).finish().values == before
    change(value)
    assert Walk({"v": value}, checksums=True, process_wide=False).finish().values != before


def test_tensors_of_each_ranks_own_gpu_have_equal_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = []
    for own, other in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        monkeypatch.setattr(walks.gpu, "device", torch.device(own))
        with FakeTensorMode():
            variables = {"net": torch.empty(2, device=own), "away": torch.empty(2, device=other)}
        facts.append(Walk(variables, process_wide=False).finish().values)
    assert facts[0]["net#type"] == facts[1]["net#type"] and facts[0]["away#type"] != facts[1]["away#type"]
