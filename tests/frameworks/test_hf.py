"""The app hf: Hugging Face's libraries in cells, also after an error and a stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ddip
from ddip.errors import BadInput, CellError, CellInterrupted
from ddip.group.placement import Request

from ..cluster.meanwhile import meanwhile, press_stop

SET_UP = """
    import os, pathlib, tempfile
    import torch
    from accelerate import Accelerator, PartialState, notebook_launcher
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, **sizes)
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (160, 12))]
    settings = {"report_to": "none", "save_strategy": "no", "logging_steps": 5, "disable_tqdm": True,
                "per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 0.01}

    class Spy(TrainerCallback):
        def __init__(self):
            self.called = {}
        def call(self, event, state):
            self.called.get(event, lambda state: None)(state)
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.call("before", state)
        def on_step_end(self, args, state, control, **kwargs):
            self.call("after", state)
        def on_prediction_step(self, args, state, control, **kwargs):
            self.call("predicted", state)
        def on_log(self, args, state, control, **kwargs):
            pass

    spy = Spy()

    def make(folder, model=None, **more):
        again = {} if model is not None else {"model_init": lambda: LlamaForCausalLM(config)}
        arguments = TrainingArguments(folder, **(settings | more))
        return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[100:], callbacks=[spy], **again)

    def history(trainer, name):
        return [log[name] for log in trainer.state.log_history if name in log]

    def fail(*_):
        raise ValueError("planted")
"""
SAME = """
    import torch.distributed as dist
    def same_everywhere(tensors):
        theirs = [None, None]
        dist.all_gather_object(theirs, [tensor.tolist() for tensor in tensors])
        return theirs[0] == theirs[1]
    state = trainer.optimizer.state.values()
    same = [same_everywhere(trainer.model.parameters()), same_everywhere(part["exp_avg"] for part in state)]
"""


@pytest.fixture(scope="module")
def group(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(2, app="hf") as group:
        group.run(SET_UP)
        yield group


def found(group: ddip.Group, name: str) -> list[object]:
    """The variable `name` of both ranks."""
    return [of_rank[name] for of_rank in group.pull_all([name], range(2))[0]]


# -- the group


def test_accelerator_and_training_arguments_train_together_on_the_cpu(group: ddip.Group) -> None:
    group.run("""
        seen = [Accelerator().num_processes, TrainingArguments("none").world_size, PartialState().process_index]
        where = [str(Accelerator().device.type), TrainingArguments("none").n_gpu]
    """)
    assert found(group, "seen") == [[2, 2, 0], [2, 2, 1]]
    assert found(group, "where") == [["cpu", 0]] * 2


def test_what_accelerate_knows_of_the_group_follows_it(warmed_up: None) -> None:
    with ddip.Group(2, app="hf") as group:
        group.run("from accelerate import Accelerator\nseen = Accelerator(mixed_precision='bf16').num_processes")
        group.change(Request(3))
        group.run("from accelerate import Accelerator\na = Accelerator()\nseen = [a.num_processes, a.mixed_precision]")
        assert [of_rank["seen"] for of_rank in group.pull_all(["seen"], range(3))[0]] == [[3, "no"]] * 3


def test_end_training_leaves_the_group_and_the_model_to_the_next_cell(group: ddip.Group) -> None:
    group.run("""
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.end_training()
    """)
    group.run("model(torch.ones(1, 2)).sum().backward()")


@pytest.mark.parametrize("name", ["test_sync", "test_script"])
def test_accelerate_s_own_tests_pass(group: ddip.Group, name: str) -> None:
    group.run(f"from accelerate.test_utils.scripts import {name}; {name}.main()")


def test_notebook_launcher_calls_the_function_on_the_ranks_each_time_as_in_a_new_process(group: ddip.Group) -> None:
    group.run("""
        seen = []
        def function(number):
            accelerator = Accelerator()
            seen.append((number, accelerator.num_processes, accelerator.mixed_precision))
        notebook_launcher(function, (1,), num_processes=2, mixed_precision="bf16")
        notebook_launcher(function, (2,))
    """)
    assert found(group, "seen") == [[(1, 2, "bf16"), (2, 2, "no")]] * 2
    with pytest.raises(CellError, match="%makedip -n 3 first"):
        group.run("notebook_launcher(function, (3,), num_processes=3)")


def test_device_map_auto_says_what_to_write(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"if rank == 0: LlamaForCausalLM(config).save_pretrained({str(tmp_path)!r})")
    with pytest.raises(CellError, match="write device_map={'': device}, or leave it out"):
        group.run(f"LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, device_map='auto')")
    group.run(f"LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, device_map={{'': device}})")
    group.run(f"LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, device_map='auto')", ranks=[0])


# -- the same Trainer again


@pytest.fixture(scope="module")
def losses(group: ddip.Group, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Of `trainer`, which makes its model anew each time."""
    folder = tmp_path_factory.mktemp("trainer")
    group.run(f"trainer = make({str(folder)!r}, eval_strategy='steps', eval_steps=10)\ntrainer.train()")
    return trained(group, train=False)


