"""Start the service for IDEs on ranks, and describe how an IDE attaches to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddip.errors import GroupError
from ddip.group.members.ranks import Ranks
from ddip.protocol import on_rank

ADVICE = """\
Add this to .vscode/launch.json, and start "{start}" under Run and Debug; breakpoint() in a cell then stops in the IDE.
The token lets its owner run code on the ranks. %dipdebug --off ends the service, which slows Python code down.
"""
FORWARD = "Forward the ports of {host} first: ssh -N {forwards} {host}\n"


@dataclass(frozen=True)
class IdeAccess:
    """The ports and the token with which an IDE attaches to ranks, with the Debug Adapter Protocol."""

    ports: dict[int, int]
    """Port of each rank, on the loopback interface of its host."""
    token: str = field(repr=False)
    """Text that the attach request contains as ``ddipToken``."""
    hosts: dict[int, str]
    """Name of the host of each rank that is not on this machine."""

    @property
    def launch(self) -> dict[str, Any]:
        """The contents of ``launch.json``: a configuration for each rank, and a compound of all."""
        ranks = {rank: f"ddip rank {rank}" for rank in self.ports}
        configurations = [
            {
                "name": name,
                "type": "debugpy",
                "request": "attach",
                "connect": {"host": "127.0.0.1", "port": self.ports[rank]},
                "ddipToken": self.token,
                "justMyCode": True,
            }
            for rank, name in ranks.items()
        ]
        together = {"name": "ddip", "configurations": list(ranks.values())}
        return {"version": "0.2.0", "configurations": configurations, "compounds": [together][: len(ranks) - 1]}

    def __str__(self) -> str:
        start = "ddip" if len(self.ports) > 1 else self.launch["configurations"][0]["name"]
        forwards: dict[str, list[str]] = {}
        for rank, host in self.hosts.items():
            forwards.setdefault(host, []).append(f"-L {self.ports[rank]}:127.0.0.1:{self.ports[rank]}")
        tunnels = [FORWARD.format(host=host, forwards=" ".join(each)) for host, each in forwards.items()]
        return "".join([ADVICE.format(start=start), *tunnels, json.dumps(self.launch, indent=2)])


def serve_ide(ranks: Ranks, where: Sequence[int], token: str) -> IdeAccess:
    """Start the service on the ranks in `where`, for IDEs that know `token`.

    Raises GroupError if debugpy cannot be used on one of them; the service has then ended on the others.
    """
    answers = dict(zip(where, ranks.ask(where, on_rank.serve_ide(token)), strict=True))
    ports = {rank: answer for rank, answer in answers.items() if isinstance(answer, int)}
    problems = [answer for answer in answers.values() if isinstance(answer, str)]
    if problems:
        end_ide(ranks, list(ports))
        raise GroupError(problems[0])
    hosts = {rank: ranks.host(rank).name for rank in where if ranks.host(rank).address}
    return IdeAccess(ports, token, hosts)


def end_ide(ranks: Ranks, where: Sequence[int]) -> None:
    """End the service on the ranks in `where`; ranks that have stopped in an IDE continue."""
    ranks.call_on_control_channel(where, on_rank.end_ide())
