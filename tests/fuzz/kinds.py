"""The code of the fuzzer's cells. `n` is a number that no other cell has, and `who` is a rank.

Values depend on `n`, so a collective that meets a former one gives a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass

KNOWN: dict[str, str] = {}
"""Kinds that are not drawn because of a known bug, with its entry in the issues."""

WORK = {
    "all_reduce": """
x = torch.full((5,), float(rank + n)); dist.all_reduce(x)
assert x.tolist() == [float(sum(r + n for r in range(world_size)))] * 5, x""",
    "all_reduce of 4 MB": """
x = torch.full((1 << 20,), float(rank + n)); dist.all_reduce(x)
assert x[0] == x[-1] == sum(r + n for r in range(world_size)), x""",
    "all_reduce of nothing": "x = torch.empty(0); dist.all_reduce(x); assert x.tolist() == []",
    "all_reduce, max": """
x = torch.tensor([rank + n]); dist.all_reduce(x, dist.ReduceOp.MAX); assert x == world_size - 1 + n""",
    "barrier": "dist.barrier()",
    "monitored_barrier": "dist.monitored_barrier()",
    "broadcast": "x = torch.tensor([n if rank == 1 else -1]); dist.broadcast(x, 1); assert x == n, x",
    "broadcast_object_list": """
x = [{n: "x"} if rank == who else None]; dist.broadcast_object_list(x, who); assert x == [{n: "x"}], x""",
    "all_gather": """
x = [torch.zeros(2) for _ in range(world_size)]; dist.all_gather(x, torch.full((2,), float(rank + n)))
assert [y[1].item() for y in x] == [r + n for r in range(world_size)], x""",
    "all_gather_object": """
x = [None] * world_size; dist.all_gather_object(x, (rank, n)); assert x == [(r, n) for r in range(world_size)], x""",
    "gather": """
x = [torch.zeros(1) for _ in range(world_size)] if rank == who else None; dist.gather(torch.tensor([float(n)]), x, who)
assert x is None or x == [n] * world_size, x""",
    "reduce": """
x = torch.tensor([n]); dist.reduce(x, who); assert rank != who or x == n * world_size, x""",
    "scatter": """
x, parts = torch.zeros(1), [torch.tensor([float(r + n)]) for r in range(world_size)]
dist.scatter(x, parts if rank == who else None, who)
assert x == rank + n, x""",
    "reduce_scatter": """
x = torch.zeros(1); dist.reduce_scatter(x, [torch.tensor([float(r + n)]) for r in range(world_size)])
assert x == (rank + n) * world_size, x""",
    "all_to_all": """
x = torch.zeros(world_size); dist.all_to_all_single(x, torch.arange(float(world_size)) + rank * 100 + n)
assert x.tolist() == [r * 100.0 + rank + n for r in range(world_size)], x""",
    "send, recv": """
x = torch.tensor([n])
if rank == 0: dist.send(x, 1)
elif rank == 1: x.zero_(); dist.recv(x, 0); assert x == n, x
dist.barrier()""",
    "isend, irecv": """
x, y = torch.tensor([n + rank]), torch.zeros(1, dtype=torch.int64)
works = [dist.isend(x, (rank + 1) % world_size), dist.irecv(y, (rank - 1) % world_size)]
for w in works: w.wait()
assert y == n + (rank - 1) % world_size, y""",
    "batch_isend_irecv": """
x, y = torch.tensor([n + rank]), torch.zeros(1, dtype=torch.int64)
ops = [dist.P2POp(dist.isend, x, (rank + 1) % world_size), dist.P2POp(dist.irecv, y, (rank - 1) % world_size)]
for w in dist.batch_isend_irecv(ops): w.wait()
assert y == n + (rank - 1) % world_size, y""",
    "DDP": """
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(n)
model = DDP(torch.nn.Linear(4, 2))
model(torch.full((3, 4), float(rank))).sum().backward()
assert model.module.weight.grad[0, 0] == 3 * sum(range(world_size)) / world_size""",
    "FSDP": """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)); fully_shard(model)
model(torch.full((3, 4), float(rank))).sum().backward()
assert model[1].bias.grad.full_tensor().tolist() == [3.0, 3.0]""",
    "subgroup of all": """
