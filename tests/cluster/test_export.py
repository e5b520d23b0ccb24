"""``%dipexport`` in a real notebook, and its scripts under torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

import ddip
from ddip.protocol import on_rank

from .notebook import Notebook
from .variants import few

TRAINING = """\
%%dip
for step in range(steps):
    x = noisy(torch.randn(8, 3))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[-1]:.4f}")
"""
SESSION = [
    """\
%%dip
import random

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def noisy(x, scale=0.1):
    return x + scale * torch.randn_like(x) + random.random() + np.random.rand() * rate
""",
    "%%dip --param\nrate, steps = 0.05, 3\nlr = 0.01",
    "targets = [1.0, 2.0]\ntargets.append(3.0)",
    "%dipush targets",
    """\
%%dip
model = DDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=lr)
losses = targets[:1]
""",
    TRAINING,
    TRAINING,
    "%%dip -r 1\nlosses.append(random.random())",
    "%%dip\nlosses[-1]",
    "%%dip\nunused = 1\nempty = []",
]
"""A training without seeds: the script has the random states of the ranks' start."""


def restart(notebook: Notebook) -> None:
    """Start a new session of two ranks."""
    notebook.ok("%autodip off\n%makedip -n 2\n%makedip -r")


@pytest.fixture(scope="module")
def notebook(shared_notebook: Notebook) -> Iterator[Notebook]:
    """Return the shared notebook, whose sessions are of these tests until their end."""
    yield shared_notebook
    shared_notebook.ok("%autodip off\n%makedip -n 3")


@pytest.fixture(scope="module")
def trained(notebook: Notebook) -> Notebook:
    """Run the session on two new ranks."""
    restart(notebook)
    for cell in SESSION:
        notebook.ok(cell)
    notebook.fails("%%dip\nlosess")
    return notebook


def script_in(notebook: Notebook, name: str = "train.py") -> str:
    return (notebook.folder / name).read_text()


@pytest.mark.grid(in_ci=True)
def test_the_script_gives_the_numbers_of_the_session(trained: Notebook) -> None:
    shown = trained.ok("%dipexport train.py --force --check model optimizer losses").stdout
    assert "ddip: train.py gives the session's values: " in shown
    assert "compared, largest difference 0\n" in shown


@pytest.mark.slow
def test_ruff_finds_nothing(trained: Notebook) -> None:
    pytest.importorskip("ruff", reason="only the environments of make test and make check have ruff")
    trained.ok("%dipexport clean.py --force")
    command = [sys.executable, "-m", "ruff", "check", str(trained.folder / "clean.py")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=trained.folder)
    assert (found.returncode, found.stdout) == (0, "All checks passed!\n")


def test_failed_and_idle_cells_are_comments(trained: Notebook) -> None:
    trained.ok("%dipexport train.py --force")
    text = script_in(trained)
    assert text.count("optimizer.step()") == 2
    assert "is left out: it failed: NameError: name 'losess' is not defined\n    #     losess" in text
    assert "is left out: nothing later reads this empty, unused\n    #     unused = 1" in text
    assert text.index("import torch\n") < text.index("def noisy") < text.index("def main")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("%dipexport", "%dipexport: type the name of the script, such as %dipexport train.py"),
        ("%dipexport train", "%dipexport train: type a name that ends with .py, such as %dipexport train.py"),
        ("%dipexport random.py", "%dipexport random.py: such a script would hide the module random"),
        ("%dipexport no/such/train.py", "%dipexport no/such/train.py: files cannot be written to the folder no/such"),
        ("%dipexport other.py --cells 99999", "--cells 99999: no cell 99999 has run since the group started"),
        ("%dipexport other.py --cells x", "--cells x: type numbers of cells, such as --cells 3-9,12"),
        ("%dipexport other.py --check modle", "--check modle: rank 0 has no variable modle; type --check model"),
        ("%dipexport other.py --check noisy", "--check noisy: a function has no values to compare, on rank 0"),
        ("%dipexport other.py --check empty", "--check empty: it contains no value to compare; name another variable"),
        ("%dipexport other.py --check --partial", "--check --partial: a partial script fails where a part is refused"),
    ],
)
def test_invalid_input_is_refused(trained: Notebook, typed: str, message: str) -> None:
    refused = trained.run(typed)
    assert refused.error == "BadInput"
    assert refused.message.startswith(message)
    assert not Path(trained.folder, "other.py").exists()


