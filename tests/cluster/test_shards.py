"""``%dipshards``: how a model is distributed over the ranks."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest

import ddip

from .notebook import Notebook
from .test_dist_state import CODE


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[ddip.Group]:
    with ddip.Group(4, failure_grace=0.1) as group:
        group.run(CODE)
        yield group


def row_of(table: object, name: str) -> list[str]:
    (found,) = [line for line in str(table).splitlines() if line.split()[:1] == [name]]
    return re.split(r"\s\s+", re.sub(r"\]\s+(?=\d+ B)", "] ", found))


@pytest.mark.grid(in_ci=True)
def test_each_rank_has_its_shard_of_a_model(four_ranks: ddip.Group) -> None:
    four_ranks.run("model = fsdp()")
    table = four_ranks.shards("model")
    assert row_of(table, "0.weight") == ["0.weight", "[12, 5]", "float32", "Shard(0)", *3 * ["[3, 5] 60 B"]]
    assert row_of(table, "2.bias")[-2:] == ["[1] 4 B", "[0] 0 B"]  # 3 elements on 4 ranks
    assert [name.strip() for name in str(table).splitlines()[1].split("  ") if "rank" in name] == [
        *("rank 0", "each of ranks 1, 2", "rank 3")
    ]
    assert row_of(table, "3.running_mean")[1:] == ["[3]", "float32", "plain, buffer", *3 * ["[3] 12 B"]]
    whole = "sum(t.numel() * t.element_size() for t in [*network().parameters(), *network().buffers()])"
    four_ranks.run(f"whole = {whole}")
    four_ranks.run("""
        held = [None] * world_size
        local = lambda t: t.to_local() if hasattr(t, "to_local") else t
        dist.all_gather_object(held, sum(local(t).nbytes for t in [*model.parameters(), *model.buffers()]))
    """)
    seen = four_ranks.pull(["whole", "held"])
    assert str(table).splitlines()[0] == (
        f"model: FSDPSequential, {seen['whole']} B whole, {sum(seen['held'])} B on 4 ranks"
    )
    assert table.rows[-1][-2:] == [f"{size} B" for size in (seen["held"][-2], seen["held"][-1])]


@pytest.mark.grid(in_ci=True)
def test_ranks_with_equal_shard_shapes_share_a_column(four_ranks: ddip.Group) -> None:
    four_ranks.run("model = both()")
    table = four_ranks.shards("model")
    assert "rank" in str(table).splitlines()[1]
    assert row_of(table, "0.weight")[3].startswith("data: StridedShard(0), tensor: Shard(0)")
    four_ranks.run("model = nn.parallel.DistributedDataParallel(network())")
    table = four_ranks.shards("model")
    assert str(table).splitlines()[1].split()[-4:] == ["each", "of", "ranks", "0-3"]
    assert row_of(table, "module.0.weight") == ["module.0.weight", "[12, 5]", "float32", "DDP", "[12, 5] 240 B"]
    assert row_of(four_ranks.shards("model.module.0"), "bias") == ["bias", "[12]", "float32", "plain", "[12] 48 B"]


@pytest.mark.grid
def test_ranks_may_have_different_parts_of_a_pipeline(four_ranks: ddip.Group) -> None:
    four_ranks.run("model = nn.ModuleDict({f'stage{rank // 2}': nn.Linear(2, 1 + rank // 2)})")
    table = four_ranks.shards("model")
    assert re.findall(r"each of [^e]*\d", str(table).splitlines()[1]) == ["each of ranks 0, 1", "each of ranks 2, 3"]
    assert row_of(table, "stage1.weight")[-2:] == ["-", "[2, 2] 16 B"]


def test_models_of_a_trainer_and_lazy_models_are_shown(four_ranks: ddip.Group) -> None:
    four_ranks.run("""
        from types import SimpleNamespace
        trainer = SimpleNamespace(model=nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))
    """)
    table = four_ranks.shards("trainer.model")
    assert row_of(table, "0.weight")[1:4] == ["[]", "float32", "lazy, not made yet"]
    assert row_of(table, "1.weight") == ["1.weight", "[2, 3]", "float32", "plain", "[2, 3] 24 B"]
    assert row_of(four_ranks.shards("trainer.model.1"), "bias")[-1] == "[2] 8 B"


@pytest.mark.grid
def test_shards_are_shown_after_a_fault(four_ranks: ddip.Group) -> None:
    four_ranks.run("model = fsdp()")
    before = str(four_ranks.shards("model"))
    four_ranks.run("y = model(torch.ones(2, 5))\nassert not hasattr(model[4].weight, 'to_local')  # the root's")
    assert str(four_ranks.shards("model")) == before
    four_ranks.run("y.sum().backward()")
    with pytest.raises(ddip.CellError):
        four_ranks.run("if rank == 1: raise ValueError\nmodel(torch.ones(2, 5))")
    assert str(four_ranks.shards("model")) == before
    four_ranks.run("pass")
    assert str(four_ranks.shards("model")) == before


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("if rank != 1: here = network()", "here", "rank 1 .*%%dip"),
        ("here = network()", "here.7", "ranks 0-3 "),
        ("here = network() if rank else [1]", "here", ".*list on rank 0"),
    ],
)
def test_an_object_that_is_not_a_model_is_refused(four_ranks: ddip.Group, code: str, name: str, words: str) -> None:
    four_ranks.run("globals().pop('here', None)")
    four_ranks.run(code)
    with pytest.raises(ddip.BadInput, match=f"%dipshards {re.escape(name)}: {words}"):
        four_ranks.shards(name)


def test_the_notebook_shows_a_table(notebook: Notebook) -> None:
    notebook.ok("%%dip\nfrom torch import nn\nnet = nn.Linear(2, 1)")
    ((_, content),) = [one for one in notebook.ok("%dipshards net").messages if one[0] == "display_data"]
    text, source = content["data"]["text/plain"], content["data"]["text/html"]
    assert text.splitlines()[0] == "net: Linear, 12 B whole, 36 B on 3 ranks"
    cells = [html.unescape(cell) for cell in re.findall(r"<t[dh] [^>]*>(.*?)</t[dh]>", source)]
    assert cells[:5] == ["parameter", "shape", "dtype", "placement", "each of ranks 0-2"]
    assert cells[5:9] == ["weight", "[1, 2]", "float32", "plain"] and cells[-1] == "12 B"
