"""The app hf: Hugging Face libraries in cells, also after an error and a stop."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ddip
from ddip.errors import BadInput, CellError, CellInterrupted
from ddip.group.members.placement import Request

from ..cluster.conftest import new_notebook  # noqa: F401
from ..cluster.meanwhile import meanwhile, press_stop
from ..cluster.notebook import Notebook

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


def pull_from_both(group: ddip.Group, name: str) -> list[object]:
    """Return the variable `name` of both ranks."""
    return [of_rank[name] for of_rank in group.pull_all([name], range(2))[0]]


# -- the group


def test_accelerator_and_training_arguments_train_together_on_the_cpu(group: ddip.Group) -> None:
    group.run("""
        seen = [Accelerator().num_processes, TrainingArguments("none").world_size, PartialState().process_index]
        where = [str(Accelerator().device.type), TrainingArguments("none").n_gpu]
    """)
    assert pull_from_both(group, "seen") == [[2, 2, 0], [2, 2, 1]]
    assert pull_from_both(group, "where") == [["cpu", 0]] * 2


def test_accelerate_knows_the_current_group(warmed_up: None) -> None:
    with ddip.Group(2, app="hf") as group:
        group.run("from accelerate import Accelerator\nseen = Accelerator(mixed_precision='bf16').num_processes")
        group.change(Request(3))
        group.run("from accelerate import Accelerator\na = Accelerator()\nseen = [a.num_processes, a.mixed_precision]")
        assert [of_rank["seen"] for of_rank in group.pull_all(["seen"], range(3))[0]] == [[3, "no"]] * 3


def test_an_accelerator_and_loader_of_another_size_refuse_to_work(warmed_up: None) -> None:
    with ddip.Group(3, app="hf") as group:
        group.run("""
            from accelerate import Accelerator
            from torch.utils.data import DataLoader
            import torch
            accelerator = Accelerator()
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            loader, optimizer, scheduler = accelerator.prepare(
                DataLoader(list(range(24)), batch_size=4), optimizer, scheduler
            )
        """)
        group.change(Request(2))
        with pytest.raises(CellError, match="BatchSamplerShard .*3 ranks"):
            group.run("list(loader)")
        for use in ("scheduler.step()", "accelerator.mixed_precision", "accelerator.num_processes", "optimizer.step()"):
            with pytest.raises(CellError, match="StaleStateError: the Accelerator was made .*: recreate it"):
                group.run(use)
        group.run("""
            loader = Accelerator().prepare(DataLoader(list(range(24)), batch_size=4))
            assert torch.cat(list(loader)).tolist() == sum([[*range(n, n + 4)] for n in range(4 * rank, 24, 8)], [])
        """)


def test_a_trainer_trains_again_in_a_group_of_other_ranks(warmed_up: None, tmp_path: Path) -> None:
    with ddip.Group(3, app="hf") as group:
        group.run(SET_UP)
        group.run(f"trainer = make({str(tmp_path)!r})\ntrainer.train()")
        group.change(Request(2))
        group.run("""
            trainer.train()
            new = make("none")
            new.train()
            same = history(trainer, "loss") == history(new, "loss")
            seen = [trainer.args.world_size, trainer.state.global_step, same]
        """)
        assert pull_from_both(group, "seen") == [[2, 20, True]] * 2


def test_end_training_keeps_the_group_and_model_usable(group: ddip.Group) -> None:
    group.run("""
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.end_training()
    """)
    group.run("model(torch.ones(1, 2)).sum().backward()")


@pytest.mark.parametrize("name", ["test_sync", "test_script"])
def test_accelerate_s_own_tests_pass(group: ddip.Group, name: str) -> None:
    # Its data is random and its tolerance relative: a gradient near zero fails once in about a thousand runs.
    group.run(f"""
        from functools import partial
        from accelerate.test_utils.scripts import {name}
        {name}.RegressionDataset = partial({name}.RegressionDataset, seed=42)
        {name}.main()
    """)


def test_notebook_launcher_calls_the_function_on_ranks_with_fresh_settings(group: ddip.Group) -> None:
    group.run("""
        seen = []
        def function(number):
            accelerator = Accelerator()
            seen.append((number, accelerator.num_processes, accelerator.mixed_precision))
        notebook_launcher(function, (1,), num_processes=2, mixed_precision="bf16")
        notebook_launcher(function, (2,))
    """)
    assert pull_from_both(group, "seen") == [[(1, 2, "bf16"), (2, 2, "no")]] * 2
    with pytest.raises(CellError, match="%makedip -n 3"):
        group.run("notebook_launcher(function, (3,), num_processes=3)")


def test_device_map_auto_is_refused_with_the_alternative(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"if rank == 0: LlamaForCausalLM(config).save_pretrained({str(tmp_path)!r})")
    with pytest.raises(CellError, match="device_map={'': device}"):
        group.run(f"LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, device_map='auto')")
    group.run(f"LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, device_map={{'': device}})")
    group.run(f"LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, device_map='auto')", ranks=[0])


# -- the same Trainer again


@pytest.fixture(scope="module")
def losses(group: ddip.Group, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Return the losses of a `trainer` that creates its model again each time."""
    folder = tmp_path_factory.mktemp("trainer")
    group.run(f"trainer = make({str(folder)!r}, eval_strategy='steps', eval_steps=10)\ntrainer.train()")
    return history_of_training(group, train=False)