x = torch.tensor([n + rank]); dist.all_reduce(x, group=dist.new_group(list(range(world_size))))
assert x == sum(r + n for r in range(world_size)), x""",
    "subgroup of two": """
pair, x = dist.new_group([0, 1]), torch.tensor([n + rank])
if rank < 2: dist.all_reduce(x, group=pair); assert x == 2 * n + 1, x""",
    "subgroup of each": """
x = torch.tensor([n])
for r in range(world_size):
    g = dist.new_group([r])
    if r == rank: dist.all_reduce(x, group=g)
assert x == n
dist.barrier()""",
    "a subgroup that is destroyed": """
g, x = dist.new_group(), torch.tensor([n]); dist.all_reduce(x, group=g); dist.destroy_process_group(g)
assert x == n * world_size; dist.barrier()""",
    "device mesh": """
from torch.distributed.device_mesh import init_device_mesh
x = torch.tensor([n]); dist.all_reduce(x, group=init_device_mesh("cpu", (world_size,)).get_group())
assert x == n * world_size, x""",
    "functional all_reduce": """
import torch.distributed._functional_collectives as functional
x = functional.all_reduce(torch.tensor([n]), "sum", list(range(world_size))) + 0; assert x == n * world_size, x""",
    "async, waited": """
x = torch.tensor([n]); w = dist.all_reduce(x, async_op=True); w.wait(); assert x == n * world_size, x""",
    "three async, waited in turn": """
xs = [torch.tensor([n + i]) for i in range(3)]; ws = [dist.all_reduce(x, async_op=True) for x in xs]
for w in ws: w.wait()
assert xs == [(n + i) * world_size for i in range(3)], xs""",
    "thirty all_reduces": """
for i in range(30):
    x = torch.tensor([n + i]); dist.all_reduce(x); assert x == (n + i) * world_size, x""",
    "store": """
s = torch.distributed.distributed_c10d._get_default_store()
if rank == 0: s.set(f"fuzz{n}", str(n))
assert s.get(f"fuzz{n}") == str(n).encode(); dist.barrier()""",
    "all_reduce in a thread": """
from concurrent.futures import ThreadPoolExecutor
x = torch.tensor([n])
with ThreadPoolExecutor(1) as pool: pool.submit(dist.all_reduce, x).result()
assert x == n * world_size, x""",
}
"""Collectives of all ranks, as the body of a function ``work``; ranks end in step."""

ALONE = {
    "nothing": "pass",
    "data loader": """
data = torch.utils.data.TensorDataset(torch.arange(6) + n)
assert sum(b.sum().item() for b, in torch.utils.data.DataLoader(data, 2, num_workers=1)) == 15 + 6 * n""",
    "data loader of two workers, left early": """
for b in torch.utils.data.DataLoader(torch.arange(1000), num_workers=2): break""",
    "a data loader that is kept": """
loader = torch.utils.data.DataLoader(torch.arange(8), 2, num_workers=1, persistent_workers=True)
batches = iter(loader); assert next(batches).tolist() == [0, 1]""",
    "a thread that goes on": """
def talk():
    for i in range(20): time.sleep(0.01); print("late", i)
threading.Thread(target=talk).start()""",
    "a thread that raises later": "threading.Timer(0.02, lambda: 1 / 0).start()",
    "a thread with a running all_reduce of one's own group": """
g, x = dist.new_group(), torch.tensor([n])
t = threading.Thread(target=lambda: (time.sleep(0.02), dist.all_reduce(x, group=g))); t.start(); t.join()
assert x == n * world_size""",
    "asyncio task": """
import asyncio
async def later(): await asyncio.sleep(0.05)
task = asyncio.ensure_future(later())""",
    "await": "import asyncio\nawait asyncio.sleep(0.01)",
    "await a task of a former cell": """
import asyncio
async def number(): return n
assert await asyncio.gather(number(), number()) == [n, n]""",
    "subprocess": """
import subprocess
assert subprocess.run(['echo', str(n)], capture_output=True).stdout == b'%d\\n' % n""",
    "a subprocess that goes on": "import subprocess; child = subprocess.Popen(['sleep', '1'])",
    "a fork": """
pid = os.fork()
if pid == 0: os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5""",
    "multiprocessing": """
