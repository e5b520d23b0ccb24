"""The first process of a host: a program that reads from top to bottom.

It starts in the host's namespaces, creates the host's folders, names and interfaces, and becomes its sshd. Its
configuration comes as JSON on stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

HOME = pwd.getpwuid(0).pw_dir
PRIVATE = {"/tmp": "1777", "/var/tmp": "1777", "/dev/shm": "1777", "/run": "755", "/etc/slurm": "755", HOME: "700"}
MS_BIND, MS_REC = 0x1000, 0x4000

SSHD = """
ListenAddress 0.0.0.0
HostKey /run/host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
"""


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2), because mount(8) would resolve links of /proc/self/fd that are hidden by now."""
    if ctypes.CDLL(None, use_errno=True).mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: mount of {source} at {target}")


def bind_mount(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)


def write(path: str, text: str, mode: int = 0o600) -> None:
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(path).write_text(text)
    Path(path).chmod(mode)


def own_folders(kept: list[str]) -> None:
    """Mount empty folders, which end with the host.

    The folders in `kept`, the Python environment and this checkout, stay visible in them.
    """
    hidden = [path for path in kept if any(Path(path).is_relative_to(folder) for folder in PRIVATE)]
    descriptors = {path: os.open(path, os.O_PATH) for path in hidden}
    for folder, mode in PRIVATE.items():
        mount("tmpfs", folder, "tmpfs", data=f"mode={mode}")
    for path, descriptor in descriptors.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        bind_mount(f"/proc/self/fd/{descriptor}", path)
    # /sys must show the interfaces of the new network namespace; the limits of this machine stay.
    Path("/run/cgroup").mkdir()
    bind_mount("/sys/fs/cgroup", "/run/cgroup")
    mount("sysfs", "/sys", "sysfs")
    bind_mount("/run/cgroup", "/sys/fs/cgroup")


def own_names(hostname: str, hosts: str) -> None:
    socket.sethostname(hostname)
    shadow = Path("/etc/shadow").read_text().splitlines()
    shadow = ["root:*:19000:0:99999:7:::" if line.startswith("root:") else line for line in shadow]
    for path, text, mode in [
        ("/etc/hosts", hosts, 0o644),
        ("/etc/hostname", hostname + "\n", 0o644),
        ("/etc/resolv.conf", "", 0o644),  # no DNS server
        ("/etc/shadow", "\n".join(shadow) + "\n", 0o600),  # sshd refuses locked accounts
    ]:
        if Path(path).exists():
            write("/run" + path, text, mode)
            bind_mount("/run" + path, path)


def main() -> None:
    print("ready", flush=True)  # its namespaces exist, so links can be moved into them
    config = json.load(sys.stdin)
    own_folders(config["kept"])
    own_names(config["hostname"], config["hosts"])
    for path, text in config["files"].items():
        write(path.replace("~", HOME), text)
    bare = Path("/run/bare/bin")  # an environment without installed packages
    bare.mkdir(parents=True)
    write("/run/bare/pyvenv.cfg", f"home = {config['base_python']}\n")
    for name in ("python", "python3"):
        (bare / name).symlink_to(f"{config['base_python']}/python3")
    environment = " ".join(f'"{name}={value}"' for name, value in config["environment"].items())
    write("/run/sshd_config", "\n".join([*config["sshd"], SSHD, f"SetEnv {environment}\n"]))
    Path("/run/sshd").mkdir(mode=0o755)
    links = [f"link set {name} up\naddr add {address} dev {name}\n" for name, address in config["interfaces"].items()]
    subprocess.run(["ip", "-batch", "-"], input="link set lo up\n" + "".join(links), text=True, check=True)
    log = os.open("/run/sshd.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, descriptor in ((0, os.open("/dev/null", os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(descriptor, stream)
    os.chdir("/")
    os.execv("/usr/sbin/sshd", ["/usr/sbin/sshd", "-D", "-e", "-f", "/run/sshd_config"])


if __name__ == "__main__":
    main()
