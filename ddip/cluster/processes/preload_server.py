"""The preload process: import once what every rank needs, and fork the controller and the engines on request.

``boot.py`` runs it with the arguments NOTEBOOK MODULE ..., and one end of a socket pair as standard input. It receives

    {"fork": id, "module": ..., "needs": [...], "imports": [...], "argv": [...], "env": {...}, "path": [...],
     "cwd": ..., "log": ...}
    {"end": id}                     end this child, or do not start it

and sends

    {"forked": id, "pid": ...}      or {"refused": id, "why": ...} if it cannot fork
    {"exited": id, "code": ...}     negative: the signal
    {"warm": True}                  every MODULE is imported

A request waits until the modules that it needs are imported; the process imports the rest while no request waits, and
then sleeps. It dies with its owner: when the other end of the socket is closed, or when the kernel signals the death of
its parent. Its children request the same signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import importlib
import json
import os
import signal
import sys
import traceback
import weakref
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import setproctitle

Request = dict[str, Any]


def main() -> None:
    """Serve the owner; in a child, run the requested module."""
    setproctitle.setproctitle(f"ddip preload process ({sys.argv[1]})")
    request = PreloadServer(int(os.environ["DDIP_OWNER"]), sys.argv[2:], json.loads(os.environ["DDIP_PATH"])).serve()
    importlib.import_module(request["module"]).main()


class PreloadServer:
    """The socket to the owner, the modules to import, the waiting requests, and the children.

    `path`: the notebook's ``sys.path``. It is appended only to import a module that is not found without it, such as an
    app, so that ddip's modules and their imports are never taken from the notebook's folder.
    """

    def __init__(self, owner: int, modules: list[str], path: list[str]) -> None:
        self.owner = owner
        self.modules = modules
        self.path = path
        self.tried: dict[str, BaseException | None] = {}  # by module; None: it was imported
        self.waiting: list[Request] = []
        self.children: dict[int, int] = {}  # request ID by PID
        self.link = Connection(os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        # a signal writes to this pipe, which wakes the loop
        self.woken, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning to all processes
        # also sent when only the *thread* that started this process ends, so check the parent
        signal.signal(signal.SIGHUP, lambda *_: None if os.getppid() == owner else os._exit(0))
        prctl, PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None).prctl, 1, 36
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # this process reaps what its children leave behind
        prctl(PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
        if os.getppid() != owner:  # the owner died before the request to the kernel
            os._exit(0)
        gc.disable()  # a collection would write to pages shared with the children

    def serve(self) -> Request:
        """Serve requests indefinitely; return only in each child, with the request that it must fulfil."""
        while True:
            busy = self.waiting or self.modules
            for ready in wait([self.link, self.woken], 0 if busy else None):
                if ready is self.link:
                    self.receive()
                else:
                    os.read(self.woken, 4096)
                    self.reap()
            if self.waiting:
                request = self.waiting[0]
                missing = [name for name in (*request["needs"], *request["imports"]) if name not in self.tried]
                if missing:
                    self.load(missing[0], request["path"])
                elif self.fork(self.waiting.pop(0)):
                    return request
            elif busy:
                self.warm_up()

    def warm_up(self) -> None:
        """Import the next module, and tell the owner after the last one."""
        self.load(self.modules.pop(0), self.path)
        if not self.modules:
            self.say(warm=True)

    def load(self, name: str, path: list[str]) -> None:
        """Import a module, and keep the error of a failure for the child that needs it."""
        self.tried[name] = None
        try:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                further = [folder for folder in path if folder not in sys.path]
                sys.path += further
                try:
                    importlib.import_module(name)
                finally:
                    for folder in further:
                        sys.path.remove(folder)
        except BaseException as error:  # a module may even call sys.exit()
            self.tried[name] = error
            traceback.print_exc()

    def receive(self) -> None:
        """Handle one message of the owner: queue a fork, or end a child; exit if the owner has ended."""
        try:
            request = self.link.recv()
        except (EOFError, OSError):
            self.leave()
        if "fork" in request:
            self.waiting.append(request)
        else:
            self.waiting = [other for other in self.waiting if other["fork"] != request["end"]]
            pids = [pid for pid, number in self.children.items() if number == request["end"]]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            if not pids:  # else `reap` sends this once the child has ended
                self.say(exited=request["end"], code=None)

    def fork(self, request: Request) -> bool:
        """Fork for `request`, or refuse it; return True in the child."""
        why = self.unsafe()
        if why:
            self.say(refused=request["fork"], why=why)
            return False
        gc.freeze()
        for finalizer in getattr(weakref.finalize, "_registry", ()):
            finalizer.atexit = False  # else each child would finalize the objects of this process at its end
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            self.say(refused=request["fork"], why=f"no fork: {error.strerror}")
            return False
        if pid:
            self.children[pid] = request["fork"]
            self.say(forked=request["fork"], pid=pid)
            return False
        self.enter_child(request)
        return True

    def enter_child(self, request: Request) -> None:
        """Replace the preload process's state with that of `request`, in the child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self.link.close()
        os.close(self.woken)
        os.close(self.waker)
        os.setsid()
        try:
            log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # the start was cancelled meanwhile, and its files were removed
            os._exit(0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        for name in request["needs"]:
            failure = self.tried[name]
            if failure is not None:  # a second import may fail in another way, as with torch
                raise failure
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv[1:] = request["argv"]
        # Python reseeds `random` itself after a fork
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        gc.enable()

    @staticmethod
    def unsafe() -> str | None:
        """Return the reason why children could not use the GPUs, or None; CUDA does not survive a fork."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "CUDA is initialised in the preload process"
        for link in glob.glob("/proc/self/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith("/dev/nvidia"):
                    return "the preload process holds a GPU"
        return None

    def reap(self) -> None:
        """Report the exit codes of children that have ended to the owner; do not wait for others."""
        with contextlib.suppress(ChildProcessError):  # there are no children
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self.children:
                    self.say(exited=self.children.pop(pid), code=os.waitstatus_to_exitcode(status))

    def say(self, **message: Any) -> None:
        """Send the owner a message; it is lost if the owner has ended."""
        with contextlib.suppress(OSError):  # the owner has ended, which the next receive notices
            self.link.send(message)

    def leave(self) -> NoReturn:
        """End this process, and thereby its children."""
        os._exit(0)  # the children follow on the kernel's signal
