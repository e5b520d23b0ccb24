"""A table of faults of hosts and links, during each action of a group: the outcome, its seconds, and what is left.

    python -m tests.hosts.network run -- python -m tests.hosts.fault_table [--rows ROW,ROW] [--actions ACTION,ACTION]

Each cell of the table starts a group with a rank on h1 and one on h2, and the fault hits h2 during the action. The cell
shows the outcome of the action; then, once the fault is over, whether a cell with a collective works, after a repair if
that is needed; then the end. A replaced rank of h1 (LOST), a HANG, or anything LEFT on a host is a broken promise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import ddip

from ..cluster.leftovers import family_of
from .first_process import HOME
from .host import Host, wait_for
from .network import Network
from .test_faults import pid_of

BEGIN = "import os, time, torch, torch.distributed as dist\nx = torch.ones(2)\ndist.all_reduce(x)\n"
BEGIN += "big = os.urandom(24 << 20)"
AFTER = "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))"
STOPPED_SECONDS = 15
"""Most time that a stop may take: a host without power is noticed after 12 s."""
DELAY = Path("/tmp/ddip-latency")
"""File with the delay of each byte to h2 by ssh, for ``slow_link.py``."""
MOUNT = "/run/mount"
"""Folder on h2 that mount(8) creates."""
FAULT_SECONDS, STOP_SECONDS, HANG_SECONDS, CLEAN_SECONDS = 0.3, 1.5, 60, 30
"""Seconds from the begin of the action to the fault, to the stop, until an action hangs, and until hosts are clean."""
Fault = Callable[[Network], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def cut_for(hosts: Network, seconds: float) -> Iterator[None]:
    hosts["h2"].cut()
    mend = threading.Timer(seconds, hosts["h2"].mend)
    mend.start()
    try:
        yield
    finally:
        mend.join()


@contextlib.contextmanager
def once(do: Callable[[], object], undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    do()
    try:
        yield
    finally:
        undo()


def kill_if_running(host: Host, what: str) -> None:
    with contextlib.suppress(ValueError, ProcessLookupError):
        os.kill(pid_of(host, what), signal.SIGKILL)


def remount(host: Host, options: str) -> None:
    """Mount the host's folders for files again with these options, in which $used is the size of the folder in KiB."""
    for folder in ("/tmp", "/var/tmp", "/run", HOME):
        command = f"used=$(df -k --output=used {folder} | tail -1); mount -o remount,{options} {folder}"
        host.run(["sh", "-c", command])


def restart_sshd(host: Host) -> None:
    """End the processes of sshd's connections, as a restart that closes them does; the host's first process listens."""
    host.run(["pkill", "-f", "^sshd: .*@"], check=False)


FAULTS: dict[str, Fault] = {
    **{f"link cut for {s} s": (lambda hosts, s=s: cut_for(hosts, s)) for s in (2, 5, 10, 60)},
    "loss of 5 %": lambda hosts: hosts["h2"].losing(5),
    "10 Mbit/s": lambda hosts: hosts["h2"].slowed_to("10mbit"),
    "h1 and h2 parted": lambda hosts: hosts["h1"].parted_from(hosts["h2"]),
    "power": lambda hosts: once(hosts["h2"].lose_power, hosts["h2"].boot),
    "connections of sshd ended": lambda hosts: once(lambda: restart_sshd(hosts["h2"])),
    "agent killed": lambda hosts: once(lambda: kill_if_running(hosts["h2"], "ddip.cluster.hosts.agent")),
    "latency 100 ms": lambda hosts: once(lambda: DELAY.write_text("0.05"), lambda: DELAY.write_text("0")),
    "HOME read-only": lambda hosts: once(
        lambda: hosts["h2"].run(["mount", "-o", "remount,bind,ro", HOME]),
        lambda: hosts["h2"].run(["mount", "-o", "remount,bind,rw", HOME]),
    ),
    "disk full": lambda hosts: once(
        lambda: remount(hosts["h2"], "size=$((used + 4))k"), lambda: remount(hosts["h2"], "size=50%")
    ),
}
FROM_THE_BEGINNING = ("HOME read-only", "disk full", "loss of 5 %", "10 Mbit/s", "latency 100 ms", "h1 and h2 parted")
"""Faults that begin just before the action; others begin FAULT_SECONDS after it."""
ACTIONS: dict[str, Callable[[ddip.Group], object]] = {
    "start": lambda group: ddip.Group(1, hosts="h1,h2"),
    "idle": lambda group: time.sleep(3),
    "cell": lambda group: group.run("for _ in range(30): time.sleep(0.1)"),
    "collective": lambda group: group.run("for _ in range(30): dist.all_reduce(x); time.sleep(0.1)"),
    "push": lambda group: group.push({"big": os.urandom(24 << 20)}),
    "pull": lambda group: group.pull(["big"], 1),
    "repair": lambda group: group.repair(),
    "stop": lambda group: group.run("while True: dist.all_reduce(x); time.sleep(0.1)"),
    "end": lambda group: group.shutdown(),
}


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def attempt(do: Callable[[], object], stop_after: float) -> tuple[str, object]:
    """Return the outcome of an action with its seconds, and its result; stop it after `stop_after` seconds."""
    timer, began, result = threading.Timer(stop_after, press), time.monotonic(), None
    timer.start()
    try:
        result, text = do(), "ok"
    except (ddip.DdipError, KeyboardInterrupt) as error:
        seconds = time.monotonic() - began
        text = type(error).__name__ + (": HANG" if seconds > stop_after + STOPPED_SECONDS else "")
        print(f"  {error}", file=sys.stderr)
    timer.cancel()
    return f"{text} {time.monotonic() - began:.1f} s", result