def history_of_training(group: ddip.Group, train: bool = True) -> object:
    group.run("trainer.train()\n" * train + "seen = history(trainer, 'loss') + history(trainer, 'eval_loss')")
    seen = pull_from_both(group, "seen")
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
    assert history_of_training(group) == losses


def test_a_trainer_continues_after_its_collator_fails_on_one_rank(group: ddip.Group, losses: object) -> None:
    with pytest.raises(CellError, match="planted"):
        group.run("""
            collator, trainer.data_collator = trainer.data_collator, fail if rank == 1 else trainer.data_collator
            try:
                trainer.train()
            finally:
                trainer.data_collator = collator
        """)
    assert history_of_training(group) == losses


@pytest.mark.parametrize("event", ["after", "predicted"])
def test_a_trainer_trains_again_after_a_stop(group: ddip.Group, losses: object, event: str, tmp_path: Path) -> None:
    _stop_in(group, {"0": event, "1": event}, tmp_path)
    assert history_of_training(group) == losses


def test_a_stop_at_different_steps_gives_ranks_equal_models(
    group: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(f"trainer = make({str(tmp_path / 'o')!r}, LlamaForCausalLM(config))\ntrainer.train()")
    waits = tmp_path / "waits"
    waits.mkdir()
    _stop_in(group, {"0": "after", "1": "before"}, waits)
    group.run(SAME)
    assert pull_from_both(group, "same") == [[True, True]] * 2
    shown = capsys.readouterr()
    assert (
        "with rank 0's parameters and buffers on every rank" in shown.err
        and "differs between the ranks" not in shown.err
    )
    group.run("trainer.train()")
    group.run(SAME)
    assert pull_from_both(group, "same") == [[True, True]] * 2


def test_a_trainer_with_a_refusing_compiled_wrapper_rewraps_its_model(warmed_up: None, tmp_path: Path) -> None:
    with ddip.Group(
        2, app="hf"
    ) as group:  # a separate group: transformers leaves a variable that makes it compile all models
        group.run(SET_UP)
        group.run(f"""
            trainer = make({str(tmp_path)!r}, LlamaForCausalLM(config), torch_compile=True,
                           torch_compile_backend="eager")
            spy.called = {{"after": lambda state: fail() if rank == 1 and state.global_step == 5 else None}}
        """)
        with pytest.raises(CellError, match="planted"):
            group.run("trainer.train()")
        group.run("spy.called = {}\ntrainer.train()")
        group.run(SAME)
        assert pull_from_both(group, "same") == [[True, True]] * 2


def _stop_in(group: ddip.Group, events: dict[str, str], folder: Path) -> None:
    """Press stop once each rank has reached its event of `events` in step 5."""
    thread = meanwhile(lambda: len(list(folder.iterdir())) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        group.run(f"""
            import time
            def wait_for_the_stop(state):
                if state.global_step >= {{"before": 4}}.get({events!r}[str(rank)], 5):  # counted after this event
                    (pathlib.Path({str(folder)!r}) / str(rank)).touch()
                    while True: time.sleep(0.01)
            spy.called = {{{events!r}[str(rank)]: wait_for_the_stop}}
            try:
                trainer.train()
            finally:
                spy.called = {{}}
        """)
    thread.join()


def test_half_accumulated_gradients_are_dropped_after_an_error(group: ddip.Group) -> None:
    group.run("""
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer = torch.nn.Linear(2, 1), None
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        def step():
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
            return accelerator.sync_gradients
        for _ in range(4): step()
    """)
    with pytest.raises(CellError, match="planted"):
        group.run("for number in range(4): fail() if rank == 1 and number == 2 else step()")
    group.run("synced = [step() for _ in range(8)]")
    assert pull_from_both(group, "synced") == [[False, False, False, True] * 2] * 2


def test_a_scheduler_with_a_lambda_continues_with_equal_counts(group: ddip.Group) -> None:
    group.run("""
        class Scheduler(torch.optim.lr_scheduler.LRScheduler):
            def __init__(self, optimizer):
                self.shape = lambda step: 0.5**step
                super().__init__(optimizer)
            def get_lr(self):
                return [first * self.shape(self.last_epoch) for first in self.base_lrs]

        accelerator, model = Accelerator(), torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, Scheduler(optimizer))
        def step():
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
        step()
    """)
    with pytest.raises(CellError, match="planted"):
        group.run("""
            if rank == 1:
                scheduler.scheduler.last_epoch = 7
                fail()
            step()
        """)
    group.run("step()\nrate, count = optimizer.param_groups[0]['lr'], scheduler.scheduler.last_epoch")
    rates, counts = pull_from_both(group, "rate"), pull_from_both(group, "count")
    assert rates[0] == rates[1] and counts[0] == counts[1] < 7, (rates, counts)


def test_a_trainer_on_some_ranks_says_it_needs_all(group: ddip.Group, tmp_path: Path) -> None:
    for method in ("train", "evaluate"):
        with pytest.raises(CellError, match=rf"{method}\(\): .*2 ranks.*rank 0"):
            group.run(f"trainer = make({str(tmp_path)!r}, LlamaForCausalLM(config))\ntrainer.{method}()", ranks=[0])


def test_the_memory_of_a_failed_step_is_freed(group: ddip.Group, tmp_path: Path) -> None:
    group.run(f"""
        import gc
        def held():
            gc.collect()
            return sum(thing.numel() for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        wide = make({str(tmp_path)!r}, LlamaForCausalLM(LlamaConfig(**sizes | {{"hidden_size": 512}}, vocab_size=64)))
        wide.train()
    """)
    group.run("before = held()")
    with pytest.raises(CellError, match="planted"):
        group.run("""
            spy.called = {"before": lambda state: fail() if rank == 1 and state.global_step == 3 else None}
            wide.train()
        """)
    group.run("spy.called = {}")
    group.run("more = (held() - before) / sum(parameter.numel() for parameter in wide.model.parameters())")
    assert all(isinstance(more, float) and abs(more) < 0.1 for more in pull_from_both(group, "more"))
    group.run("del wide")


# -- one log, one checkpoint


def test_one_bar_one_log_and_one_checkpoint_are_written(
    group: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group.run(f"""
        best = make({str(tmp_path)!r}, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5,
                    load_best_model_at_end=True, save_total_limit=2, disable_tqdm=False)
        best.train()
        seen = [history(best, "loss"), history(best, "eval_loss"), pathlib.Path(best.state.best_model_checkpoint).name]
    """)
    shown = capsys.readouterr()
    assert shown.out.count("'train_runtime'") == 1 and shown.out.count("'eval_loss'") == 4
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 2 and "checkpoint-20" in kept
    assert sorted(path.name for path in (tmp_path / "checkpoint-20").glob("rng_state*")) == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]
    seen = pull_from_both(group, "seen")
    assert seen[0] == seen[1]
    group.run(f"""
        resumed = make({str(tmp_path)!r}, eval_strategy="steps", eval_steps=5, num_train_epochs=2)
        resumed.train(resume_from_checkpoint=True)
        seen = [resumed.state.global_step, history(resumed, "loss")[:4] == history(best, "loss")]
    """)
    assert pull_from_both(group, "seen") == [[40, True]] * 2


def test_a_notebook_shows_the_table_of_rank_0(
    new_notebook: Callable[[], Notebook],  # noqa: F811
) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2 -a hf")
    notebook.ok("%%dip\n" + textwrap.dedent(SET_UP))
    shown = notebook.ok("%%dip\nmake('out', eval_strategy='steps', eval_steps=10, disable_tqdm=False).train();")
    tables = [output["text/html"] for output in shown.outputs if "Validation Loss" in output.get("text/html", "")]
    assert len(tables) == 1 and "[20/20" in tables[0] and tables[0].count("<tr") == 3
    failed = notebook.fails("""%%dip
        spy.called = {"before": lambda state: fail() if state.global_step == 4 else None}
        make("out", disable_tqdm=False).train()
    """)
    assert "planted" in failed.traceback and "ddip/apps" not in failed.traceback
    assert any("/20" in output.get("text/html", "") for output in failed.outputs)


# -- files, once per host


def test_only_the_first_rank_maps_a_data_set(group: ddip.Group, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"number": number}) + "\n" for number in range(10))
    (tmp_path / "numbers.json").write_text(lines)
    group.run(f"""
        import os
        from datasets import Dataset, load_dataset
        folder = pathlib.Path({str(tmp_path)!r})
        def double(row):
            with open(folder / "mapped", "a") as file:
                file.write(os.environ["RANK"] + "\\n")  # `rank` would make it another function on each rank
            return {{"double": 2 * row["number"]}}
        data = load_dataset("json", data_files=str(folder / "numbers.json"), split="train", cache_dir=str(folder / "c"))
        seen = data.map(double)["double"][:]
        again = data.map(double, load_from_cache_file=False)["double"][:]
        kept = data.filter(lambda row: row["number"] > 7)["number"][:]
        memory = Dataset.from_dict({{"number": [1, 2]}}).map(lambda row: {{"double": rank}})["double"][:]
    """)
    assert pull_from_both(group, "seen") == pull_from_both(group, "again") == [list(range(0, 20, 2))] * 2
    assert pull_from_both(group, "kept") == [[8, 9]] * 2
    assert pull_from_both(group, "memory") == [[0, 0], [1, 1]]
    assert (tmp_path / "mapped").read_text() == "0\n" * 20
    with pytest.raises(CellError, match="ranks 0, 1: .*planted"):
        group.run("data.map(fail)")
    assert pull_from_both(group, "seen")  # no rank is blocked


