"""A script on several hosts, of which one lacks it, or has another version; they share no folder of the notebook."""

from __future__ import annotations

from pathlib import Path

from ..cluster.notebook import Notebook
from .first_process import HOME
from .network import Network

SCRIPT = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
name = socket.gethostname()
"""


def test_hosts_run_their_copies_of_a_script(hosts: Network, tmp_path: Path) -> None:
    (tmp_path / "on_hosts.py").write_text(SCRIPT)
    copies = {name: hosts[name].path(f"{HOME}/on_hosts.py") for name in ("h1", "h2")}
    notebook = Notebook(tmp_path)
    try:
        notebook.ok("%load_ext ddip\n%makedip --hosts h1:1,h2:1")
        copies["h1"].write_text(SCRIPT)
        assert "h2 has no file" in notebook.fails("%diprun on_hosts.py").message
        copies["h2"].write_text(f"{SCRIPT}x += 1\n")
        assert "on h2 differs from the notebook's script" in notebook.fails("%diprun on_hosts.py").message
        copies["h2"].write_text(SCRIPT)
        notebook.ok("%diprun on_hosts.py")
        notebook.ok("%%dip\nassert (x.item(), name) == (2, ['h1', 'h2'][rank])\ndist.barrier()")
    finally:
        notebook.shut_down()
        for copy in copies.values():
            copy.unlink(missing_ok=True)