import multiprocessing
def double(x): return 2 * x
ends = signal.signal, (signal.SIGTERM, signal.SIG_DFL)  # by which the pool ends its process; a cell may have ignored it
with multiprocessing.get_context("fork").Pool(1, *ends) as pool: assert pool.map(double, [n]) == [2 * n]""",
    "sys.stdout is closed": "sys.stdout.close()",
    "sys.stdout is None": "sys.stdout = None",
    "sys.stdout raises": """
class Bad:
    def write(self, text): raise OSError("full")
    flush = write
sys.stdout = sys.stderr = Bad()""",
    "sys.stdout is a file": "sys.stdout = open(os.devnull, 'w')",
    "sys.stdout is ours again": "sys.stdout = sys.__stdout__",
    "%%capture": """
from IPython.utils.capture import capture_output
with capture_output() as c: print(n)
assert str(n) in c.stdout""",
    "%time": "%time x = n",
    "%timeit": "%timeit -n1 -r1 pass",
    "%reset_selective": "%reset_selective -f ^(x|y|w|model|loader|batches)$",
    "%xdel": "x = n\n%xdel x",
    "much output": "for i in range(3000): print(i, 'x' * 50)",
    "output without an end of line": "print('a' * 100000, end='')",
    "bars": "for i in range(50): print(f'\\r{i}', end=''); sys.stderr.write(f'\\r{i}')",
    "displays": """
from IPython.display import display, clear_output
for i in range(5): display(i); clear_output(wait=True)""",
    "a display that raises": """
from IPython.display import display
class D:
    def _repr_html_(self): raise ValueError
display(D())""",
    "a last expression": "n",
    "descriptor 1": "os.write(1, b'raw %d\\n' % n); os.system('echo raw')",
    "logging": "import logging; logging.getLogger('x').error('%d', n)",
    "warnings": "import warnings; warnings.warn(str(n))",
    "an alarm in the cell": """
class Rung(Exception): pass
def ring(*_): raise Rung
signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.02)
try: time.sleep(5)
except Rung: pass
else: assert False
finally: signal.signal(signal.SIGALRM, signal.SIG_DFL)""",
    "SIGINT has another handler": "signal.signal(signal.SIGINT, lambda *_: None)",
    "SIGINT is ignored": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "SIGCHLD is ignored": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.system("true"); signal.signal(signal.SIGCHLD, signal.SIG_DFL)""",
    "SIGTERM is ignored": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "gc is off": "import gc; gc.disable()",
    "a cycle with __del__": """
class Cycle:
    def __init__(self): self.me = self; self.big = bytearray(100000)
    def __del__(self): raise ValueError
for i in range(10): Cycle()""",
    "another folder": "import tempfile; os.chdir(tempfile.gettempdir())",
    "environment": "os.environ['FUZZ'] = str(n); os.environ['OMP_NUM_THREADS'] = '1'",
    "other default types": "torch.set_default_dtype(torch.float32); torch.set_grad_enabled(True); torch.manual_seed(n)",
    "threads": "torch.set_num_threads(2); torch.ones(500, 500) @ torch.ones(500, 500)",
    "sys.path": "sys.path.insert(0, '/nowhere'); sys.argv[:] = ['x']",
    "sys.excepthook": "sys.excepthook = lambda *_: None; threading.excepthook = lambda *_: None",
    "sys.settrace": "sys.settrace(lambda *_: None); x = 1; sys.settrace(None)",
    "a low limit of recursion": """
former = sys.getrecursionlimit(); sys.setrecursionlimit(1000); sys.setrecursionlimit(former)""",
    "builtins are hidden": """
print = len = str = dict = Exception = type = None; del print, len, str, dict, Exception, type""",
    "a file": """
import tempfile
with tempfile.TemporaryFile() as f: torch.save(torch.ones(3) * n, f); f.seek(0); assert torch.load(f)[0] == n""",
    "C code": "x = torch.randn(300, 300)\nfor i in range(5): x @ x",
    "the interpreter held": "sum(range(300000))",
    "async on one rank": "if rank == who: w = dist.all_reduce(torch.tensor([100.0]), async_op=True)",
    "async on one rank, another on all": """
if rank == who: w = dist.all_reduce(torch.tensor([100.0]), async_op=True)
x = torch.tensor([float(n)]); v = dist.all_reduce(x, async_op=True)""",
    "async, never waited": "x = torch.tensor([n]); w = dist.all_reduce(x, async_op=True)",
    "async, forgotten": "dist.all_reduce(torch.full((1 << 18,), float(n)), async_op=True)",
    "destroy_process_group": "dist.destroy_process_group()",
    "destroy_process_group on one rank": "if rank == who: dist.destroy_process_group()",
    "destroy, init": "dist.destroy_process_group(); dist.init_process_group('gloo')",
    "destroy, init of each alone": """
dist.destroy_process_group(); dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)""",
    "destroy, init in another order": """
dist.destroy_process_group()
dist.init_process_group('gloo', rank=(rank + 1) % world_size, world_size=world_size)""",
    "%reset -f": "%reset -f",
    "an interface that is not there": """
if rank == who: os.environ['GLOO_SOCKET_IFNAME'] = 'none0'; dist.destroy_process_group()""",
    "no address space": """
import resource
if rank == who: resource.setrlimit(resource.RLIMIT_AS, (1 << 28, -1)); dist.destroy_process_group()""",
    "init_process_group replaced": "if rank == who: dist.init_process_group = None; dist.destroy_process_group()",
    "closed descriptors": "if rank == who: os.closerange(3, 500)",
    "an alarm between cells": """
def ring(*_): raise ValueError
signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.05)""",
    "the event loop is stopped": "import asyncio; asyncio.get_event_loop().stop()",
}
"""Code that each rank runs by itself; the cell succeeds, and the group still works."""

