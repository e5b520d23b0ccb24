"""A rank can do what any Python process can, forked or spawned."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import ddip
from ddip.group.members.placement import Request

from .leftovers import family_of, with_title
from .notebook import Notebook
from .rank_errors import raises_on_ranks


def found_on_ranks(group: ddip.Group, code: str) -> list[object]:
    """Run `code` on every rank, and return its variable ``found``."""
    group.run(code, show_ranks=[])
    return [values["found"] for values in group.pull_all(["found"], range(group.world_size))[0]]


def test_each_rank_has_its_own_random_numbers() -> None:
    with ddip.Group(2) as group:
        for code in (
            "import random; found = random.random()",
            "import numpy; found = numpy.random.rand()",
            "import torch; found = torch.rand(1).item()",
            "found = torch.initial_seed()",
        ):
            first, second = found_on_ranks(group, code)
            assert first != second


def test_the_process_looks_freshly_started() -> None:
    code = (
        "import os, signal, sys, threading\n"
        "names = [name for name in os.environ if name.startswith(('DDIP', 'SPT_'))]  # the mark of what a rank starts\n"
        "handlers = [signal.getsignal(s) for s in (signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1)]\n"
        "found = (sys.argv, names, [h == signal.SIG_DFL for h in handlers], signal.pthread_sigmask(0, []),\n"
        "         threading.current_thread() is threading.main_thread(), os.read(0, 1), os.getsid(0) == os.getpid())"
    )
    # Under nohup SIGHUP is ignored, and spawned processes inherit that
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with ddip.Group(2) as group:
        signal.signal(signal.SIGHUP, former)
        names = [name for name in os.environ if name.startswith("DDIP")]  # variables of the tests
        assert found_on_ranks(group, code) == [([""], [*names, "DDIP_MARK"], [True] * 3, set(), True, b"", True)] * 2
        pythonpath = found_on_ranks(group, "found = os.environ.get('PYTHONPATH')")
    assert pythonpath == [os.environ.get("PYTHONPATH")] * 2


def test_no_rank_holds_foreign_descriptors(cells: ddip.Group) -> None:
    """A rank has no sockets or pipes of the preload process or of other ranks."""
    code = (
        "import glob, os\n"
        "links = [os.readlink(fd) for fd in glob.glob('/proc/self/fd/*') if os.path.lexists(fd)]\n"
        "found = sorted(link for link in links if link.startswith(('socket', 'pipe')))"
    )
    first, second = found_on_ranks(cells, code)
    assert not set(first) & set(second)  # type: ignore[call-overload]


def test_the_cpu_threads_of_every_library_are_shared_out(cells: ddip.Group) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    code = "import numpy, threadpoolctl; found = {lib['num_threads'] for lib in threadpoolctl.threadpool_info()}"
    assert found_on_ranks(cells, code) == [{share}] * 2


def test_a_rank_may_take_more_threads(cells: ddip.Group) -> None:
    code = (
        "import torch\nshare = torch.get_num_threads()\ntorch.set_num_threads(2)\n"
        "x = torch.ones(512, 512)\nfound = ((x @ x).sum().item(), torch.get_num_threads())\n"
        "torch.set_num_threads(share)"
    )
    assert found_on_ranks(cells, code) == [(512.0**3, 2)] * 2


@pytest.mark.grid
def test_a_remaining_rank_gets_a_new_share_of_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    code = "import torch, os; torch.ones(512, 512) @ torch.ones(512, 512)\n"
    code += "found = (torch.get_num_threads(), int(os.environ['OMP_NUM_THREADS']))"
    with ddip.Group(1) as group:
        assert found_on_ranks(group, code) == [(cores, cores)]
        group.change(Request(n=2))
        assert found_on_ranks(group, code) == [(max(1, cores // 2),) * 2] * 2


@pytest.mark.parametrize(
    ("method", "workers"),
    [("fork", 2), *(pytest.param(method, 1, marks=pytest.mark.grid) for method in ("spawn", "forkserver"))],
)
def test_data_loaders_have_workers(cells: ddip.Group, method: str, workers: int) -> None:
    code = (
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(20))\n"
        f"loader = DataLoader(data, 4, num_workers={workers}, multiprocessing_context={method!r})\n"
        "found = [x.tolist() for (x,) in loader]"
    )
    assert found_on_ranks(cells, code) == [[list(range(i, i + 4)) for i in range(0, 20, 4)]] * 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_works(cells: ddip.Group, method: str) -> None:
    code = (
        "import math, multiprocessing\n"
        f"with multiprocessing.get_context({method!r}).Pool(2) as pool: found = pool.map(math.sqrt, [4, 9])"
    )
    assert found_on_ranks(cells, code) == [[2.0, 3.0]] * 2


def test_a_process_that_a_cell_forks_can_be_terminated(cells: ddip.Group) -> None:
    """The engine's own SIGTERM handler would only wake the child up."""
    code = (
        "import multiprocessing, time\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)); child.start()\n"
        "child.terminate(); child.join(); found = child.exitcode"
    )
    assert found_on_ranks(cells, code) == [-15, -15]


