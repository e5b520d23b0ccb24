"""``%diprun``: scripts for torchrun run unchanged in the group, as one cell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import ddip
from ddip.errors import BadInput, CellError, CellInterrupted, TransferError
from ddip.group import group as group_module

from .leftovers import wait_until
from .meanwhile import meanwhile, press_stop
from .notebook import Notebook
from .rank_errors import raises_on_ranks

TRAIN = '''
"""Train a line with DDP, and write losses and parameters of each rank to FOLDER/RANK."""
import argparse, json, os, pathlib, sys, time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Line(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.tensor([i / 64, 1.0]), torch.tensor([i / 32])


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--fault", choices=["error", "wait"])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    data = Line()
    loader = DataLoader(
        data, 4, sampler=DistributedSampler(data), num_workers=args.workers, multiprocessing_context=args.context
    )
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    losses = []
    for x, y in loader:
        if args.fault == "error" and len(losses) == 3 and dist.get_rank() == 1:
            raise ValueError("planted")
        if args.fault == "wait" and len(losses) == 3:
            (args.folder / f"waits{dist.get_rank()}").touch()
            while True:
                time.sleep(0.01)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = {"losses": losses, "parameters": [p.tolist() for p in model.parameters()]}
    (args.folder / os.environ["RANK"]).write_text(json.dumps(result))
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
'''
ARGUMENTS = ("--folder", ".", "--lr", "0.1")


@pytest.fixture
def folder(cells: ddip.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the notebook and of the ranks, from which their cells import."""
    monkeypatch.chdir(tmp_path)
    former = "former_folder, former_path"
    cells.run(f"import os, sys; {former} = os.getcwd(), list(sys.path); os.chdir({str(tmp_path)!r})")
    cells.run("sys.path.insert(0, '')")
    yield tmp_path
    cells.run("import os, sys; os.chdir(former_folder); sys.path[:] = former_path")


def write_script(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(code))


def results_in(folder: Path) -> list[Any]:
    """Return the losses and parameters of both ranks, and delete their files."""
    files = [folder / str(rank) for rank in range(2)]
    results = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return results


def values_of(cells: ddip.Group, name: str) -> list[Any]:
    return [found[name] for found in cells.pull_all([name], [0, 1])[0]]


# -- as under torchrun


@pytest.fixture(scope="session")
def of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run the script under torchrun, and return losses and parameters of each rank."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "train.py").write_text(TRAIN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, "train.py", *ARGUMENTS], cwd=folder, check=True, stdin=subprocess.DEVNULL, timeout=300)
    return results_in(folder)


@pytest.fixture
def train(folder: Path) -> str:
    """Write the script, and return the line that runs it."""
    (folder / "train.py").write_text(TRAIN)
    return f"%diprun train.py {' '.join(ARGUMENTS)}"


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_a_script_trains_as_under_torchrun_before_and_after_faults(
    cells: ddip.Group, folder: Path, train: str, of_torchrun: list[Any]
) -> None:
    for _ in range(2):
        cells.run(train)
        assert results_in(folder) == of_torchrun
    with raises_on_ranks({1: "ValueError"}, {0: "backward"}):
        cells.run(f"{train} --fault error")
    cells.run(train)
    assert results_in(folder) == of_torchrun


@pytest.mark.grid(in_ci=True)
def test_a_stopped_script_trains_again_as_under_torchrun(
    cells: ddip.Group, folder: Path, train: str, of_torchrun: list[Any]
) -> None:
    thread = meanwhile(lambda: len(list(folder.glob("waits*"))) == 2, press_stop)
    with pytest.raises(CellInterrupted):
        cells.run(f"{train} --fault wait")
    thread.join()
    cells.run(train)
    assert results_in(folder) == of_torchrun