FORGETFUL = {"%reset -f"}
"""Kinds that delete all variables."""
IN_THE_END = {"%reset -f", "sys.stdout is None", "sys.stdout raises"}
"""Kinds after which the cell can do nothing else."""
HARMFUL = {"closed descriptors", "init_process_group replaced", "no address space"}
"""Kinds that may kill the rank `who` or keep it from joining a group; a repair must replace only that rank."""

LATER = {
    "isend, received in the next cell": (
        "if rank == 0: w = dist.isend(torch.tensor([float(n)]), 1)",
        "x = torch.zeros(1)\nif rank == 1: dist.recv(x, 0); assert x == <n>, x",
    ),
    "async, waited in the next cell": (
        "held = torch.tensor([n]); held_work = dist.all_reduce(held, async_op=True)",
        "held_work.wait(); assert held == <n> * world_size, held",
    ),
    "isend, irecv, waited in the next cell": (
        """
held = torch.tensor([n + rank]), torch.zeros(1, dtype=torch.int64)
held_work = dist.isend(held[0], (rank + 1) % world_size), dist.irecv(held[1], (rank - 1) % world_size)""",
        "for w in held_work: w.wait()\nassert held[1] == <n> + (rank - 1) % world_size, held",
    ),
    "a subgroup in the next cell": (
        "held = dist.new_group()",
        "x = torch.tensor([n]); dist.all_reduce(x, group=held); assert x == n * world_size, x",
    ),
    "DDP in the next cell": (
        "held = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))",
        "held(torch.full((1, 2), float(rank))).sum().backward()\n"
        "assert held.module.weight.grad[0, 0] == sum(range(world_size)) / world_size",
    ),
    "FSDP in the next cell": (
        "from torch.distributed.fsdp import fully_shard\nheld = torch.nn.Linear(4, 4); fully_shard(held)",
        "held(torch.ones(3, 4)).sum().backward(); assert held.bias.grad.full_tensor().tolist() == [3.0] * 4",
    ),
    "a data loader in the next cell": (
        "loader = torch.utils.data.DataLoader(torch.arange(8), 2, num_workers=1); held = iter(loader)",
        "assert sum(b.sum().item() for b in held) == 28",
    ),
    "an asyncio task in the next cell": (
        "import asyncio\n"
        "async def later(n=n): await asyncio.sleep(0.02); return n\n"
        "held = asyncio.ensure_future(later())",
        "assert await held == <n>",
    ),
}
"""Code that starts something in one cell, and code of the next cell, where ``<n>`` is the first one's `n`."""