def afterwards(group: ddip.Group, healthy_pid: int) -> str:
    """Run a cell with a collective, after a repair if it needs one; return how that went."""
    texts = []
    for name, do in (
        ("works", lambda: group.run(AFTER)),
        ("repair", group.repair),
        ("works", lambda: group.run(AFTER)),
    ):
        text, _ = attempt(do, HANG_SECONDS)
        texts.append(text.replace("ok", name))
        if text.startswith("ok") and name == "works":
            break
    lost = group.info()[0].pid != healthy_pid
    return ", ".join(texts) + (", **rank of h1 LOST**" if lost else "")


def leftovers(hosts: Network, before: Collection[object]) -> list[str]:
    """Wait until nothing is left on the hosts; return what is."""
    found: list[str] = []

    def is_clean() -> bool:
        mine = {("nb", process.pid) for process in family_of(os.getpid())}
        found[:] = [text for key, text in hosts.contents().items() if key not in before and key not in mine]
        return not found

    with contextlib.suppress(AssertionError):
        wait_for(is_clean, "the end of all", CLEAN_SECONDS)
    return found


def start_fault(faults: contextlib.ExitStack, hosts: Network, fault: str, action: str) -> None:
    """Begin the fault; a fault that hits a start begins once h2 runs its agent."""
    if action == "start" and fault not in FROM_THE_BEGINNING:
        wait_for(lambda: any("ddip.cluster.hosts.agent" in line for _, line in hosts["h2"].processes()), "the agent")
    faults.enter_context(FAULTS[fault](hosts))


def run_action(hosts: Network, fault: str, action: str) -> str:
    """Run `action` on a new group during `fault`; return the text of the table's cell."""
    hosts.restore_hosts()
    try:
        return _run_action(hosts, fault, action)
    finally:
        hosts["nb"].path("~/.ssh/config").unlink()
        DELAY.unlink()
        hosts["h2"].run(["rm", "-rf", MOUNT])


def _run_action(hosts: Network, fault: str, action: str) -> str:
    DELAY.write_text("0")
    proxy = [sys.executable, str(Path(__file__).with_name("slow_link.py")), "%h", "%p", str(DELAY)]
    text = f"Host h2\n    ProxyCommand {shlex.join(proxy)}\n" if fault == "latency 100 ms" else ""
    hosts["nb"].path("~/.ssh/config").write_text(text)
    hosts["h2"].run(["mkdir", "-p", MOUNT])
    before = hosts.contents()
    group, pid = None, 0
    if action != "start":
        group = ddip.Group(1, hosts="h1,h2")
        group.run(BEGIN)
        pid = group.info()[0].pid
    if action == "repair":
        attempt(lambda: group.run("if rank == 1: os._exit(1)"), HANG_SECONDS)
    with contextlib.ExitStack() as faults:
        begin = threading.Timer(FAULT_SECONDS, lambda: start_fault(faults, hosts, fault, action))
        begin.start()
        if fault in FROM_THE_BEGINNING:
            begin.join()
        outcome, result = attempt(lambda: ACTIONS[action](group), STOP_SECONDS if action == "stop" else HANG_SECONDS)
        begin.join()
    if action == "start" and isinstance(result, ddip.Group):
        group, pid = result, result.info()[0].pid
    if group is not None and action != "end":
        outcome += f"; {afterwards(group, pid)}"
        outcome += f"; end {attempt(group.shutdown, HANG_SECONDS)[0]}"
    left = leftovers(hosts, before)
    print(*left, sep="\n", file=sys.stderr)
    return outcome + (f"; **{len(left)} LEFT**" if left else "")


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=",".join(FAULTS))
    parser.add_argument("--actions", default=",".join(ACTIONS))
    asked = parser.parse_args()
    rows, actions = asked.rows.split(","), asked.actions.split(",")
    print("| fault |", " | ".join(actions), "|\n|---|" + "---|" * len(actions), flush=True)
    hosts = Network()
    for fault in rows:
        cells = [run_action(hosts, fault, action) for action in actions]
        print("\n|", " | ".join([fault, *cells]), "|", flush=True)
    hosts.restore_hosts()
    hosts.close()


if __name__ == "__main__":
    main()