def test_a_rank_maps_alone_if_the_first_does_not(group: ddip.Group, tmp_path: Path) -> None:
    (tmp_path / "numbers.json").write_text('{"number": 1}\n')
    group.run(f"""
        from datasets import load_dataset
        file, cache = {str(tmp_path / "numbers.json")!r}, {str(tmp_path / "c")!r}
        data = load_dataset("json", data_files=file, split="train", cache_dir=cache)
        if rank == 1:
            data = data.map(lambda row: {{"more": row["number"] + 1}})
    """)
    group.run("""
        import torch.distributed as dist
        from ddip.apps.hf import hf_files as files
        patience, files.PATIENCE = files.PATIENCE, 0.5
        if rank == 1:
            data = data.map(lambda row: {"much": row["number"] + 2})
        dist.barrier()
        files.PATIENCE = patience
    """)
    group.run("seen = sorted(data.column_names)")
    assert pull_from_both(group, "seen") == [["number"], ["more", "much", "number"]]


class Hub(BaseHTTPRequestHandler):
    """A server that answers huggingface_hub's requests for one file of one repository."""

    requested_paths: list[str] = []
    fails = False

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.requested_paths.append(self.path)
        self.answer(b'{"vocab_size": 7, "model_type": "llama"}')

    def answer(self, body: bytes) -> None:
        exists = self.path.endswith("/config.json")
        self.send_response(500 if self.fails else 200 if exists else 404)
        self.send_header("ETag", '"etag"')
        self.send_header("X-Repo-Commit", "c" * 40)
        if not exists:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body) or 40))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Hub, "requested_paths", [])
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_is_downloaded_once_and_failures_reach_all_ranks(hub: type[Hub], tmp_path: Path) -> None:
    with ddip.Group(2, app="hf", spawn=True) as group:  # the libraries read these variables at import
        group.run("""
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError
            from transformers import AutoConfig
            seen = AutoConfig.from_pretrained("someone/model").vocab_size
            try:
                hf_hub_download("someone/model", "nothing.json")
            except EntryNotFoundError:
                missing = True
        """)
        assert pull_from_both(group, "seen") == [7, 7] and pull_from_both(group, "missing") == [True, True]
        assert len([path for path in hub.requested_paths if path.endswith("config.json")]) == 1
        group.run("""
            import time
            began = time.monotonic()
            for number in range(3):
                hf_hub_download("someone/model", f"{rank}{number}/config.json")  # each rank its own
            quick = time.monotonic() < began + 15  # nobody waits for what the other does not do
        """)
        assert pull_from_both(group, "quick") == [True, True]
        assert len([path for path in hub.requested_paths if path.endswith("nothing.json")]) <= 1