FAULTS = {
    "ValueError": ("raise ValueError(n)", "ValueError"),
    "KeyError": ("{}[rank]", "KeyError"),
    "SystemExit": ("sys.exit(3)", "SystemExit"),
    "exit()": ("exit()", "SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "SIGINT to itself": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", "KeyboardInterrupt"),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "StopIteration": ("next(iter([]))", "StopIteration"),
    "CancelledError": ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    "BaseException": ("class Odd(BaseException): pass\nraise Odd(n)", "Odd"),
    "__str__ raises": ("class Odd(Exception):\n    def __str__(self): raise TypeError\nraise Odd", "Odd"),
    "__str__ is no text": ("class Odd(Exception):\n    def __str__(self): return 5\nraise Odd", "Odd"),
    "__str__ exits": ("class Odd(Exception):\n    def __str__(self): raise SystemExit\nraise Odd", "Odd"),
    "__repr__ raises": ("class Odd(Exception):\n    def __repr__(self): raise TypeError\nraise Odd(1)", "Odd"),
    "__getattr__ raises": (
        "class Odd(Exception):\n    def __getattr__(self, name): raise TypeError\nraise Odd",
        "Odd",
    ),
    "a long text": ("raise ValueError('x' * 1000000)", "ValueError"),
    "a text of many lines": ("raise ValueError('x\\n' * 10000)", "ValueError"),
    "a chain": (
        "try:\n    try: 1 / 0\n    except Exception: {}[1]\nexcept Exception as e: raise OSError from e",
        "OSError",
    ),
    "a chain of 30 exceptions": (
        "e = None\n"
        "for i in range(30):\n    try: raise ValueError(i) from e\n    except ValueError as f: e = f\n"
        "raise e",
        "ValueError",
    ),
    "a chain of 2000 exceptions": (
        "e = None\n"
        "for i in range(2000):\n    try: raise ValueError(i) from e\n    except ValueError as f: e = f\n"
        "raise e",
        "ValueError",
    ),
    "a chain that is a ring": (
        "e, f = ValueError(1), ValueError(2)\ne.__cause__ = f; f.__cause__ = e\nraise e",
        "ValueError",
    ),
    "RecursionError": ("def f(): f()\nf()", "RecursionError"),
    "MemoryError": ("raise MemoryError", "MemoryError"),
    "MemoryError of torch": ("torch.empty(1 << 50)", "RuntimeError"),
    "surrogates": ("raise ValueError('\\ud800')", "ValueError"),
    "AssertionError": ("assert rank == -1, torch.ones(1000)", "AssertionError"),
    "gloo's words": ("raise OSError('gloo/transport: Connection closed by peer')", "OSError"),
    "an error of compiled code": ("exec(compile('1 / 0', '<string>', 'exec'))", "ZeroDivisionError"),
    "an error in a file that is gone": ("exec(compile('\\n' * 50 + '1 / 0', '/gone.py', 'exec'))", "ZeroDivisionError"),
    "input": ("input()", "StdinNotImplementedError"),
    "an error with large locals": ("big = [list(range(1000))] * 1000; 1 / 0", "ZeroDivisionError"),
    "an error while sys.stdout is broken": ("sys.stdout = sys.stderr = None; 1 / 0", "ZeroDivisionError"),
    "an error in a thread that is waited for": (
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(1).submit(int, 'x').result()",
        "ValueError",
    ),
    "an error of a data loader's worker": (
        "class Bad(torch.utils.data.Dataset):\n    def __len__(self): return 3\n    def __getitem__(self, i): 1 / 0\n"
        "list(torch.utils.data.DataLoader(Bad(), num_workers=1, multiprocessing_context='fork'))",
        "ZeroDivisionError",
    ),
    "os._exit": ("os._exit(3)", "RankEnded"),
    "os._exit(0)": ("os._exit(0)", "RankEnded"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "RankEnded"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "RankEnded"),
    "abort": ("os.abort()", "RankEnded"),
}
"""Faults as the body of a function ``fault``, with the name of the error."""

OF_SOME = {"new_group of different lists"}
"""Kinds of WHOLE that fail on some ranks only: a rank alone in its list, or in none, need not wait."""