@pytest.mark.native("sockets")
def test_a_failed_script_leaves_no_wrapper_to_recreate(
    cells: ddip.Group, train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(train)  # it destroys the group at its end
    cells.run("import torch; model = torch.nn.Linear(2, 1); model(torch.ones(2)).sum().backward()")
    capsys.readouterr()
    with pytest.raises(CellError):
        cells.run(f"{train} --fault error")
    cells.run("pass")
    stderr = capsys.readouterr().err
    assert "gradients of `model` were cleared" in stderr and "recreated" not in stderr


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_find_the_dataset_of_the_script(
    cells: ddip.Group, folder: Path, train: str, of_torchrun: list[Any], context: str
) -> None:
    cells.run(f"{train} --workers 2 --context {context}")
    assert results_in(folder) == of_torchrun


def test_a_script_finds_the_surroundings_of_a_process(
    cells: ddip.Group, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(
        folder / "scripts" / "facts.py",
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group()
        facts = {
            "argv": sys.argv,
            "file": __file__,
            "path": sys.path[0],
            "folder": os.getcwd(),
            "name": __name__,
            "package": __package__,
            "is_main": vars(sys.modules["__main__"]) is globals(),
            "cells": [name for name in ("rank", "device", "earlier") if name in globals()],
            "rank": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
            "master": [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")],
        }
        """,
    )
    cells.run("import sys; earlier = 1; before = list(sys.argv), list(sys.path), sys.modules['__main__']")
    cells.run("%diprun scripts/facts.py --name 'two words' -r 0")
    assert capsys.readouterr().out == ""  # nothing about init_process_group
    for rank, facts in enumerate(values_of(cells, "facts")):
        assert len(facts.pop("master")) == 2
        assert facts == {
            "argv": ["scripts/facts.py", "--name", "two words", "-r", "0"],
            "file": str(folder / "scripts" / "facts.py"),
            "path": str(folder / "scripts"),
            "folder": str(folder),
            "name": "__main__",
            "package": None,
            "is_main": True,
            "cells": [],
            "rank": [rank, rank, 2, 2],
        }
    cells.run("assert before == (sys.argv, sys.path, sys.modules['__main__']) and __name__ == '__main__' and earlier")
    cells.run("assert '__file__' not in globals()")


def test_a_relative_path_begins_at_the_notebooks_folder(
    cells: ddip.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path / "here.py", "import os, sys; shown = sys.argv[0], os.getcwd()")
    monkeypatch.chdir(tmp_path)  # not the folder of the ranks
    cells.run("import os; of_ranks = os.getcwd()\n")
    cells.run("%diprun here.py")
    (path, of_script), of_ranks = cells.pull(["shown"])["shown"], cells.pull(["of_ranks"])["of_ranks"]
    assert path == str(tmp_path / "here.py") and of_script == of_ranks != str(tmp_path)


# -- afterwards


MODEL = """
import sys, torch

class Net(torch.nn.Linear):
    pass

def scale():
    return factor, __name__

factor = 3
net = Net(2, 1)
if len(sys.argv) > 1:
    raise ValueError("late")
"""


@pytest.mark.parametrize("argument", ["", "fails"])
def test_the_variables_of_a_script_stay_on_the_ranks(cells: ddip.Group, folder: Path, argument: str) -> None:
    write_script(folder / "model.py", MODEL)
    if argument:
        with raises_on_ranks(dict.fromkeys((0, 1), "ValueError")):
            cells.run(f"%diprun model.py {argument}")
    else:
        cells.run("%diprun model.py")
    cells.run("import pickle\nassert pickle.loads(pickle.dumps(net)).in_features == 2 and type(net) is Net")
    cells.run("factor = 4\nassert scale() == (3, '__main__')")
    assert cells.pull(["net"])["net"].out_features == 1


@pytest.mark.parametrize(("code", "fails"), [("0", False), ("None", False), ("3", True), ("'why'", True)])
def test_an_exit_ends_the_script(cells: ddip.Group, folder: Path, code: str, fails: bool) -> None:
    write_script(folder / "leave.py", f"import sys\nreached = 1\nsys.exit({code})\nreached = 2")
    if fails:
        with raises_on_ranks(dict.fromkeys((0, 1), "SystemExit")):
            cells.run("%diprun leave.py")
    else:
        cells.run("%diprun leave.py")
    assert values_of(cells, "reached") == [1, 1]


def test_a_script_may_set_the_start_method_each_time(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "spawns.py", "import multiprocessing\nmultiprocessing.set_start_method('spawn')")
    cells.run("import multiprocessing; before = multiprocessing.get_start_method()")  # which fixes the method
    cells.run("%diprun spawns.py")
    cells.run("%diprun spawns.py")
    cells.run("assert multiprocessing.get_start_method(allow_none=True) == before")


def test_changed_modules_of_the_script_are_imported_again(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "settings_of_test.py", "value = 1")
    os.utime(folder / "settings_of_test.py", (1e9, 1e9))  # a file as new as the run might have changed in it
    write_script(folder / "uses.py", "import settings_of_test as settings\nvalue = settings.value")
    cells.run("%diprun uses.py")
    cells.run("former = settings")
    cells.run("%diprun uses.py")
    write_script(folder / "settings_of_test.py", "value = 12345")
    cells.run("is_same = settings is former")
    cells.run("%diprun uses.py")
    assert values_of(cells, "value") == [12345, 12345] and values_of(cells, "is_same") == [True, True]


def test_scripts_and_cells_each_find_their_own_modules(cells: ddip.Group, folder: Path) -> None:
    for place in (folder, folder / "a", folder / "b"):
        write_script(place / "shared_of_test.py", f"place = {place.name!r}\nclass Net: pass")
        os.utime(place / "shared_of_test.py", (1e9, 1e9))
        write_script(place / "model_of_test.py", "from shared_of_test import Net")
        os.utime(place / "model_of_test.py", (1e9, 1e9))
        write_script(
            place / "trains.py",
            """
            import model_of_test, shared_of_test
            place, module, same = shared_of_test.place, shared_of_test, model_of_test.Net is shared_of_test.Net
            """,
        )
    for place in ("a", "b", "a", "."):
        cells.run(f"%diprun {place}/trains.py")
        name = (folder / place).resolve().name
        assert values_of(cells, "place") == [name] * 2 and values_of(cells, "same") == [True] * 2
        cells.run(f"assert {name!r} not in globals().get('former', {{}}) or former[{name!r}] is module")
        cells.run(f"former = globals().get('former', {{}}); former[{name!r}] = module")
        cells.run("import shared_of_test; place = shared_of_test.place")
        assert values_of(cells, "place") == [folder.name] * 2


def test_projects_with_equal_module_names_run_in_turn(cells: ddip.Group, folder: Path) -> None:
    for project in ("one", "two"):
        write_script(folder / project / "tool_of_projects" / "part.py", f"project = {project!r}")
        write_script(folder / project / "tool_of_projects" / "train.py", "from .part import project")
        write_script(folder / project / "lib" / "lib_of_projects.py", f"project = {project!r}")
        write_script(
            folder / project / "uses_lib.py",
            """
            import pathlib, sys
            sys.path.append(str(pathlib.Path(__file__).parent / "lib"))
            from lib_of_projects import project
            """,
        )
    for project in ("one", "two", "one"):
        cells.run(f"%diprun {project}/uses_lib.py")
        assert values_of(cells, "project") == [project] * 2
        with chdir(folder / project):
            cells.run("%diprun -m tool_of_projects.train")
        assert values_of(cells, "project") == [project] * 2


def test_changed_modules_outside_the_scripts_folder_are_imported_again(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "lib" / "library_of_test.py", "value = 1")
    write_script(
        folder / "scripts" / "uses.py",
        """
        import pathlib, sys
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
        from library_of_test import value
        """,
    )
    cells.run("%diprun scripts/uses.py")
    write_script(folder / "lib" / "library_of_test.py", "value = 12345")
    cells.run("%diprun scripts/uses.py")
    assert values_of(cells, "value") == [12345] * 2


def test_a_module_that_a_script_does_not_import_stays_for_cells(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "kept_of_test.py", "calls = []")
    write_script(folder / "scripts" / "plain.py", "import sys; hidden = 'kept_of_test' not in sys.modules")
    cells.run("import kept_of_test; kept_of_test.calls.append(1)")
    cells.run("%diprun scripts/plain.py")
    cells.run("import kept_of_test; assert kept_of_test.calls == [1] and hidden")


# -- modules


def test_a_module_runs_as_with_python_m(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "tool_of_test" / "__init__.py", "")
    write_script(folder / "tool_of_test" / "part.py", "number = 5")
    write_script(
        folder / "tool_of_test" / "train.py",
        """
        import sys
        from .part import number
        seen = number, list(sys.argv), __spec__.name, __package__, __file__, sys.path[0]
        class Made: pass
        made = Made()
        sys.exit(int(sys.argv[1]))
        """,
    )
    cells.run("%diprun -m tool_of_test.train 0")
    file = str(folder / "tool_of_test" / "train.py")
    seen = (5, [file, "0"], "tool_of_test.train", "tool_of_test", file, str(folder))
    assert values_of(cells, "seen") == [seen, seen]
    cells.run("import pickle; pickle.dumps(made)\ndel seen")
    with raises_on_ranks(dict.fromkeys((0, 1), "SystemExit")):
        cells.run("%diprun -m tool_of_test.train 4")
    assert values_of(cells, "seen")[0][1] == [file, "4"]


def test_a_package_runs_its_main_module(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "app_of_test" / "__init__.py", "")
    write_script(folder / "app_of_test" / "__main__.py", "package = __package__")
    cells.run("%diprun -m app_of_test")
    assert values_of(cells, "package") == ["app_of_test"] * 2
    (folder / "app_of_test" / "__main__.py").unlink()
    with pytest.raises(CellError, match="%diprun -m app_of_test: it is a package without a module __main__"):
        cells.run("%diprun -m app_of_test")
    with pytest.raises(CellError, match="%diprun -m gone_of_test: No module named 'gone_of_test'"):
        cells.run("%diprun -m gone_of_test")


# -- as a cell


@pytest.mark.native("sockets")
def test_errors_and_stacks_name_the_line_of_the_script(cells: ddip.Group, folder: Path) -> None:
    write_script(
        folder / "uneven.py",
        """
        import torch, torch.distributed as dist
        def meet():
            dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            raise ValueError("mine")
        meet()
        """,
    )
    with pytest.raises(CellError) as caught:
        cells.run("%diprun uneven.py")
    assert "rank 0 was blocked in all_reduce, uneven.py line 4" in str(caught.value)
    text = re.sub(r"\x1b\[[0-9;]*m", "", caught.value.by_rank[1].traceback)
    assert 'raise ValueError("mine")' in text and "script_runner" not in text


def test_variables_can_be_read_while_the_script_runs(cells: ddip.Group, folder: Path) -> None:
    write_script(
        folder / "counts.py",
        """
        import time
        step = 0
        while True:
            step += 1
            time.sleep(0.01)
        """,
    )
    cells.run("earlier = 8")
    cell = cells.start("%diprun counts.py --lr 0.1")

    def peek() -> dict[str, Any]:
        try:
            return cells.peek(["step", "earlier"])
        except TransferError:  # the script has not begun
            return {"step": 0}

    wait_until(lambda: peek()["step"] > 3)
    assert peek()["earlier"] == 8 and "step" in cells.variable_names("st")
    wait_until(lambda: re.fullmatch(r"counts.py line [56]", str(getattr(cells.stacks()[0], "place", ""))))
    assert cell.first_line == "%diprun counts.py --lr 0.1"
    cell.stop()
    assert cells.pull(["step"])["step"] > 3


def test_a_queued_script_runs_as_it_is_when_it_begins(cells: ddip.Group, folder: Path) -> None:
    write_script(folder / "edited.py", "value = 1")
    (folder / "elsewhere").mkdir()
    before = cells.start("import pathlib, time\nwhile not pathlib.Path('edited').exists(): time.sleep(0.01)")
    queued = cells.start("%diprun edited.py", queue=True)
    write_script(folder / "edited.py", "value = 12345")
    with chdir(folder / "elsewhere"):
        (folder / "edited").touch()
        before.wait()
        queued.wait()
    assert values_of(cells, "value") == [12345] * 2


# -- wrong input


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the notebook's folder with files that are no scripts, and one that is."""
    for name in ("train.py", "book.ipynb", "package/one.py"):
        write_script(tmp_path / name, "print('ran')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%diprun", r"^%diprun: type a script and its arguments, such as %diprun train.py --lr 0.1, "),
        ("%diprun trian.py", r"^%diprun trian.py: /.*/trian.py cannot be read \(No such .*; type the path of"),
        ("%diprun -m train.py", r"^%diprun -m train.py: this is a file; type %diprun train.py$"),
        ("%diprun package", r"^%diprun package: .* cannot be read \(Is a directory\)"),
        ("%diprun book.ipynb", r"^%diprun book.ipynb: this is a notebook; run its cells with %autodip on, or export"),
        ("%diprun -m", r"^%diprun -m: type a script .*, or -m and a module$"),
        ("%diprun -r 0 train.py", r"^%diprun -r: in a %%dip cell, type the options after %%dip"),
        ("%diprun 'train.py", r"^%diprun 'train.py: a quote is not closed"),
    ],
)
def test_a_line_without_a_script_is_refused(cells: ddip.Group, scripts: Path, line: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cells.run(line)


def test_code_that_is_not_python_fails_with_its_line(cells: ddip.Group, scripts: Path) -> None:
    write_script(scripts / "shell.sh", "set -e\npython train.py")
    with pytest.raises(CellError, match=r"^ranks 0, 1: SyntaxError: invalid syntax \(shell.sh, line 2\)$"):
        cells.run("%diprun shell.sh")


def test_a_script_needs_a_cell_of_its_own(cells: ddip.Group, scripts: Path) -> None:
    with pytest.raises(CellError, match="UsageError: %diprun runs a script on the ranks: type it in a cell of its own"):
        cells.run("x = 1\n%diprun train.py")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"folder": "/nowhere"}, r"FileNotFoundError: %diprun other.py: \S+ has no file /nowhere/other.py; copy the"),
        (
            {"digest": "0"},
            r"ValueError: %diprun other.py: \S+/other.py on \S+ differs from the notebook's script; copy",
        ),
    ],
)
def test_a_rank_without_the_notebooks_script_fails(
    cells: ddip.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: dict[str, str], message: str
) -> None:
    """Change what the notebook sends, as if the ranks were on another host."""
    write_script(tmp_path / "other.py", "")
    monkeypatch.chdir(tmp_path)
    find = group_module.find_script
    monkeypatch.setattr(group_module, "find_script", lambda code: {**(find(code) or {}), **script})
    with pytest.raises(CellError, match=message):
        cells.run("%diprun other.py")


