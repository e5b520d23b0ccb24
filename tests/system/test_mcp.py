"""A program trains in a notebook through the tools for Jupyter MCP servers, and nothing else.

The server is Jupyter's with the extension jupyter-server-mcp, on loopback, with a token.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from jupyter_client import BlockingKernelClient

from ddip.cluster.processes.on_host import hold_port

from ..cluster.leftovers import assert_nothing_left
from .lab import wait_for

pytest.importorskip("jupyter_server_mcp")
from fastmcp import Client
from fastmcp.client.transports import StdioTransport, StreamableHttpTransport
from fastmcp.exceptions import ToolError

TOKEN = "a-token-of-this-test"
TRAIN = """
import os, time, torch
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
def train(steps, fails_at=None, seconds=0.0):
    for step in range(steps):
        if rank == 2 and step == fails_at:
            raise ValueError(f"the batch of step {step} is empty")
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print("rank", rank, "step", step)
        time.sleep(seconds)
"""
Call = Callable[..., Awaitable[Any]]


def _run_in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread, because the browser of other tests has a running loop in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@dataclass
class Server:
    """A running Jupyter server."""

    url: str
    mcp: str
    log: Path

    def request(self, path: str, /, **data: Any) -> Any:
        """Return the answer of the server's REST API."""
        body = json.dumps(data).encode() if data else None
        request = urllib.request.Request(f"{self.url}{path}", body, {"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(request, timeout=180) as answer:
            return json.loads(answer.read() or "null")

    def open(self, name: str) -> str:
        """Open a notebook with a kernel; return the kernel's ID."""
        kernel = {"name": "python3"}
        return str(self.request("/api/sessions", path=name, name=name, type="notebook", kernel=kernel)["kernel"]["id"])

    def client(self, token: str = TOKEN, in_url: bool = False) -> Client[Any]:
        """Return a program that has this `token`."""
        url = f"{self.mcp}?token={token}" if in_url else self.mcp
        headers = {"Authorization": f"Bearer {token}"} if token and not in_url else {}
        return Client(StreamableHttpTransport(url, headers=headers))

    def by_the_proxy(self, token: str = TOKEN) -> Client[Any]:
        """Return a program that speaks over standard input to the proxy of jupyter-server-mcp."""
        settings = {**os.environ, "JUPYTER_SERVER_MCP_URL": f"{self.mcp}?token={token}"}
        proxy = ["-m", "jupyter_server_mcp.proxy"]
        return Client(StdioTransport(sys.executable, proxy, env=settings, keep_alive=False))


@pytest.fixture(scope="module")
def monkeypatch_of_the_module() -> Iterator[pytest.MonkeyPatch]:
    """Yield a monkeypatch that is undone after all tests of the module."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, monkeypatch_of_the_module: pytest.MonkeyPatch) -> Iterator[Server]:
    """Start a Jupyter server, and prove that no rank outlives it."""
    folder = tmp_path_factory.mktemp("mcp")
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    settings = {**places, "IPYTHONDIR": str(folder / "ipython"), "JUPYTER_TOKEN": TOKEN}
    monkeypatch_of_the_module.setenv("IPYTHONDIR", settings["IPYTHONDIR"])  # where the search for leftovers looks
    port = hold_port()
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--ip=127.0.0.1", "--allow-root"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    command += ["--ServerApp.jpserver_extensions=jupyter_server_mcp=True", "--MCPExtensionApp.mcp_port=0"]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **settings}, cwd=folder)
    kernels: list[int] = []
    try:
        connection_file = folder / "runtime" / f"jpserver-mcp-{process.pid}.json"
        wait_for(lambda: connection_file.exists() or process.poll() is not None, "the server", 90)
        assert process.poll() is None, log.read_text()
        yield Server(url, json.loads(connection_file.read_text())["url"], log)
        kernels += [child.pid for child in psutil.Process(process.pid).children()]
    finally:
        process.terminate()
        process.wait(timeout=30)
    for pid in kernels:
        assert_nothing_left(pid)


def run(server: Server, steps: Callable[[Call], Awaitable[None]]) -> None:
    """Run the steps of a program, which get the tools as a function.

    An answer that is not a list or an object is text.
    """

    async def run_steps() -> None:
        async with server.client() as client:

            async def call(tool: str, **arguments: Any) -> Any:
                return (await client.call_tool(tool, arguments)).data

            await steps(call)

    _run_in_thread(run_steps())


@pytest.mark.timeout(600)
def test_a_program_trains_and_repairs_a_killed_rank_over_mcp(server: Server) -> None:
    server.open("train.ipynb")

    async def steps(call: Call) -> None:
        assert [found["notebook"] for found in await call("ddip_notebooks")] == ["train.ipynb"]
        assert (await call("ddip_status"))["group"] is None
        started = await call("ddip_start", arguments="-n 3")
        assert started["group"]["size"] == len(started["ranks"]) == 3

        cell = await call("ddip_run", code=TRAIN)
        assert (await call("ddip_poll", number=cell["number"], wait=60))["outcome"] == "ok"
        cell = await call("ddip_run", code="train(4)")
        assert (await call("ddip_poll", wait=60))["outcome"] == "ok"
        output = await call("ddip_output", number=cell["number"])
        for rank in "012":
            assert f"rank {rank} step 3" in output["ranks"][rank]["text"]
        pulled = await call("ddip_pull", names=["losses", "net"], rank=1)
        assert len(pulled["losses"]["json"]) == 4 and "Linear" in pulled["net"]["text"]

        cell = await call("ddip_run", code="train(4, fails_at=2)")
        assert (await call("ddip_poll", wait=60))["outcome"] == "user_error"
        ranks = (await call("ddip_output", number=cell["number"]))["ranks"]
        assert [ranks[rank]["state"] for rank in "012"] == ["released", "released", "failed"]
        error = ranks["2"]["error"]
        assert (error["name"], error["message"]) == ("ValueError", "the batch of step 2 is empty")
        assert "fails_at" in error["traceback"] and "\x1b" not in error["traceback"]
        assert "step 1" in ranks["2"]["text"]
        assert (await call("ddip_status"))["errors"]["2"]["cell"] == cell["number"]

        await call("ddip_run", code="if rank == 1: os.kill(os.getpid(), 9)\ntorch.distributed.barrier()")
        assert (await call("ddip_poll", wait=60))["outcome"] == "rank_died"
        assert [found["state"] for found in (await call("ddip_status"))["ranks"]] == ["idle", "ended", "idle"]
        with pytest.raises(ToolError, match="%makedip --repair"):
            await call("ddip_run", code="1")
        repaired = await call("ddip_repair", names=["losses"])
        assert repaired["group"]["healthy"] and len({found["pid"] for found in repaired["ranks"]}) == 3
        pulled = await call("ddip_pull", names=["losses"], rank=1)
        assert len(pulled["losses"]["json"]) > 4

        await call("ddip_run", code=TRAIN)
        cell = await call("ddip_run", code="train(10_000, seconds=0.05)", queue=True)
        running = await call("ddip_poll", number=cell["number"], wait=1)
        assert (running["state"], running["outcome"]) == ("running", None)
        now = await call("ddip_status")
        assert [found["cell"] for found in now["ranks"]] == [cell["number"]] * 3
        with pytest.raises(ToolError, match=f"cell {cell['number']} .*rank 0"):
            await call("ddip_pull", names=["losses"])
        assert (await call("ddip_stop"))["outcome"] == "interrupted"
        assert len((await call("ddip_pull", names=["losses"]))["losses"]["json"]) >= 1
        assert await call("ddip_shutdown") == "the group has ended"
        assert (await call("ddip_status"))["group"] is None

    run(server, steps)


def test_a_client_without_the_token_gets_nothing(server: Server) -> None:
    server.open("train.ipynb")

    async def try_tool(client: Client[Any], tool: str = "ddip_status") -> str:
        async with client:
            try:
                await client.call_tool(tool, {"code": "1"} if tool == "ddip_run" else {})
            except ToolError as error:
                return str(error)
            return ""

    async def try_tokens() -> None:
        for tool in ("ddip_notebooks", "ddip_start", "ddip_run", "ddip_status", "ddip_shutdown"):
            assert "needs the token of the Jupyter server" in await try_tool(server.client(token=""), tool)
        assert "is not the token" in await try_tool(server.client(token="another"))
        assert "is not the token" in await try_tool(server.client(token="another", in_url=True))
        assert await try_tool(server.client(in_url=True)) == ""
        assert await try_tool(server.client()) == ""

        assert await try_tool(server.by_the_proxy()) == ""
        assert "needs the token" in await try_tool(server.by_the_proxy(token=""))

    _run_in_thread(try_tokens())
    assert "needs the token" in _call_in_foreign_session(server)
    assert server.request("/api/sessions")[0]["kernel"]["execution_state"] in ("idle", "starting", "busy")
    request = urllib.request.Request(f"{server.url}/api/sessions")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=30)


def _call_in_foreign_session(server: Server) -> str:
    """Return the answer to a call without a token, in a session that began with one."""
    kinds = {"Accept": "application/json, text/event-stream"}
    own = {**kinds, "Authorization": f"token {TOKEN}"}
    about = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    begun = httpx.post(server.mcp, json=message, headers=own)
    assert begun.status_code == 200, begun.text
    session = {"Mcp-Session-Id": begun.headers["mcp-session-id"]}
    notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    httpx.post(server.mcp, json=notification, headers={**own, **session})
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "ddip_status", "arguments": {}}}
    assert '"group' in httpx.post(server.mcp, json=call, headers={**own, **session}).text
    return httpx.post(server.mcp, json=call, headers={**kinds, **session}).text


def test_a_busy_kernel_says_so_and_does_nothing_later(server: Server) -> None:
    kernel = server.open("train.ipynb")

    async def steps(call: Call) -> None:
        assert (await call("ddip_status"))["group"] is None
        with (
            _busy_kernel(server, kernel),
            pytest.raises(ToolError, match="nothing was done"),
        ):
            await call("ddip_start", arguments="-n 1")
        assert (await call("ddip_status"))["group"] is None
        server.open("another.ipynb")
        with pytest.raises(ToolError, match="`notebook`: .*another.ipynb"):
            await call("ddip_status")
        assert (await call("ddip_status", notebook="train.ipynb"))["group"] is None
        with pytest.raises(ToolError, match="no.ipynb: "):
            await call("ddip_status", notebook="no.ipynb")
        with pytest.raises(ToolError, match="BadInput: %makedip -x"):
            await call("ddip_start", arguments="-x", notebook="train.ipynb")

    run(server, steps)


@contextlib.contextmanager
def _busy_kernel(server: Server, kernel: str) -> Iterator[None]:
    """Run a cell of the notebook meanwhile, as if a person had started it."""
    client = BlockingKernelClient()
    folder = server.log.parent / "runtime"
    client.load_connection_file(str(folder / f"kernel-{kernel}.json"))
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        client.execute("import time; time.sleep(60)")
        yield
    finally:
        server.request(f"/api/kernels/{kernel}/interrupt", now=True)
        client.stop_channels()
