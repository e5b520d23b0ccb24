"""Reach hosts through the engines of an existing ipyparallel cluster, without changing it.

Its engines do not become ranks: one engine per host starts ddip's agent there, as ssh does elsewhere, and the messages
between notebook and agent pass through that cluster's controller (``near_end.py``, ``far_end.py``).
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from typing import TYPE_CHECKING, Any

from ddip.cluster import folder
from ddip.cluster.reach import Attachment, Seat
from ddip.errors import GroupError

if TYPE_CHECKING:
    from ipyparallel import Client

GONE = "no controller answers there"
ANSWER_SECONDS = 10.0
"""Time that a controller, or an engine, may take to answer."""
WHERE = (
    "__import__('json').dumps([__import__('socket').gethostname(), __import__('sys').executable, "
    "[__import__('os').readlink(path) if 'ns' in path else open(path).read() for path in "
    "('/proc/sys/kernel/random/boot_id', '/proc/self/ns/net') if __import__('os').path.lexists(path)]])"
)
"""Expression for an engine's host name, Python, and boot and network namespace IDs, which identify the host."""


def connect_client(file: str, heard: Callable[[dict[str, Any]], None] = lambda message: None) -> Client:
    """Connect a client to the cluster with the connection file `file`, and return it.

    The caller must close it. `heard` gets the messages of a far end, on the client's thread. Raises GroupError if no
    controller answers, or if this ipyparallel lacks names that ddip needs for it.
    """
    with folder.left_out():
        from ddip.cluster import ipp_private
        from ddip.protocol import compat_ipyparallel

    if not compat_ipyparallel.NOTEBOOK.is_on(compat_ipyparallel.ATTACH):
        raise GroupError(f"{compat_ipyparallel.NOTEBOOK}: {compat_ipyparallel.ATTACH}; python -m ddip doctor says why")
    try:
        return ipp_private.LinkClient(file, heard, ANSWER_SECONDS)
    except (OSError, ValueError, KeyError, TimeoutError, NoAnswer) as error:
        raise GroupError(f"{file}: {GONE} ({str(error).strip() or 'no answer'})") from None


def ask_engines(client: Client, engines: Sequence[int], expression: str) -> list[Any]:
    """Evaluate `expression` in each of `engines`, even while they run code; return the values in order.

    The values must be Python literals. Waits up to ANSWER_SECONDS. Raises GroupError on any failure.
    """
    from ddip.cluster import ipp_private

    content = {"code": "", "silent": True, "user_expressions": {"ddip": expression}}
    try:
        answers = [ipp_private.send_control_request(client, engine, "execute_request", content) for engine in engines]
    except KeyError as error:
        raise GroupError(f"engine {error} of that cluster has just ended; try again") from None
    values, deadline = [], time.monotonic() + ANSWER_SECONDS
    for engine, answer in zip(engines, answers, strict=True):
        try:
            value = answer.result(max(0.1, deadline - time.monotonic()))["user_expressions"]["ddip"]
        except NoAnswer:
            raise GroupError(f"engine {engine} of that cluster has not answered for {ANSWER_SECONDS:g} s") from None
        except KeyError:
            raise GroupError(f"engine {engine} of that cluster cannot evaluate expressions for ddip") from None
        if value["status"] != "ok":
            raise GroupError(f"engine {engine} of that cluster: {value.get('ename')}: {value.get('evalue')}")
        values.append(ast.literal_eval(value["data"]["text/plain"]))
    return values


def find_hosts(file: str, name: str, n: int | None) -> Attachment:
    """Ask the engines of an ipyparallel cluster for their hosts, and return these in the order of engine IDs.

    `file`: connection file of the cluster; `name`: the cluster as the user typed it, for messages; `n`: the requested
    number of ranks, or None for one per engine. `n` is not checked: call ``ensure_enough`` of the result. Raises
    GroupError if the cluster has no engines, or if its controller or an engine does not answer.
    """
    client = connect_client(file)
    try:
        engines = sorted(client.ids)
        if not engines:
            raise GroupError(f"-c {name}: that cluster has no engines yet; start some, such as with ipcluster engines")
        seats: dict[str, list[Any]] = {}
        for engine, answer in zip(engines, ask_engines(client, engines, WHERE), strict=True):
            host, python, ids = json.loads(answer)
            seats.setdefault(json.dumps([host, ids]), [host, python, []])[2].append(engine)
    finally:
        client.close(linger=0)
    return Attachment(file, tuple(_seats_of(seats.values())), n)


def _seats_of(seats: Any) -> Iterator[Seat]:
    """Yield a seat for each host; number the second and later hosts of the same name."""
    taken: dict[str, int] = {}
    for host, python, engines in seats:
        taken[host] = taken.get(host, 0) + 1
        yield Seat(host if taken[host] == 1 else f"{host}#{taken[host]}", tuple(engines), python)