# -- the app itself


@pytest.mark.long
def test_the_app_works_with_only_one_library_installed() -> None:
    for missing in (("transformers", "datasets"), ("accelerate",), ("transformers", "accelerate")):
        code = f"""
            import sys
            for name in {missing!r}:
                sys.modules[name] = None
            import torch.distributed as dist
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            from ddip.apps import hf
            hf.prepare(); hf.begin_cell(); hf.rejoined(); hf.end_cell(ValueError()); hf.release()
            assert not [name for name in {missing!r} if sys.modules[name] is not None]
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr


def test_removing_the_app_leaves_the_libraries_unchanged() -> None:
    code = """
        import os, sys
        import accelerate, datasets, transformers.trainer, transformers.utils.notebook
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        from ddip.apps import hf
        from ddip.rank.objects import wrappers

        THEIRS = ("accelerate", "datasets", "huggingface_hub", "transformers")
        def everything():
            modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in THEIRS}
            found = {name: dict(vars(module)) for name, module in modules.items()}
            for module in modules.values():
                for name, kind in list(vars(module).items()):
                    if isinstance(kind, type) and kind.__module__.startswith(THEIRS):
                        found[f"{module.__name__}.{name}"] = dict(vars(kind))
            return found, dict(os.environ), dict(vars(wrappers))

        before = everything()
        hf.prepare()
        changed = {name for name, names in everything()[0].items() if names != before[0].get(name)}
        assert {"transformers.trainer.Trainer", "accelerate.state.PartialState", "accelerate"} <= changed, changed
        hf.release()
        after = everything()
        left = {name for name, names in after[0].items() if names != before[0].get(name, names)}
        assert (left, after[1:]) == (set(), before[1:]), left
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_without_any_library_the_error_lists_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddip.apps.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="%pip install accelerate transformers"):
        ddip.Group(2, app="hf")


def test_a_command_lists_the_patches_with_their_reasons(group: ddip.Group) -> None:
    text = group.command("patches")
    assert text is not None and all(
        f"{name}: " in text for name in ("place", "living", "trainer_faults", "hf_show", "hf_files")
    )