def test_an_interrupt_during_a_fork_keeps_later_processes_stoppable(cells: ddip.Group) -> None:
    """Interrupt between two steps that ddip takes before each fork; Python continues with the fork."""
    code = (
        "import _thread, multiprocessing, os, signal, time\n"
        "def ring(*_): raise InterruptedError\n"
        "def mask(*args, former=signal.pthread_sigmask):\n"
        "    found = former(*args); _thread.interrupt_main(signal.SIGALRM); return found\n"
        "handler, former = signal.signal(signal.SIGALRM, ring), signal.pthread_sigmask\n"
        "signal.pthread_sigmask = mask\n"
        "try: pid = os.fork()\n"
        "finally: signal.pthread_sigmask = former\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0); signal.signal(signal.SIGALRM, handler)\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)); child.start()\n"
        "child.terminate(); child.join(5); found = child.exitcode; child.kill()"
    )
    assert found_on_ranks(cells, code) == [-15, -15]


def test_subprocesses_work(cells: ddip.Group) -> None:
    code = (
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-c', 'import sys; print(6 * 7); sys.exit(3)'], capture_output=True)\n"
        "found = (done.returncode, done.stdout.strip())"
    )
    assert found_on_ranks(cells, code) == [(3, b"42")] * 2


def test_training_with_ddp_works(cells: ddip.Group) -> None:
    code = (
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.full((2, 4), rank + 1.0)).sum().backward(); optimizer.step()\n"
        "found = model.module.weight.tolist()"
    )
    first, second = found_on_ranks(cells, code)
    assert first == second


@pytest.mark.grid
def test_torch_compile_works(cells: ddip.Group) -> None:
    """``tests/system/test_compile.py`` has a C++ compiler behind it."""
    cells.run("""
        import torch
        @torch.compile(backend='aot_eager')
        def f(x): return (x * 2).relu() + 1
        assert f(torch.tensor([-1.0, 3.0])).tolist() == [1.0, 7.0]
    """)


@pytest.mark.grid
def test_matplotlib_draws(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run(f"""
        import matplotlib.pyplot as plt
        plt.plot([1, 2, 3])
        plt.savefig({str(tmp_path)!r} + f'/{{rank}}.png'); plt.close()
    """)
    assert [(tmp_path / f"{rank}.png").read_bytes()[:4] for rank in (0, 1)] == [b"\x89PNG"] * 2


def test_signals_reach_a_rank(cells: ddip.Group) -> None:
    code = (
        "import os, signal\nfound = []\n"
        "former = signal.signal(signal.SIGUSR1, lambda number, frame: found.append(number))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nsignal.signal(signal.SIGUSR1, former)\nfound = [int(s) for s in found]"
    )
    assert found_on_ranks(cells, code) == [[10], [10]]


def test_every_rank_has_its_own_log(cells: ddip.Group) -> None:
    cells.run("import os; os.write(2, f'from the file descriptor of rank {rank}\\n'.encode())")
    for rank, member in enumerate(cells.members):
        lines = cells.cluster.log_tail(member.engine)
        assert [line for line in lines if "descriptor" in line] == [f"from the file descriptor of rank {rank}"]


def test_a_crash_leaves_its_stack_in_the_log() -> None:
    with ddip.Group(1) as group:
        with raises_on_ranks({0: "RankEnded"}) as caught:
            group.run("import ctypes\nctypes.string_at(0)")
        assert "SIGSEGV" in caught.value.by_rank[0].message
        assert "string_at" in caught.value.by_rank[0].traceback


@pytest.mark.grid
def test_ps_shows_the_role_of_each_process(new_notebook: Callable[[], Notebook]) -> None:
    notebook = new_notebook()
    notebook.ok("""
        import os; os.environ['JPY_SESSION_NAME'] = '/home/me/lesson 1.ipynb'
        %load_ext ddip
        %makedip -n 2
    """)
    for title in ("rank 0 of 2", "rank 1 of 2", "controller"):
        assert with_title(family_of(notebook.pid), f"ddip {title} (lesson 1.ipynb)")
    notebook.ok("%makedip -n 1")
    assert len(with_title(family_of(notebook.pid), "ddip rank")) == 1
    assert with_title(family_of(notebook.pid), "ddip rank 0 of 1 (lesson 1.ipynb)")


def test_the_preload_process_touches_no_gpu(cells: ddip.Group) -> None:
    code = (
        "import glob, os, torch\n"
        "links = [os.readlink(fd) for fd in glob.glob('/proc/self/fd/*') if os.path.lexists(fd)]\n"
        "found = (torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), [x for x in links if 'nvidia' in x])"
    )
    assert found_on_ranks(cells, code) == [(False, False, [])] * 2


def test_a_rank_looks_like_a_notebooks_kernel(cells: ddip.Group) -> None:
    """rich, fastcore and others check the name of this class."""
    cells.run("assert type(get_ipython()).__name__ == 'ZMQInteractiveShell'")
