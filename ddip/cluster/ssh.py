"""Start a host's agent with the user's ssh and its configuration; one connection per host."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from ddip.cluster.processes import links

MISSED_BEATS = 40
"""Unanswered heartbeats after which ssh gives up: a host that is silent for so long is useless even if its kernel
acknowledges. ``links.py`` notices a cut link earlier."""

ASK_SECONDS = 5.0
"""Time limit of ssh for printing its configuration."""
SHELL_MARKER = "#ddip shell"
"""Line that the host's shell prints when it has come to ddip's command."""
NOT_RUN = (
    "its login shell did not run ddip's command; look in its ~/.bashrc and ~/.profile for a line that exits or starts "
    "another program, and in its sshd_config for ForceCommand"
)
NOT_BEGUN = (
    "ddip's command has not begun there; ssh may still be connecting, or a line of its ~/.bashrc or ~/.profile waits "
    "for input or starts another shell: try `ssh {host} true < /dev/null` in a terminal"
)
LINK = "try again once `ssh {host} true` works in a terminal"
DOWN = "is it up? with --hosts on the same line, as in --hosts h1:4,h3:4, another host takes its place"


def agent_command(host: str, python: str, setup: str) -> list[str]:
    """Return the ssh command, as a list of arguments, that starts the agent on `host`.

    `setup`: a line that the host's bash runs first, as a login shell; if it fails, no agent starts. `python`: the
    interpreter to run there. If it is empty: the ``python`` of `setup`; without `setup`, the notebook's path if it
    exists on the host, else ``python3``.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": f"{links.BEAT_SECONDS:.0f}",
        "ServerAliveCountMax": str(MISSED_BEATS),
        "ControlMaster": "no",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *words, "--", _ssh_destination(host), agent_line(python, setup)]


def _ssh_destination(host: str) -> str:
    """Return `host` as ssh expects it: an IPv6 address without the brackets in which users type it."""
    return host.replace("[", "").replace("]", "")


def has_proxy(host: str) -> bool:
    """Ask ``ssh -G``; return True if ssh reaches `host` through a ProxyJump or ProxyCommand.

    False if ssh does not answer.
    """
    command = ["ssh", "-G", "--", _ssh_destination(host)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(line.startswith(("proxyjump ", "proxycommand ")) for line in done.stdout.splitlines())


def agent_line(python: str, setup: str) -> str:
    """Return a shell line that starts the agent on another host; arguments as in `agent_command`."""
    agent = "-P -m ddip.cluster.hosts.agent"
    begin = f"echo '{SHELL_MARKER}'"
    if setup:
        line = f"{begin}; {setup} && exec {shlex.quote(python or 'python')} {agent}"
        return f"exec bash -lc {shlex.quote(line)}"
    if python:
        return f"{begin}; exec {shlex.quote(python)} {agent}"
    ours = shlex.quote(sys.executable)
    line = f"if [ -x {ours} ]; then exec {ours} {agent}; else exec python3 {agent}; fi"
    return f"{begin}; exec sh -c {shlex.quote(line)}"


def explain_failure(host: str, output: str, python: str, setup: str) -> str:
    """Return why the agent of `host` did not start, with a remedy for a known cause.

    The reason is the last line of its `output`. Other arguments as in `agent_command`.
    """
    lines = output.strip().splitlines()
    if setup and any("command not found" in line for line in lines):  # srun's messages after that say nothing useful
        lines = [line for line in lines if "command not found" in line]
    last = lines[-1] if lines else ""
    missing = "that program is not installed there; name its Python with --python, or prepare it with --setup"
    if setup:
        missing = (
            f"the message may come from --setup {setup!r}, which runs first; if Python is elsewhere, name it with "
            "--python"
        )
    elif python:
        missing = f"is there a {python} on that host?"
    cures: Sequence[tuple[str, str]] = (
        (
            "Permission denied",
            f"ssh must connect without a prompt: try `ssh {host} true` in a terminal, and ssh-add",
        ),
        ("Host key verification failed", f"type `ssh {host} true` in a terminal once, and look at the key"),
        ("Could not resolve", "is that its name? ~/.ssh/config may give it another"),
        ("No module named 'ddip'", "install ddip there, in the same version, or name its Python with --python"),
        ("No module named", "install ddip there with what it needs, or name its Python with --python"),
        ("nknown option", "its Python is older than 3.11; name another with --python"),
        ("not found", missing),
        ("No such file", missing),
        ("No space left on device", "free some there, in its folder for temporary files"),
        ("onnection timed out", DOWN),
        ("No route to host", DOWN),
        ("onnection refused", "does sshd run there, and on that port?"),
        ("has sent nothing", LINK.format(host=host)),
        ("closed by remote host", LINK.format(host=host)),
    )
    cure = next((cure for sign, cure in cures if sign in output), "")
    return f"{host}: {last or 'ssh ended without a message'}" + (f"; {cure}" if cure else "")
