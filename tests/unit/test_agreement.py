"""Variables count as equal on all ranks only if all of their contents are."""

from __future__ import annotations

import array
import collections
import ctypes
import datetime
import decimal
import io
import itertools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddip.rank.saves.agreement import classify_variables, digest_variables
from ddip.rank.saves.content_digest import Fingerprints, digest_of_items


class Sample:
    """An item of a data set."""

    def __init__(self, number: int) -> None:
        self.number = number


class Tag(str):
    """A text with an attribute."""


def classify(*of_ranks: Any) -> str:
    """Classify a variable that has these values on the ranks."""
    digests = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda: len(of_ranks))
        for rank, value in enumerate(of_ranks):
            patch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            digests.append(digest_variables({"value": value}, Fingerprints()))
    return classify_variables(["value"], digests, [])["value"]


def middle(value: Any) -> list[Any]:
    return [*range(500), value, *range(500)]


def nested(value: Any, depth: int) -> Any:
    return [nested(value, depth - 1)] if depth else value


def tagged(value: Any, number: int) -> Any:
    value.number = number
    return value


def in_cycle(number: int) -> Any:
    found: list[Any] = middle([number])
    found.append(found)
    return found


def table(number: int) -> Any:
    return pytest.importorskip("pandas").DataFrame({"x": [1, number], "y": ["a", str(number)]})


def arrow(number: int) -> Any:
    return pytest.importorskip("pyarrow").table({"x": [1, number]})


def of_notebook(body: str, value: Any, bases: str = "") -> Any:
    """Return a class of the notebook, defined in a function with the variable `value`."""
    code = f"def make(value):\n  class Own({bases}):\n    {body}\n  return Own"
    variables: dict[str, Any] = {"__name__": "__main__", "Base": value}
    exec(code, variables)
    return variables["make"](value)


CAPTURE = "f = lambda self: (__class__, value)"


MAKERS: dict[str, Callable[[int], Any]] = {
    "list": middle,
    "tuple": lambda n: tuple(middle(n)),
    "deque": lambda n: collections.deque(middle(n)),
    "longest deque": lambda n: collections.deque(maxlen=n),
    "dict": lambda n: dict(enumerate(middle(n))),
    "set": lambda n: {*range(2000), -n},
    "set of tuples": lambda n: {(1, n)},
    "order": lambda n: dict.fromkeys([n, 3 - n], 0),
    "large key": lambda n: {10**12 + n: 0},
    "key of a class": lambda n: {datetime.date(2020, 1, n): 0},
    "subset": lambda n: torch.utils.data.Subset(range(2000), middle(n)),  # type: ignore[arg-type]
    "samples": lambda n: middle(Sample(n)),
    "tensors": lambda n: middle((torch.tensor([n]), 1)),
    "parameters": lambda n: middle(torch.nn.Parameter(torch.tensor([float(n)]))),
    "cycle": in_cycle,
    "nested": lambda n: nested(n, 40),
    "decimal": decimal.Decimal,
    "array.array": lambda n: array.array("i", [n]),
    "bytearray": lambda n: bytearray(3 << 20) + bytes([n]) + bytearray(3 << 20),
    "time": datetime.time,
    "memory": lambda n: io.BytesIO(bytes([n])),
    "pattern": lambda n: re.compile(str(n)),
    "number in C": ctypes.c_int,
    "iterator": lambda n: iter([n]),
    **({"endless iterator": lambda n: itertools.cycle([n])} if sys.version_info < (3, 14) else {}),  # no pickle since
    "method in C": lambda n: [n].append,
    "function": lambda n: eval(f"lambda: {n}"),
    "default of a method": lambda n: of_notebook("f = lambda self, number=value: number", n),
    "default of a property": lambda n: of_notebook("f = property(lambda self, number=value: number)", n)(),
    "tensor of a static method": lambda n: middle(
        of_notebook("f = staticmethod(lambda *, x=value: x)", torch.ones(n))()
    ),
    "closure of a method": lambda n: of_notebook(CAPTURE, n),
    "closure of a method in items": lambda n: middle(of_notebook(CAPTURE, torch.ones(n))()),
    "closure of a base": lambda n: of_notebook("pass", of_notebook(CAPTURE, n), "Base")(),
    "attribute of a base": lambda n: of_notebook("pass", of_notebook("number = value", n), "Base")(),
    "factory": lambda n: collections.defaultdict(tagged(lambda: 0, n)),
    "text": lambda n: tagged(Tag("x"), n),
    "masked": lambda n: np.ma.array([1.0, 2.0], mask=[n == 1, False]),
    "objects": lambda n: np.array([n, "a", None] * 500, dtype=object),
    "frame": table,
    "series": lambda n: table(n).x,
    "arrow": arrow,
    "sparse": lambda n: torch.sparse_coo_tensor([[0]], [float(n)], (2,), check_invariants=True),
    "csr": lambda n: (torch.eye(2) * n).to_sparse_csr(),
    "strided nested": lambda n: torch.nested.nested_tensor([torch.ones(2) * n, torch.ones(3)]),
    "quantized": lambda n: torch.quantize_per_tensor(torch.zeros(2), 0.1 * n, 0, torch.quint8),
    "conjugate": lambda n: [torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj()][n - 1],
    "attribute": lambda n: tagged(torch.ones(2), n),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MAKERS)
def test_different_values_are_told_apart(kind: str) -> None:
    make = MAKERS[kind]
    assert classify(make(1), make(1)) == "equal"
    assert classify(make(1), make(2)) == "per rank"
    assert classify({"inside": make(1)}, {"inside": make(2)}) == "per rank"


def test_a_part_of_another_variable_counts_too() -> None:
    history = [1]
    one = digest_variables({"history": history, "trainer": types.SimpleNamespace(history=history)}, Fingerprints())
    other = digest_variables({"history": [2], "trainer": types.SimpleNamespace(history=[2])}, Fingerprints())
    assert set(classify_variables(["history", "trainer"], [one, other], []).values()) == {"per rank"}


def training(rank: int) -> Any:
    """Return a model, its optimizer after a step, and the sampler of a rank."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(200)))
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    return net, opt, torch.utils.data.DistributedSampler(range(9), 2, rank)  # type: ignore[arg-type]


def test_objects_of_the_process_do_not_count() -> None:
    one, other = training(0), training(1)
    assert classify(one, other) == "equal"
    other[1].state[other[0][100].weight]["exp_avg"][0, 0] += 1
    assert classify(one, other) == "per rank"


class OwnSampler(torch.utils.data.Sampler[int]):
    """A sampler that draws one rank's part of the data."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas = rank, 2


@pytest.mark.parametrize(
    "make", [OwnSampler, lambda rank: torch.utils.data.DistributedSampler(range(9), 4, 2 * rank + 1)]
)
def test_samplers_differ_if_a_load_does_not_set_their_rank(make: Any) -> None:
    assert classify(make(0), make(1)) == "per rank"
    assert classify([make(0)], [make(0)]) == "equal"


def test_objects_that_items_share_are_digested_once() -> None:
    """A pickle without a memo would repeat them; the walk visits them once."""
    vocabulary = {f"word {number}": number for number in range(3000)}
    assert digest_of_items([types.SimpleNamespace(words=vocabulary) for _ in range(300)], Fingerprints()) is None
    numbers = [(number, [1, 2]) for number in range(300)]
    assert digest_of_items(numbers, Fingerprints()) is not None