def test_ranks_of_another_host_use_their_own_folder(
    cells: ddip.Group, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(folder / "own.py", "value = __file__")
    find = group_module.find_script
    monkeypatch.setattr(group_module, "find_script", lambda code: {**(find(code) or {}), "folder": "/nowhere"})
    cells.run("%diprun own.py")
    assert values_of(cells, "value") == [str(folder / "own.py")] * 2


# -- the magic


def test_the_magic_passes_words_as_a_shell_does(notebook: Notebook) -> None:
    write_script(notebook.folder / "shows.py", "import sys\nprint(sys.argv[1:])")
    notebook.ok("lr, names = 0.5, 'a b'")
    shown = notebook.ok("%diprun shows.py --lr {lr} '$x y' $names \"*.py\" sho*.py '#1' -r 9  # a comment")
    words = ["--lr", "0.5", "$x y", "a", "b", "*.py", "shows.py", "#1", "-r", "9"]
    assert shown.stdout == f"{words}\n"
    assert notebook.ok("%%dip -S 2\n%diprun shows.py 5").stdout == "['5']\n"
    notebook.ok("%autodip on")
    assert notebook.ok("%diprun shows.py 6").stdout.startswith("['6']\n")


@pytest.mark.slow
def test_the_magic_has_the_usual_options_of_cells(notebook: Notebook) -> None:
    write_script(
        notebook.folder / "ranks.py", "import os, sys, time\nprint(os.environ['RANK'])\ntime.sleep(float(sys.argv[1]))"
    )
    assert notebook.ok("%diprun -r 1,2 -S 2 ranks.py 0").stdout == "2\n"
    assert notebook.fails("%diprun --timeout 1 ranks.py 1000").error == "CellTimeout"
    begun = notebook.ok("%diprun --bg ranks.py 1000")
    notebook.ok(f"%dipstop {begun.number}")
    row = rf"{begun.number} .* stopped, in the background .* %diprun ranks.py 1000"
    assert re.search(row, notebook.ok("%dipcells").stdout)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%diprun --nproc-per-node 2 a.py", "%diprun --nproc-per-node: the group's ranks run the script, so leave it"),
        ("%diprun -x a.py", r"%diprun -x: unrecognized arguments: -x; %diprun\? lists the options"),
        ("%diprun \u2013r 0 a.py", "%diprun \u2013r: type %diprun -r$"),
        ("%diprun -r 9 a.py", "-r 9: there is no rank 9; this group has ranks 0 to 2"),
        ("%diprun --help", r"%diprun --help: type %diprun\? for its options and examples"),
        ("%diprun 'a.py", "%diprun 'a.py: a quote is not closed"),
        ("%diprun a.py", r"a.py cannot be read \(No such file"),
        ("lines = 'a\\nb'\n%diprun a.py '{lines}'", "an argument has several lines; write them to a file"),
    ],
)
def test_wrong_options_of_the_magic_are_refused(notebook: Notebook, line: str, message: str) -> None:
    shown = notebook.fails(line)
    assert shown.error == "BadInput" and re.search(message, shown.message)


def test_a_breakpoint_in_a_script_stops_there(notebook: Notebook) -> None:
    write_script(
        notebook.folder / "stops.py",
        """
        def double(x):
            breakpoint()
            return 2 * x
        y = double(4)
        """,
    )
    seen = notebook.converse("%diprun -r 0 stops.py", "p x + 70", "n", "n", "n")
    assert "stops.py" in seen.text and "74" in seen.text and "contextlib" not in seen.text
    assert "8" in notebook.ok("%dipull y\nprint(y)").stdout