def test_modules_that_torch_has_written_count_as_unchanged(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run(f"""
        import pathlib, sys, types
        names = ["_remote_module_x", "torch._inductor.runtime.compile_tasks.x", "module_of_mine"]
        for name in names:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__file__ = {str(tmp_path)!r} + f"/{{name}}.py"
            pathlib.Path(sys.modules[name].__file__).touch()
    """)
    ((*_, changed),) = cells.ranks.ask([0], on_rank.start_facts())
    cells.run("for name in names: del sys.modules[name]")
    assert "module_of_mine.py" in changed  # as other modules of earlier tests may be
    assert not {"_remote_module_x.py", "torch._inductor.runtime.compile_tasks.x.py"}.intersection(changed)


def test_job_files_are_written_beside_the_script(trained: Notebook) -> None:
    shown = trained.ok("%dipexport jobs.py --slurm --k8s --data").stdout
    assert "wrote jobs.sbatch" in shown and "wrote jobs.yaml" in shown
    for suffix in (".sbatch", ".yaml"):
        assert "jobs.py" in Path(trained.folder, f"jobs{suffix}").read_text()
    Path(trained.folder, "jobs.py").unlink()
    Path(trained.folder, "jobs.data.pickle").write_text("mine")
    for option, name in (("--k8s", "jobs.yaml"), ("--slurm", "jobs.sbatch"), ("--data", "jobs.data.pickle")):
        refused = trained.run(f"%dipexport jobs.py {option}").message
        assert refused == f"%dipexport: the file {name} exists; --force overwrites it"
    assert not Path(trained.folder, "jobs.py").exists()
    for path in Path(trained.folder).glob("jobs.*"):
        path.unlink()


def test_only_force_overwrites_a_file(trained: Notebook) -> None:
    Path(trained.folder, "mine.py").write_text("mine")
    assert trained.run("%dipexport mine.py").message == "%dipexport: the file mine.py exists; --force overwrites it"
    assert script_in(trained, "mine.py") == "mine"
    trained.ok("%dipexport mine.py --force")
    assert "def main" in script_in(trained, "mine.py")


def test_code_without_a_translation_is_named(trained: Notebook) -> None:
    Path(trained.folder, "other_script.py").write_text("pass")
    trained.ok("%%dip\n%run other_script.py")
    number = trained.ok("%dipcells").number - 1
    refused = trained.run("%dipexport partial.py")
    assert f"cell {number}: %run other_script.py" in refused.message
    assert not Path(trained.folder, "partial.py").exists()
    trained.ok("%dipexport partial.py --partial")
    assert f"raise NotImplementedError('cell {number}: %run other_script.py')" in script_in(trained, "partial.py")


@pytest.mark.grid
def test_code_that_no_script_can_contain_is_named(notebook: Notebook) -> None:
    restart(notebook)
    notebook.ok("%%dip\nif rank < 5:\n    n: int = 3\nx = n")
    refused = notebook.fails("%dipexport annotated.py").message
    assert refused.startswith("%dipexport annotated.py: not written, since a script cannot contain 'n: int = 3': ")
    assert not Path(notebook.folder, "annotated.py").exists()


REFUSED = {
    "a failed cell": ["%%dip\nx = torch.rand(2)", "!%%dip\nx.add_(1)\n1 / 0", "%%dip\ny = x.sum()"],
    "a stopped cell": ["%%dip\nx = torch.rand(2)", "!%%dip --timeout 1\nimport time\nx += 1\ntime.sleep(60)"],
    "another number of ranks": ["%%dip\nx = torch.rand(2)", "%makedip -n 1", "%%dip\nx += 1", "%makedip -n 2"],
    "copied state": ["%%dip\nx = torch.rand(2)", "%dipsync x", "%%dip\nx += 1"],
    "a background cell at the same time": [
        "%%dip -r 0 --bg\nimport time\nx = 1\nwhile not __import__('os').path.exists('go'): time.sleep(0.01)",
        "%%dip -r 1\nx = 2\nopen('go', 'w').close()",
        "%dipwait",
    ],
    "pushed code": ["f = lambda x: x + 1", "%dipush f", "%%dip\nx = f(1)"],
    "input": ["%%dip\nx = 1 if rank < 5 else input()"],
    "entropy of the system": ["%%dip\nimport numpy as np\nx = np.random.default_rng().random()"],
    "globals": ["%%dip\nx = len(globals())"],
}
"""Sessions that ddip does not export; a cell with ! fails."""
REASONS = {
    "a failed cell": "it failed (ZeroDivisionError: division by zero) and may have changed variables",
    "a stopped cell": "it failed (",
    "another number of ranks": "%makedip changed the group from 2 to 1 ranks",
    "copied state": "%dipsync copied state of rank 0",
    "a background cell at the same time": "it ran at the same time as cell",
    "pushed code": "%dipush f: it contains code of the notebook; create it in a %%dip cell",
    "input": "a script does not repeat what was typed at input()",
    "entropy of the system": "default_rng() draws from the system's entropy",
    "globals": "globals finds other variables in a script",
}


@pytest.mark.parametrize("case", few(REFUSED, "a failed cell"))
def test_a_session_that_may_differ_is_refused(notebook: Notebook, case: str) -> None:
    restart(notebook)
    notebook.ok("%%dip\nimport torch")
    for cell in REFUSED[case]:
        (notebook.fails if cell[0] == "!" else notebook.ok)(cell.removeprefix("!"))
    refused = notebook.fails("%dipexport refused.py")
    assert REASONS[case] in refused.message
    assert not Path(notebook.folder, "refused.py").exists()
    notebook.ok("%dipexport refused.py --partial")
    assert "raise NotImplementedError" in script_in(notebook, "refused.py")
    Path(notebook.folder, "refused.py").unlink()


@pytest.mark.grid(in_ci=True)
def test_a_check_decides_about_a_failed_cell(notebook: Notebook) -> None:
    restart(notebook)
    notebook.ok("%%dip\nimport torch\nx = torch.rand(2)")
    notebook.fails("%%dip\ny = x + 1\n1 / 0")
    shown = notebook.ok("%dipexport failed.py --check x").stdout
    assert "largest difference 0\nddip: other values may differ: cell " in shown
    assert "x = torch.rand(2)" in script_in(notebook, "failed.py")
    notebook.fails("%%dip\ntorch.rand(2)\n1 / 0")
    notebook.ok("%%dip\nx = torch.rand(2)")
    refused = notebook.fails("%dipexport other.py --check x")
    assert (
        "other.py was not written, since it does not give the session's x on rank 0: the difference" in refused.message
    )
    assert not Path(notebook.folder, "other.py").exists()
    notebook.fails("%dipexport other.py --check")  # no module


@pytest.mark.grid
def test_pushed_values_are_those_of_the_push(notebook: Notebook) -> None:
    restart(notebook)
    notebook.ok("import numpy as np\nrow = np.random.rand(300)")
    notebook.ok("%dipush row")
    notebook.ok("row *= 2\nbatch = 7")
    notebook.ok("%dipush row batch\n%dipush -r 1 batch")
    notebook.ok("%%dip\ntotal = row.sum() + batch")
    assert (
        "%dipush row: its value cannot be written as Python code; --data stores it"
        in notebook.fails("%dipexport a.py").message
    )
    assert "largest difference 0\n" in notebook.ok("%dipexport data.py --data --check total row").stdout
    assert Path(notebook.folder, "data.data.pickle").exists()


ROUND_TRIP = """\
import torch

torch.manual_seed(3)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def step():
    optimizer.zero_grad()
    net(torch.rand(4, 2)).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    step()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.grid
def test_a_script_survives_a_round_trip(notebook: Notebook) -> None:
    restart(notebook)
    Path(notebook.folder, "first.py").write_text(ROUND_TRIP)
    notebook.ok("%diprun first.py")
    notebook.ok(
        "%%dip\nimport torch.distributed as dist\nstep()\nfor p in net.parameters():\n    dist.all_reduce(p.data)"
    )
    assert "largest difference 0\n" in notebook.ok("%dipexport second.py --check net").stdout
    restart(notebook)
    notebook.ok("%diprun second.py")
    notebook.ok("%%dip\nstep()\nmean = net.weight.mean().item()")
    assert "largest difference 0\n" in notebook.ok("%dipexport third.py --check net mean").stdout
    Path(notebook.folder, "second.py").write_text("x = 1")
    refused = notebook.fails("%dipexport fourth.py")
    assert "%diprun second.py, which has changed since" in refused.message


ORDERED = [
    "%%dip\nimport pathlib, time, torch\nimport matplotlib.pyplot as plt\nimport torch.distributed as dist",
    "%%dip -r 0\ntime.sleep(0.5)\npathlib.Path('made.txt').write_text('3')",
    "%%dip\na = float(pathlib.Path('made.txt').read_text())",
    "%%dip -r 1\npathlib.Path('made.txt').unlink()",
    "%%dip\nplt.plot([1])",
    "%%dip\nb = len(plt.get_fignums())\nplt.plot([1])\nplt.show()\nb += len(plt.get_fignums())",
    "%%dip\ndist.destroy_process_group()",
    "%%dip\nc = torch.ones(1)\ndist.all_reduce(c)",
    "%%dip\ndef size_of(group=dist.group.WORLD):\n    return group.size()\nd = size_of()\ndel size_of",
    "%dipull c\ndisplay(c)",
]
"""Cells that need the end of the former ones on all ranks, without figures and with the group."""


@pytest.mark.grid(in_ci=True)
def test_cells_of_the_script_begin_as_in_the_session(notebook: Notebook) -> None:
    pytest.importorskip("matplotlib", reason="the environments of other platforms have no matplotlib")
    restart(notebook)
    for cell in ORDERED:
        notebook.ok(cell)
    assert "4 compared, largest difference 0\n" in notebook.ok("%dipexport ordered.py --check a b c d").stdout
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ordered.py"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=notebook.folder)
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["tensor([2.])"]), ran.stderr + script_in(
        notebook, "ordered.py"
    )


ODD = [
    "%autodip on",
    "import os\nimport torch\nimport random",
    "%cd odd",
    "%env ODD_RATE=0.5",
    "import helpers  # draws a number\na = torch.rand(2) * float(os.environ['ODD_RATE'])",
    "%%dip -r 0\nb = torch.rand(1)\nc = random.random()",
    "%%dip -r 1\nc = 2.0",
    "def f():\n    return rate * c\nrate = 2",
    "d = f()",
    "rate = 3",
    "d += f()",
    "%time e = [torch.rand(1).item() for _ in range(3)]",
    "files = !ls\ncount = len(files)" if "getoutput" in TransformerManager().transform_cell("a = !ls") else "count = 1",
    "stream = iter(torch.rand(6).tolist())\nnext(stream)",
    "g = next(stream)",
    "torch.Tensor.half_sum = lambda self: self.sum() / 2\nh = a.half_sum()",
    "del rate",
    "def seeded():\n    torch.manual_seed(3 + rank)\n    return torch.rand(1)",
    "i = seeded() + torch.rand(1)",
    "if __name__ == '__main__':\n    j = torch.rand(1)",
    "missing",
    "%%dip local\nimport random\nk = random.random()",
    "%dipush k",
    "k *= 2",
    "%%dip local\nk = 'changed'",
    "%dipush k",
    "k += str(rank)",
    "%%time\nm = torch.rand(2)",
    "%%dip --bg\nm *= 2",
    "%dipwait",
    "import sys\nclass Data(torch.utils.data.Dataset):\n    def __len__(self):\n        return 4\n\n"
    "    def __getitem__(self, index):\n        return torch.rand(1)\n",
    "loader = torch.utils.data.DataLoader(Data(), 2, True, num_workers=1, multiprocessing_context='fork')\n"
    "n = torch.cat(list(loader))",
    "%autodip off",
]
"""Code that is easy to export wrongly. IPython 7 cannot read ``a = !ls`` on Python 3.12 and later."""


@pytest.mark.grid(in_ci=True)
def test_an_odd_session_gives_equal_values(notebook: Notebook) -> None:
    restart(notebook)
    folder = notebook.folder / "odd"
    folder.mkdir(exist_ok=True)
    (folder / "helpers.py").write_text("import torch\n\nfirst = torch.rand(1)\n")
    try:
        for cell in ODD:
            (notebook.fails if cell == "missing" else notebook.ok)(cell)
        shown = notebook.ok("%dipexport odd.py --check a c d e count g h i j k m n").stdout
        assert "largest difference 0\n" in shown
        assert "unchanged" not in shown
    finally:
        notebook.ok("%cd ..")
