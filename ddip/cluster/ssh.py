"""How ssh starts a host's agent, and takes the controller's sockets there: the user's own ssh, with its configuration.

One connection a host. It can be used again by whoever can open its socket in the run folder (ssh's ControlPath).
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddip.cluster import links
from ddip.errors import GroupError

MISSED_BEATS = 40
"""How many of its own heartbeats ssh may miss: what is silent for so long, though its kernel acknowledges, is of no
use. A link that is cut is seen before (``links.py``)."""
FORWARD_SECONDS = 10.0
QUIET = ("-o", "LogLevel=ERROR")


def command(host: str, control: Path, python: str, setup: str) -> list[str]:
    """What starts the agent of `host`; its connection can be used again through `control`.

    `python`: which one to take there; empty: the notebook's, where the host has it at the same place, else its
    ``python3``. `setup`: a line for the host's bash that runs before, as a login shell has it.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": f"{links.BEAT_SECONDS:.0f}",
        "ServerAliveCountMax": str(MISSED_BEATS),
        "ControlMaster": "yes",
        "ControlPersist": "no",
        "ControlPath": str(control),
        "RemoteCommand": "none",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *words, "--", host, agent_line(python, setup)]


def agent_line(python: str, setup: str) -> str:
    """A line for a shell on another host that becomes the agent; arguments as in `command`."""
    agent = "-P -m ddip.cluster.agent"
    if setup:
        line = f"{setup} && exec {shlex.quote(python or 'python')} {agent}"
        return f"exec bash -lc {shlex.quote(line)}"
    if python:
        return f"exec {shlex.quote(python)} {agent}"
    ours = shlex.quote(sys.executable)
    return f"exec sh -c {shlex.quote(f'if [ -x {ours} ]; then exec {ours} {agent}; else exec python3 {agent}; fi')}"


def forward(host: str, control: Path, sockets: Mapping[Path, Path]) -> None:
    """Have each of `sockets` there, by its path, lead to one here. Raises GroupError."""
    pairs = [word for there, here in sockets.items() for word in ("-R", f"{_escaped(there)}:{_escaped(here)}")]
    done = _control(host, control, "-O", "forward", *pairs)
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise GroupError(
            f"{host}: its ssh server takes no sockets of the controller there ({why}); allow it "
            "(AllowStreamLocalForwarding yes, AllowTcpForwarding yes), or type --ip with the address at which the "
            "hosts reach this machine"
        )


def _control(host: str, control: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Speak to the connection of `host`."""
    command = ["ssh", *QUIET, "-S", str(control), *words, "--", host]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FORWARD_SECONDS)
    except subprocess.TimeoutExpired:
        raise GroupError(f"{host}: ssh has not forwarded the controller's sockets for {FORWARD_SECONDS:g} s") from None


def _escaped(path: Path) -> str:
    """A colon in a path would begin the next one."""
    return str(path).replace("\\", "\\\\").replace(":", "\\:")


def reason(host: str, said: str, python: str) -> str:
    """What to say of a host whose agent did not start, by what was `said` instead."""
    last = said.strip().rpartition("\n")[2]
    cures: Sequence[tuple[str, str]] = (
        (
            "Permission denied",
            f"ssh must get there without a question: try `ssh {host} true` in a terminal, and ssh-add",
        ),
        ("Host key verification failed", f"type `ssh {host} true` in a terminal once, and look at the key"),
        ("Could not resolve", "is that its name? ~/.ssh/config may give it another"),
        ("No module named 'ddip'", "install ddip there, in the same version, or name its Python with --python"),
        ("No module named", "install ddip there with what it needs, or name its Python with --python"),
        ("nknown option", "its Python is older than 3.11; name another with --python"),
        ("not found", "there is no such program there; name its Python with --python, or prepare it with --setup"),
        ("No such file", "there is no such program there; name its Python with --python, or prepare it with --setup"),
    )
    cure = next((cure for sign, cure in cures if sign in said), "")
    return f"{host}: {last or 'ssh ended without a word'}" + (f"; {cure}" if cure else "")
