"""Ways in which one rank can damage itself, and the proof that a repair suffices."""

from __future__ import annotations

import contextlib
import re

import ddip
from ddip.errors import CellError, GroupError

PROOF = """
import torch, torch.distributed as dist
y = torch.ones(1, device="cpu", dtype=torch.float32)
dist.all_reduce(y)
assert y.item() == world_size
"""
SET_UP = """
import builtins, ctypes, gc, importlib, io, os, pathlib, pickle, re
import resource, shutil, signal, socket, sys, threading, time
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d
import ddip.rank.runtime.c10d, ddip.rank.process_group.membership
kept = rank
def fail(*args, **kwargs): raise OSError("no way")
def hang(*args, **kwargs): time.sleep(1000)
def nothing(*args, **kwargs): return None
def limit(name, value): resource.setrlimit(getattr(resource, name), (value, value))
def descriptors(): return [int(name) for name in os.listdir("/proc/self/fd")]
def begin(function): threading.Thread(target=function, daemon=True).start()
def alone(former=dist.init_process_group): former('gloo', store=dist.HashStore(), rank=0, world_size=1)
def remove(prefix):
    for name in [name for name in sys.modules if name.startswith(prefix)]: del sys.modules[name]
def kinds(*wanted):
    found = []
    for number in descriptors():
        try:
            if any(word in os.readlink(f"/proc/self/fd/{number}") for word in wanted): found.append(number)
        except OSError: pass
    return found
"""
_REPLACED = {
    f"{module}.{name} {how}": f"{module}.{name} = {how}"
    for module, names in {
        "dist": ["init_process_group", "destroy_process_group", "is_initialized", "get_world_size", "all_reduce"],
        "distributed_c10d": ["_new_process_group_helper", "_update_default_pg", "rendezvous", "_world"],
        "torch": ["device", "ones"],
        "socket": ["socket"],
        "os": ["open", "listdir", "environ", "getpid"],
        "pickle": ["loads", "dumps"],
        "builtins": ["open", "__import__"],
        "threading": ["Thread", "current_thread"],
        "importlib": ["import_module"],
        "time": ["time", "monotonic"],
        "ddip.rank.process_group.membership": ["join_group", "leave_group", "release_group", "check_group"],
        "ddip.rank.runtime.c10d": ["destroy_groups", "default_group", "counts"],
    }.items()
    for name in names
    for how in ("fail", "None")
}
DIES_CONNECTING = r"""
def die(store, number, size, **options):
    theirs = store.get("0/0")
    mine = re.sub(rb"\x02\x00..\x7f\x00\x00\x01", b"\x02\x00\xff\xff\x7f\x00\x00\x01", theirs, flags=re.DOTALL)
    assert mine != theirs
    store.set(f"0/{number}", mine)
    os.kill(os.getpid(), signal.SIGKILL)
distributed_c10d.ProcessGroupGloo = die
"""
"""Sets the next group up as far as gloo's address, which it tells the others, and dies: of two ranks, the one with the
higher port connects, and this one has told them the highest."""
KINDS = {
    **_REPLACED,
    "RLIMIT_AS": "limit('RLIMIT_AS', 1 << 28)",
    "RLIMIT_DATA": "limit('RLIMIT_DATA', 1 << 20)",
    "init_process_group does nothing": "dist.init_process_group = nothing",
    "init_process_group hangs": "dist.init_process_group = hang",
    "destroy_process_group hangs": "dist.destroy_process_group = hang",
    "join hangs and cannot be stopped": "import ddip.rank.process_group.membership as p\np.join = lambda s: deaf()\n"
    "def deaf():\n    while True:\n        try: time.sleep(1000)\n        except KeyboardInterrupt: pass",
    "init_process_group in a world of its own": "dist.init_process_group = lambda *a, **k: alone()",
    "init_process_group deleted": "del dist.init_process_group",
    "new gloo groups fail": "dist.ProcessGroupGloo.__init__ = fail",
    "create_default_device fails": "dist.ProcessGroupGloo.create_default_device = fail",
    "interface": "os.environ['GLOO_SOCKET_IFNAME'] = 'nowhere0'",
    "environment cleared": "os.environ.clear()",
    "fake backend": "dist.Backend.register_backend('gloo', fail)",
    "RLIMIT_FSIZE": "limit('RLIMIT_FSIZE', 0)",
    "RLIMIT_NPROC": "limit('RLIMIT_NPROC', 1)",
    "RLIMIT_STACK": "limit('RLIMIT_STACK', 1 << 16)",
    "RLIMIT_MEMLOCK": "limit('RLIMIT_MEMLOCK', 0)",
    "RLIMIT_SIGPENDING": "limit('RLIMIT_SIGPENDING', 0)",
    "RLIMIT_CPU": "limit('RLIMIT_CPU', 1)",
    **{
        f"RLIMIT_NOFILE {more} more": f"limit('RLIMIT_NOFILE', max(descriptors()) + {more})" for more in (0, 1, 2, 4, 6)
    },
    "RLIMIT_NOFILE 10": "limit('RLIMIT_NOFILE', 10)",
    "no descriptor is left": "held = []\ntry:\n    while True: held.append(open('/dev/null'))\nexcept OSError: pass",
    "sockets closed": "for number in kinds('socket:'): os.close(number)",
    "connected TCP sockets closed": (
        "import psutil; from ddip.protocol.old_versions import tcp_connections\n"
        "for c in tcp_connections(psutil.Process()): os.close(c.fd)"
    ),
    "epoll closed": "for number in kinds('eventpoll'): os.close(number)",
    "eventfd closed": "for number in kinds('eventfd'): os.close(number)",
    "pipes closed": "for number in kinds('pipe:'): os.close(number)",
    "sockets shut down": "import ddip.rank.native.sockets as s\ns.shut_down(s.tcp_connections());",
    "all closed": "os.closerange(3, 1000)",
    "stdin, stdout and stderr closed": "os.closerange(0, 3)",
    "sys.stdout None": "sys.stdout = None",
    "sys.stdout and stderr closed": "sys.stdout.close(); sys.stderr.close()",
    "torch.distributed removed": "remove('torch.distributed')",
    "torch removed": "remove('torch')",
    "ddip removed": "remove('ddip')",
    "ddip.rank None": "sys.modules['ddip.rank.process_group.membership'] = None",
    "all modules removed": "sys.modules.clear()",
    "sys.path cleared": "sys.path.clear(); sys.path_importer_cache.clear()",
    "sys.meta_path cleared": "sys.meta_path.clear()",
    "chdir": "os.chdir('/proc')",
    "a removed folder": "import tempfile; gone = tempfile.mkdtemp(); os.chdir(gone); os.rmdir(gone)",
    "store removed": "pathlib.Path(ddip.rank.process_group.membership._store).unlink()",
    "run folder read-only": "pathlib.Path(ddip.rank.process_group.membership._store).parent.chmod(0o500)",
    "namespace of ddip": "ddip.rank.process_group.membership.namespace = fail",
    "variables cleared": "globals().clear()",
    "signals ignored": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "signals blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))",
    "an alarm that raises": "signal.signal(signal.SIGALRM, fail); signal.setitimer(signal.ITIMER_REAL, 0.05)",
    "many threads": "for _ in range(500): begin(hang)",
    "a thread that keeps the interpreter busy": "begin(lambda: [None for _ in iter(int, 1)])",
    "recursion limit": "sys.setrecursionlimit(60)",
    "switch interval": "sys.setswitchinterval(100)",
    "trace function": "sys.settrace(fail); threading.settrace(fail)",
    "audit hook": "sys.addaudithook(lambda event, args: fail() if event.startswith('socket') else None)",
    "audit hook for open": "sys.addaudithook(lambda event, args: fail() if event == 'open' else None)",
    "a group of its own": "dist.destroy_process_group(); alone()",
    "no group": "dist.destroy_process_group()",
    "a subclass left behind": "class Mine(dist.ProcessGroup): pass\n"
    "distributed_c10d._world.pg_map[Mine(0, 1)] = 'mine', None",
    "the default group replaced": "distributed_c10d._update_default_pg(object())",
    "the tables of groups replaced": "distributed_c10d._world.pg_map = None",
    "torch's default device": "torch.set_default_device('meta')",
    "torch's default type": "torch.set_default_dtype(torch.float64)",
    "inference mode": "torch.inference_mode().__enter__()",
    "the event loop closed": "__import__('asyncio').get_event_loop().stop()",
    "the loop's handler": "__import__('asyncio').get_event_loop().call_soon = fail",
    "no builtins": "__builtins__ = {}",
    "an input transformer fails": "get_ipython().input_transformers_cleanup.append(fail)",
    "a hook of IPython exits": "get_ipython().events.register('pre_execute', sys.exit)",
    "run_cell replaced": "get_ipython().run_cell = get_ipython().run_cell_async = None",
    "os._exit": "os._exit(3)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "a crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "sys.exit": "sys.exit(3)",
    "deaf": "while True:\n    try: time.sleep(1000)\n    except KeyboardInterrupt: pass",
    "deaf in C": "while True:\n    try: ctypes.PyDLL(None).sleep(1000)\n    except KeyboardInterrupt: pass",
    # must be last: it removes the controller's sockets, so no process can be replaced after it
    "run folder removed": "shutil.rmtree(pathlib.Path(ddip.rank.process_group.membership._store).parent)",
}
"""Code that rank 1 runs, by name."""


def prove_repair(group: ddip.Group, harm: str) -> None:
    """Damage rank 1 with `harm` and rebuild the group: if a cell fails then, a repair is all it needs."""
    group.repair()  # an earlier test may have failed
    group.run(SET_UP)
    pids = [member.pid for member in group.members]
    lines = "\n".join(f"    {line}" for line in harm.splitlines())
    proof = f"{PROOF}assert rank == 1 or kept == rank"
    errors: list[str] = []
    replaced: list[int] = []
    # The second cell takes at least 0.1 s, the grace of its failure: delayed effects of the harm are over by then.
    for code in (f"if rank == 1:\n{lines}", "if rank == 0: raise ValueError\ndist.barrier()"):
        with contextlib.suppress(CellError, GroupError):
            group.run(code, timeout=4)
    for _ in range(2):
        try:
            group.run(proof, timeout=4)
        except (CellError, GroupError) as error:
            errors.append(str(error))
            replaced += group.repair()
    group.run(proof, timeout=20)
    now = [member.pid for member in group.members]
    assert [now[0], *now[2:]] == [pids[0], *pids[2:]] and set(replaced) <= {1}, errors
    assert not any(re.search(r"%makedip -r\b", text) for text in errors), errors