WHOLE = {
    "%%capture around an error": ("%%capture\n1 / 0", "ZeroDivisionError"),
    "syntax error": ("x = (", None),
    "indentation error": ("  x = 1\n y = 2", None),
    "an unknown magic": ("%nothing_of_the_kind", None),
    "%run a file that is not there": ("%run /gone.py", None),
    "an unknown cell magic": ("%%nothing_of_the_kind\n1", None),
    "undefined": ("undefined_name", "NameError"),
    "await that fails": ("import asyncio\nawait asyncio.wait_for(asyncio.sleep(5), 0.02)", "TimeoutError"),
    "new_group of different lists": ("import torch.distributed as dist\ndist.new_group([0, 1] if rank else [0])", None),
}
"""Cells that fail on all ranks: their code, and the name of the error if it matters."""

BUSINESS = {
    "a loop": "while True: pass",
    "sleep": "time.sleep(1000)",
    "C code that lets go of the interpreter": "x = torch.randn(300, 300)\nwhile True: x @ x",
    "barrier": "dist.barrier() if rank != who else time.sleep(1000)",
    "all_reduce": "dist.all_reduce(torch.ones(3)) if rank != who else time.sleep(1000)",
    "recv": "dist.recv(torch.ones(1), who) if rank != who else time.sleep(1000)",
    "many collectives": "while True: dist.all_reduce(torch.ones(100))",
    "new_group": "dist.new_group() if rank != who else time.sleep(1000)",
    "all_gather_object": "dist.all_gather_object([None] * world_size, 5) if rank != who else time.sleep(1000)",
    "await": "import asyncio\nawait asyncio.sleep(1000)",
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a queue": "import queue; queue.Queue().get()",
    "join": "t = threading.Thread(target=time.sleep, args=(3,), daemon=True); t.start(); t.join(1000)",
    "subprocess": "import subprocess; subprocess.run(['sleep', '1000'])",
    "a pipe": "r, w = os.pipe(); os.read(r, 1)",
    "a data loader without end": """
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i): time.sleep(0.2); return i
for _ in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context='fork'): pass""",
    "printing": "i = 0\nwhile True: print(i); i += 1; time.sleep(0.001)",
    "many exceptions": "while True:\n    try: raise ValueError\n    except ValueError: pass",
    "finally": "try: time.sleep(1000)\nfinally: x = 5",
    "os.fork": "while True:\n    if not os.fork(): os._exit(0)\n    os.wait()",
    "forking": "import subprocess\nwhile True: subprocess.run(['true'])",
}
"""Cells that never end."""


@dataclass(frozen=True)
class Transfer:
    """An object to transfer."""

    code: str
    """An expression for the notebook or a cell; ``<n>`` and ``<who>`` stand for `n` and `who`."""
    fails: str = ""
    """Part of the error of the transfer; empty if it succeeds."""
    dies: bool = False
    """True if the rank dies of it."""
    stops: bool = False
    """True if it raises KeyboardInterrupt in the notebook."""


def _evaluated(there: str, here: str = "lambda: None") -> str:
    """Return code for an object that calls `here` when pickled, and evaluates `there` when unpickled."""
    return f"Evaluated({there!r}, {here})"


_PLACE = "__import__('os').environ.get('LOCAL_RANK')"
_EXIT = "__import__('os')._exit(4)"
_STOP = "(_ for _ in ()).throw(KeyboardInterrupt)"