def trained(group: ddip.Group, train: bool = True) -> object:
    group.run("trainer.train()\n" * train + "seen = history(trainer, 'loss') + history(trainer, 'eval_loss')")
    seen = found(group, "seen")
    assert len(seen[0]) == 6 and seen[0] == seen[1]  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("event", ["before", "after", "predicted"])
def test_a_trainer_trains_again_after_a_rank_raised(group: ddip.Group, losses: object, event: str) -> None:
    with pytest.raises(CellError, match="planted"):
        group.run(f"""
            spy.called = {{{event!r}: lambda state: fail() if rank == 1 and state.global_step == 10 else None}}
            try:
                trainer.train()
            finally:
                spy.called = {{}}
        """)
    assert trained(group) == losses


def test_a_trainer_trains_again_after_its_collator_raised_on_one_rank(group: ddip.Group, losses: object) -> None:
    with pytest.raises(CellError, match="planted"):
        group.run("""
            collator, trainer.data_collator = trainer.data_collator, fail if rank == 1 else trainer.data_collator
            try:
                trainer.train()
            finally:
                trainer.data_collator = collator
        """)
    assert trained(group) == losses


@pytest.mark.parametrize("event", ["after", "predicted"])
def test_a_trainer_trains_again_after_a_stop(group: ddip.Group, losses: object, event: str, tmp_path: Path) -> None:
    _stop_in(group, {"0": event, "1": event}, tmp_path)
    assert trained(group) == losses


def test_after_a_stop_at_different_steps_all_ranks_have_the_parameters_and_the_optimizer_of_rank_0(
    group: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(f"trainer = make({str(tmp_path / 'o')!r}, LlamaForCausalLM(config))\ntrainer.train()")
    waits = tmp_path / "waits"
    waits.mkdir()
    _stop_in(group, {"0": "after", "1": "before"}, waits)
    group.run(SAME)
    assert found(group, "same") == [[True, True]] * 2
    shown = capsys.readouterr()
    assert "the DDP wrapper goes on" in shown.err and "differs between the ranks" not in shown.err
    group.run("trainer.train()")
    group.run(SAME)
    assert found(group, "same") == [[True, True]] * 2


def _stop_in(group: ddip.Group, events: dict[str, str], folder: Path) -> None:
    """Press the stop button where each rank has come to its one of `events` in step 5."""
    thread = meanwhile(lambda: len(list(folder.iterdir())) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        group.run(f"""
            import time
            def wait_for_the_stop(state):
                if state.global_step >= {{"before": 4}}.get({events!r}[str(rank)], 5):  # its own step counts after it
                    (pathlib.Path({str(folder)!r}) / str(rank)).touch()
                    while True: time.sleep(0.01)
            spy.called = {{{events!r}[str(rank)]: wait_for_the_stop}}
            try:
                trainer.train()
            finally:
                spy.called = {{}}
        """)
    thread.join()
