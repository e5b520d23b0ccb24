"""Objects to the ranks and back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import ddip
from ddip.errors import BadInput, TransferError


def double(x: float) -> float:
    return 2 * x


def in_the_notebook(code: str) -> dict[str, object]:
    """What `code` defines when it runs in a notebook's ``__main__``."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(code, namespace)
    return namespace


def test_arrays_frames_tensors_and_networks_go_there_and_come_back(cells: ddip.Group) -> None:
    network = torch.nn.Linear(3, 2)
    cells.push({"a": np.arange(6).reshape(2, 3), "f": pd.DataFrame({"x": [1, 2]}), "t": torch.ones(3), "net": network})
    cells.run("a = a + rank; f['x'] += rank; t += rank; y = net(t).detach()")
    back = cells.pull(["a", "f", "t", "net", "y"], rank=1)
    assert back["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert back["f"]["x"].tolist() == [2, 3]
    assert torch.equal(back["t"], torch.full((3,), 2.0))
    assert torch.equal(back["y"], network(torch.full((3,), 2.0)).detach())
    assert torch.equal(back["net"].weight, network.weight)


def test_functions_classes_and_lambdas_of_the_notebook_work_there(cells: ddip.Group) -> None:
    made = in_the_notebook(
        "class Scale:\n"
        "    def __init__(self, factor): self.factor = factor\n"
        "    def __call__(self, x): return self.factor * x\n"
        "def outer(x): return inner(x) + 1\n"
        "def inner(x): return 10 * x\n"
        "scale, shift = Scale(3), (lambda x: x - 1)"
    )
    cells.push({name: made[name] for name in ("Scale", "scale", "outer", "shift")})
    cells.run("results = [scale(rank), outer(rank), shift(rank), Scale(5)(rank), type(scale) is Scale]")
    assert cells.pull(["results"], 1) == {"results": [3, 11, 0, 5, True]}


def test_a_class_that_only_the_rank_defines_comes_back_whole(cells: ddip.Group) -> None:
    cells.run("class Only:\n    def __init__(self): self.rank = rank\nonly = Only()")
    only = cells.pull(["only"], 1)["only"]
    assert (type(only).__name__, only.rank) == ("Only", 1)


def test_all_ranks_in_a_list_in_rank_order(cells: ddip.Group) -> None:
    cells.run("mine = rank * 10")
    assert [v["mine"] for v in cells.pull_all(["mine"], [0, 1])[0]] == [0, 10]


def test_a_push_to_one_rank_leaves_the_others_alone(cells: ddip.Group) -> None:
    cells.push({"only": 1}, ranks=[1])
    cells.run("there = 'only' in globals()")
    assert [v["there"] for v in cells.pull_all(["there"], [0, 1])[0]] == [False, True]


def test_what_cannot_be_pickled_is_named_and_nothing_arrives(cells: ddip.Group) -> None:
    with pytest.raises(TransferError, match="nothing was pushed: lock cannot be pickled.*lock"):
        cells.push({"fine": 1, "lock": threading.Lock()})
    cells.run("found = 'fine' in globals()")
    assert cells.pull(["found"]) == {"found": False}


def test_what_a_rank_cannot_unpickle_is_named_and_nothing_arrives(
    cells: ddip.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here_module.py").write_text("class Here: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here_module  # type: ignore[import-not-found]

    with pytest.raises(TransferError, match=r"here cannot be unpickled there: .*only_here_module.*\(ranks 0, 1\)"):
        cells.push({"fine": 1, "here": only_here_module.Here()})
    cells.run("found = 'fine' in globals()")
    assert cells.pull(["found"]) == {"found": False}


def test_a_class_that_only_the_ranks_can_import_is_one_clear_error(cells: ddip.Group, tmp_path: Path) -> None:
    (tmp_path / "only_there_module.py").write_text("class There: pass\n")
    cells.run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom only_there_module import There\nthere = There()"
    )
    with pytest.raises(TransferError, match="there cannot be unpickled in the notebook: .*only_there_module"):
        cells.pull(["there"])


def test_an_object_whose_unpickling_raises_is_one_clear_error(cells: ddip.Group) -> None:
    cells.run(
        "def bad(): raise RuntimeError('no way')\n"
        "class Bad:\n    def __reduce__(self): return (bad, ())\n"
        "object_ = Bad()"
    )
    with pytest.raises(TransferError, match="object_ cannot be unpickled in the notebook: RuntimeError: no way"):
        cells.pull(["object_"])


def test_what_a_rank_cannot_pickle_or_does_not_have_is_named(cells: ddip.Group) -> None:
    cells.run("import threading; lock = threading.Lock(); fine = 1")
    with pytest.raises(TransferError, match="nothing was pulled: lock cannot be pickled on rank 0"):
        cells.pull(["fine", "lock"])
    with pytest.raises(TransferError, match="nothing was pulled: rank 1 has no nowhere"):
        cells.pull(["fine", "nowhere"], rank=1)


def test_a_large_array_arrives_whole(cells: ddip.Group) -> None:
    large = np.random.default_rng(0).standard_normal(4_000_000)
    cells.push({"large": large})
    cells.run("total = large.sum()")
    assert cells.pull(["total"], 1)["total"] == large.sum()


def test_names_are_names() -> None:
    from ddip.transfer import check_names

    with pytest.raises(BadInput, match=r"%dipush model.weight: 'model.weight' is no variable"):
        check_names(["model.weight"], "%dipush")
