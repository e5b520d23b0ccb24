"""A notebook's cells behave the same on two hosts: output, stop, completion, widgets and downloads."""

from __future__ import annotations

import functools
import http.server
import io
import shlex
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ddip

from ..cluster.notebook import Notebook
from ..cluster.test_display import ask_until_answered
from ..cluster.test_widgets import captured_texts, click_button, widgets_of_model
from .network import Network
from .test_ssh import pull_from_all

SECRET = "rosebud-7dc1"


@pytest.fixture
def hosts(network: Network) -> Network:
    """Return the hosts; the tests share a group, so leftovers are checked once at the end."""
    return network


@pytest.fixture(scope="module")
def host_notebook(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Start a notebook with two ranks on h1 and two on h2."""
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    try:
        notebook.ok("%load_ext ddip")
        notebook.ok("%makedip --hosts h1:2,h2:2")
        yield notebook
    finally:
        notebook.shut_down()


def test_output_of_each_rank_is_shown_separately(host_notebook: Notebook) -> None:
    shown = host_notebook.ok("%%dip -S all\nimport socket; print('on', socket.gethostname()); display(rank * 10)")
    page = "".join(bundle.get("text/html", "") for bundle in shown.outputs)
    for rank, host in enumerate(["h1", "h1", "h2", "h2"]):
        assert f"on {host}" in page and str(rank * 10) in page
    table = host_notebook.ok("%makedip -i").stdout.splitlines()
    assert [line.split()[1] for line in table[1:5]] == ["h1", "h1", "h2", "h2"]


def test_an_error_on_another_host_shows_its_line(host_notebook: Notebook) -> None:
    failed = host_notebook.fails(
        "%%dip\nx = 1\nif rank == 3:\n    1 / 0\nimport torch.distributed as dist; dist.barrier()"
    )
    assert failed.message.startswith("rank 3: ZeroDivisionError: ")
    assert "----> 3     1 / 0" in failed.traceback
    assert host_notebook.ok("%%dip\nprint(x)").stdout == "1\n"


def test_stacks_stops_and_timeouts_reach_all_hosts(host_notebook: Notebook) -> None:
    hang = "import torch, torch.distributed as dist\nprint('in')\nif rank != 2: dist.all_reduce(torch.ones(1))"
    hang += "\nelse:\n    while True: pass"
    cell = host_notebook.begin(f"%%dip\nkept = rank\n{hang}")
    host_notebook.finish(cell, until="in")
    host_notebook.interrupt()
    assert host_notebook.finish(cell).error == "CellInterrupted"
    assert host_notebook.fails(f"%%dip --timeout 2\n{hang}").error == "CellTimeout"
    assert host_notebook.ok("%dipstack").stdout == "  ranks 0-3: idle\n"
    assert host_notebook.ok("%%dip -S all -q\nassert kept == rank").status == "ok"


def test_tab_knows_the_names_of_the_ranks(host_notebook: Notebook) -> None:
    host_notebook.ok("%%dip\nclass There:\n    def method(self): 'Does it.'\nthing = There()")
    assert ask_until_answered(host_notebook, "complete", "%%dip -S all\nthing.me")["matches"] in (
        [".method"],
        ["thing.method"],
    )
    host_notebook.ok("%autodip on")
    assert ask_until_answered(host_notebook, "complete", "x = thing.me")["matches"] in ([".method"], ["thing.method"])
    host_notebook.ok("%autodip off")


def test_a_button_of_a_rank_on_the_other_host_works(host_notebook: Notebook) -> None:
    cell = host_notebook.begin("""
        %%dip -r 3 -S 3
        import ipywidgets, socket
        button, out = ipywidgets.Button(), ipywidgets.Output()
        def clicked(_):
            with out: print('clicked on', socket.gethostname())
        button.on_click(clicked)
        display(button, out)
    """)
    shown = host_notebook.finish(cell)
    (button,) = widgets_of_model(shown, "ButtonModel")
    click_button(host_notebook, button)
    late = host_notebook.late_messages(cell, lambda messages: "clicked" in "".join(captured_texts(messages).values()))
    assert "clicked on h2\n" in captured_texts(late).values()


def test_objects_and_functions_of_the_notebook_survive_a_round_trip(host_notebook: Notebook) -> None:
    host_notebook.ok("from ddip import in_torchddp\nimport torch\ndata = torch.arange(12.0)")
    host_notebook.ok("""
        def total():
            import torch.distributed as dist
            x = data[rank::world_size].sum()
            dist.all_reduce(x)
            return x.item(), world_size
        found = in_torchddp(4, total, need='data')
    """)
    assert host_notebook.ok("print(found)").stdout == "(66.0, 4)\n"
    host_notebook.ok("%dipush data")
    host_notebook.ok("%%dip\nback = data * (rank + 1)")
    host_notebook.ok("%dipull -r 3 back")
    assert host_notebook.ok("print(back.sum().item())").stdout == "264.0\n"


def test_no_key_appears_in_files_commands_or_environments(host_notebook: Notebook, network: Network) -> None:
    keys = host_notebook.ok("""
        import json
        from ddip.group.session import current_group
        file = current_group().cluster._ipp.controller.connection_files['engine']
        known = json.load(open(file))
        print(known['curve_serverkey'])  # who has it is let in
        print(oct(__import__('os').stat(file).st_mode)[-3:])
    """).stdout.split()
    secret, mode = keys
    assert len(secret) == 40 and mode == "600"
    for name in ("h1", "h2"):
        host = network[name]
        seen = host.run(["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"], check=False).stdout
        assert seen.count("ddip.cluster.hosts.agent") == 1 and "DDIP_" in seen and secret not in seen
        for path in host.files():
            if host.path(path).is_file():
                assert secret.encode() not in host.path(path).read_bytes(), path


def test_code_output_and_pushed_objects_travel_encrypted(host_notebook: Notebook, network: Network) -> None:
    with network.sniffed() as frames:
        for _ in range(5):
            host_notebook.ok(f"%%dip -S all\ntext = '{SECRET}'; print('{SECRET}')")
            host_notebook.ok(f"told = '{SECRET}'\n%dipush told")
    assert len(frames) > 100 and SECRET.encode() not in frames
    with network.sniffed() as frames:  # gloo's traffic is not encrypted, as the docs say
        host_notebook.ok(
            "%%dip\nimport torch.distributed as dist\nfor _ in range(5): dist.broadcast_object_list([text])"
        )
    assert SECRET.encode() in frames


def test_a_connection_without_the_key_is_refused(host_notebook: Notebook) -> None:
    shown = host_notebook.ok("""
        import zmq
        from zmq.utils.monitor import recv_monitor_message
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            events = stranger.get_monitor_socket()
            stranger.connect(f"{known['interface']}:{known['registration']}")
            while (event := recv_monitor_message(events)['event']) not in (
                zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            ):
                pass
            stranger.disable_monitor()
        print(event != zmq.EVENT_HANDSHAKE_SUCCEEDED)
    """).stdout
    assert shown == "True\n"


class _Counting(http.server.SimpleHTTPRequestHandler):
    request_counts: Counter[tuple[str, str]] = Counter()

    def do_GET(self) -> None:
        self.request_counts[self.client_address[0], self.path] += 1
        super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.long
def test_fastai_downloads_once_per_host_and_trains(hosts: Network, tmp_path: Path) -> None:
    pytest.importorskip("fastai")
    with tarfile.open(tmp_path / "tiny.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("tiny/data.csv")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"a,b\n"))
    handler = functools.partial(_Counting, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer((hosts["nb"].address, 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with ddip.Group(2, hosts="h1,h2", app="fastai", timeout=120) as group:
                group.run(f"""
                    import os; os.environ["FASTAI_HOME"] = "/run/fastai"
                    from fastai.data.external import *
                    from fastai.distributed import rank0_first
                    path = untar_data("http://{hosts["nb"].address}:{server.server_port}/tiny.tgz")
                    told = (path / "data.csv").read_text()
                    order = rank0_first(lambda: rank)
                    from fastai.basics import *
                    x = torch.linspace(-1, 1, 64)[:, None]
                    set_seed(1)
                    dls = DataLoaders.from_dsets(list(zip(x, 3 * x)), list(zip(x, 3 * x)), bs=8)
                    learn = Learner(dls, nn.Linear(1, 1), loss_func=MSELossFlat(), lr=0.1)
                    learn.fit(2)
                    weight = learn.model.weight.item()
                """)
                assert pull_from_all(group, "told") == ["a,b\n"] * 4 and pull_from_all(group, "order") == [0, 1, 2, 3]
                assert len(set(pull_from_all(group, "weight"))) == 1
        finally:
            server.shutdown()
            for name in ("h1", "h2"):
                hosts[name].run(["sh", "-c", "rm -rf /run/fastai ~/.cache ~/.config"])  # including matplotlib's
    assert dict(_Counting.request_counts) == {(hosts[name].address, "/tiny.tgz"): 1 for name in ("h1", "h2")}


ROUND_TRIP = 0.2
"""Seconds. Ranks are asked what they do once a cell takes longer than half a second, which adds round trips."""


@pytest.mark.parametrize("code", ["pass", "print(rank)", "dist.all_reduce(x)"])
def test_a_cell_takes_one_round_trip_of_the_network(far_group: tuple[ddip.Group, Path], code: str) -> None:
    group, delay = far_group
    group.run("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)")
    delay.write_text(f"{ROUND_TRIP / 2}")
    seconds = []
    for _ in range(7):
        began = time.monotonic()
        group.run(code)
        seconds.append(time.monotonic() - began)
    delay.write_text("0")
    assert ROUND_TRIP <= min(seconds) < 2 * ROUND_TRIP


@pytest.fixture(scope="module")
def far_group(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ddip.Group, Path]]:
    """Start a group on two hosts behind a slow link, and return the file with the delay per direction."""
    delay, config = tmp_path_factory.mktemp("far") / "delay", network["nb"].path("~/.ssh/config")
    delay.write_text("0")
    proxy = [sys.executable, str(Path(__file__).with_name("slow_link.py")), "%h", "%p", str(delay)]
    config.write_text(f"Host h1 h2\n    ProxyCommand {shlex.join(proxy)}\n")
    try:
        with ddip.Group(1, hosts="h1,h2") as group:
            yield group, delay
    finally:
        config.unlink()