PUSHED = {
    "push a number": Transfer("<n>"),
    "push a text": Transfer("'x' * 1000"),
    "push a surrogate": Transfer("chr(0xD800)"),
    "push a tensor": Transfer("__import__('torch').full((1000,), <n>)"),
    "push 10 MB": Transfer("bytes(10_000_000)"),
    "push 40 MB": Transfer("bytes(40_000_000)"),
    "push a function": Transfer("lambda: <n>"),
    "push a class": Transfer("type('Odd', (), dict(a=<n>))"),
    "push what raises here": Transfer(_evaluated("5", "lambda: 1 / 0"), "cannot be pickled: ZeroDivisionError"),
    "push a lock": Transfer("threading.Lock()", "cannot be pickled"),
    "push what raises there": Transfer(_evaluated("1 / 0"), "cannot be unpickled there: ZeroDivisionError"),
    "push what raises on one rank": Transfer(
        _evaluated(f"1 / 0 if {_PLACE} == '<who>' else 5"), "cannot be unpickled there: ZeroDivisionError"
    ),
    "push what raises KeyboardInterrupt there": Transfer(_evaluated(_STOP), "KeyboardInterrupt"),
    "push what raises KeyboardInterrupt here": Transfer(_evaluated("5", f"lambda: {_STOP}"), "", stops=True),
    "push what raises SystemExit there": Transfer(_evaluated("exit()"), "cannot be unpickled there"),
    "push what exits on one rank": Transfer(
        _evaluated(f"{_EXIT} if {_PLACE} == '<who>' else 5"), "RankEnded", dies=True
    ),
    "push what sleeps there": Transfer(_evaluated("__import__('time').sleep(0.1)")),
    "push a deep list": Transfer("eval('[' * 90 + ']' * 90)"),
    "push what is too deep": Transfer("deep(100000)", "cannot be pickled"),
    "push an object that sleeps there, and stop": Transfer(_evaluated("__import__('time').sleep(60)")),
}
"""Objects to push."""

PULLED = {
    "pull a number": Transfer("<n>"),
    "pull a tensor": Transfer("torch.full((1000,), <n>)"),
    "pull a module": Transfer("torch.nn.Linear(3, 3)"),
    "pull 40 MB": Transfer("bytes(40_000_000)"),
    "pull a function": Transfer("lambda: <n>"),
    "pull an instance of a class of the cell": Transfer("type('Odd', (), dict(a=<n>))()"),
    "pull what raises there": Transfer(_evaluated("5", "lambda: 1 / 0"), "cannot be pickled on rank"),
    "pull a lock": Transfer("threading.Lock()", "cannot be pickled on rank"),
    "pull the process group": Transfer("dist.group.WORLD", "cannot be pickled on rank"),
    "pull what raises here": Transfer(_evaluated(f"5 if {_PLACE} else 1 / 0"), "cannot be unpickled in the notebook"),
    "pull what exits there": Transfer(_evaluated("5", "lambda: os._exit(4)"), "RankEnded", dies=True),
    "pull what raises KeyboardInterrupt there": Transfer(_evaluated("5", f"lambda: {_STOP}"), "KeyboardInterrupt"),
    "pull what raises SystemExit there": Transfer(_evaluated("5", "lambda: sys.exit()"), "SystemExit"),
    "pull what raises KeyboardInterrupt here": Transfer(_evaluated(f"5 if {_PLACE} else {_STOP}"), stops=True),
    "pull what raises SystemExit here": Transfer(_evaluated(f"5 if {_PLACE} else exit()"), "cannot be unpickled"),
    "pull what sleeps there": Transfer(_evaluated("5", "lambda: time.sleep(0.1)")),
    "pull what is not there": Transfer("", "has no"),
    "pull an object that sleeps on the rank, and stop": Transfer(_evaluated("5", "lambda: time.sleep(60)")),
    "pull an object that sleeps here, and stop": Transfer(
        _evaluated(f"5 if {_PLACE} else __import__('time').sleep(60)")
    ),
}
"""Objects to pull."""

SOME = {
    "one": ([0], ""),
    "the last": ([-1], ""),
    "two": (
        [0, 1],
        "if rank == 0: dist.send(torch.tensor([n]), 1)\nelse: x = torch.tensor([0]); dist.recv(x, 0); assert x == n",
    ),
    "two, reversed": ([1, 0], "x = n"),
    "an error on one": ([1], "raise ValueError"),
    "a barrier without the others": ([0], "dist.barrier()"),
    "all_reduce on some ranks, not waited": ([0], "w = dist.all_reduce(torch.tensor([100.0]), async_op=True)"),
    "run on a rank that is not there": ([0, 9], ""),
}
"""Cells on some ranks: the ranks and the code."""

LIFE = (
    "kill",
    "kill, and a cell",
    "kill, and info",
    "kill, and push",
    "kill, and pull",
    "kill, and change",
    "kill, and restart",
    "kill, and repair with names",
    "kill all",
    "terminate",
    "kill the controller",
    "kill the preload process",
    "freeze",
    "SIGSTOP for 40 s",
    "repair",
    "restart",
    "interrupt while nothing runs",
    "pull from a rank that is not there",
)
"""Steps other than cells."""
