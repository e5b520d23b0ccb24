"""After a fault, ddip names the counters that a library keeps on each rank, and %dipsync makes them equal.

ddip has no code for any of these libraries: it finds the counters by walking over the variables.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.group.members.placement import Request
from ddip.protocol import on_rank

from ..cluster.leftovers import wait_until

ACCELERATE = """
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    def taken(epoch):
        mine, both = list(epoch), [None] * world_size
        dist.all_gather_object(both, mine)
        return sorted(item for one in both for item in one)

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(torch.arange(16), batch_size=4, shuffle=True))

    def epoch(fails=False):
        for number, batch in enumerate(loader):
            if fails and rank == 1 and number == 1: raise ValueError("planted")
            yield from batch.tolist()
"""
FABRIC = """
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    import lightning as L

    def taken(epoch):
        mine, both = list(epoch), [None] * world_size
        dist.all_gather_object(both, mine)
        return sorted(item for one in both for item in one)

    fabric = L.Fabric()
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(24), batch_size=4, shuffle=True))

    def epoch(fails=False):
        if fails and rank == 1: raise ValueError("planted")
        for batch in loader:
            yield from batch.tolist()
"""
TRAINER = """
    import torch
    from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback
    from transformers import TrainingArguments
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 12))]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.9)
    stopping = EarlyStoppingCallback(3)

    class Planted(TrainerCallback):
        at = ""
        def on_optimizer_step(self, args, state, control, **kwargs):
            if self.at == "a step" and rank == 1 and state.global_step == 2: raise ValueError("planted")
        def on_evaluate(self, args, state, control, **kwargs):
            if self.at == "an evaluation" and rank == 1: raise ValueError("planted")

    planted = Planted()
    settings = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 4,
                "metric_for_best_model": "loss", "greater_is_better": True, "max_steps": 4}
    arguments = TrainingArguments("none", eval_strategy="steps", eval_steps=2, load_best_model_at_end=False, **settings)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], optimizers=(opt, sched),
                      callbacks=[planted, stopping])
"""


@pytest.fixture
def group(request: pytest.FixtureRequest, warmed_up: None) -> Iterator[ddip.Group]:
    """Start the requested number of ranks with an app."""
    app, size = request.param
    with ddip.Group(size, app=app, failure_grace=0.1) as group:
        yield group


def run_and_record(group: ddip.Group, code: str) -> None:
    """Run a good cell, and wait until each rank has recorded its state."""
    group.run(code)
    ranks = range(group.world_size)
    wait_until(lambda: all(group.ranks.call_on_control_channel(ranks, on_rank.is_recorded(True)).values()))


LOADERS = {"accelerate": (ACCELERATE, "loader.iteration"), "fabric": (FABRIC, "loader._num_iter_calls")}


@pytest.mark.parametrize(
    ("group", "library"),
    [(("hf", 2), "accelerate"), (("lightning", 2), "fabric")],
    indirect=["group"],
    ids=["accelerate", "fabric"],
)
def test_epochs_cover_all_data_after_a_fault_in_another(
    group: ddip.Group, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, counter = LOADERS[library]
    group.run(code)
    run_and_record(group, "items = taken(epoch())\nassert items == list(range(len(items))), items")
    run_and_record(group, "items = taken(epoch())")
    with pytest.raises(ddip.CellError, match="planted"):
        group.run("left = list(epoch(True))")
    group.run("pass")
    assert counter in capsys.readouterr().err
    group.sync()
    group.run("""
        for _ in range(10):
            items = taken(epoch())
            assert items == list(range(len(items))), items
    """)


@pytest.mark.parametrize("group", [("hf", 2)], indirect=True)
@pytest.mark.parametrize("event", ["a step", "an evaluation"])
def test_a_trainer_with_its_own_scheduler_continues_equally_after_sync(
    group: ddip.Group, event: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(TRAINER)
    run_and_record(group, "trainer.train()")
    run_and_record(group, "trainer.train()")
    with pytest.raises(ddip.CellError, match="planted"):
        group.run(f"planted.at = {event!r}\ntrainer.train()")
    group.run("planted.at = ''")
    stderr = capsys.readouterr().err
    assert ("sched.last_epoch" if event == "a step" else "stopping.early_stopping_patience_counter") in stderr, stderr
    group.sync()
    group.run("""
        import torch.distributed as dist
        trainer.train()
        seen = [sched.last_epoch, sched.get_last_lr(), stopping.early_stopping_patience_counter]
        seen += [p.tolist() for p in model.parameters()] + [trainer.state.log_history[-1].get("eval_loss")]
        both = [None] * world_size
        dist.all_gather_object(both, seen)
        assert both[0] == both[1], both
    """)


@pytest.mark.parametrize(
    ("group", "library"),
    [(("hf", 3), "accelerate"), (("lightning", 3), "fabric")],
    indirect=["group"],
    ids=["accelerate", "fabric"],
)
def test_a_loader_of_a_former_size_refuses_to_work(
    group: ddip.Group, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = LOADERS[library]
    group.run(code)
    group.run("items = taken(epoch())")
    group.change(Request(2))
    assert "belong to the former group of 3 ranks, and raise errors now; recreate them: " in capsys.readouterr().err
    with pytest.raises(ddip.CellError):  # accelerate has its own message
        group.run("items = taken(epoch())")
    group.run(code)
    group.run("items = taken(epoch())\nassert items == list(range(len(items))), items")
