"""Prepare the rendezvous of ranks that form a group: its store, network and MASTER_PORT, and each `RankSpec`.

ranks on one host         a file in the run folder there, which only this user can open; gloo connects over loopback
ranks on several hosts    a TCPStore served by the first rank, at an address that the other hosts reach; it listens
                          before any rank joins, since a client that finds no server retries until its timeout
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.cluster.processes import on_host, preload_client
from ddip.cluster.processes.host import NEEDED_SECONDS, Host, HostLost, LocalHost, wait_for
from ddip.errors import GroupError, PartitionError, RequestFailed
from ddip.group.members.engines import threads_per_rank
from ddip.group.members.placement import GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.group.process_group import network
from ddip.group.process_group.network import Network, Partition
from ddip.protocol import on_rank
from ddip.protocol.rank_spec import INTERFACE_VARIABLES, RankSpec

PATIENCE_SECONDS = 8.0
"""Time for which hosts must fail to reach each other to count as apart; a link that is cut for 5 s does not."""
BRIEF_SECONDS = 0.5
"""Time for one more try after that, and for a look while a cell runs."""


@dataclass
class Rendezvous:
    """The rendezvous of some of a group's ranks."""

    ranks: tuple[int, ...]
    """The ranks, in the order of the group that they form."""
    hosts: tuple[int, ...]
    """Numbers of their hosts, ordered by the first rank on each."""
    networks: tuple[Network, ...]
    """Networks of these hosts, in the same order."""
    store: str = ""
    """Path of the store's file on their host, or ``tcp://address:port/number``."""
    master_port: int = 0


def _bracket_ipv6(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class RendezvousFactory:
    """Creates the rendezvous of one cluster, and holds the MASTER_PORT."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._networks: dict[tuple[int, ...], tuple[tuple[Host, ...], tuple[Network, ...]]] = {}
        self.held = 0
        """The latest MASTER_PORT given to ranks; it is held open on the host of the first of them."""
        self._holder: Host | None = None
        self._partition: Partition | None = None
        """The last try's result; None if the hosts reached each other."""

    def ensure_connected(self, hosts: Sequence[int]) -> None:
        """Raise PartitionError if `hosts`, without those that are lost, cannot connect to each other.

        They try for `PATIENCE_SECONDS`, counted from the first try that failed. Raises GroupError if a host does not
        answer the notebook.
        """
        waited = 0.0 if self._partition is None else time.time() - self._partition.since
        seconds = max(BRIEF_SECONDS, PATIENCE_SECONDS - waited)
        present = [host for host in hosts if not self._host_at(host).lost]
        try:
            partition = self.find_partition(present, seconds, NEEDED_SECONDS)
        except GroupError:
            if not any(self._host_at(host).lost for host in present):
                raise
            self.ensure_connected(hosts)  # one was lost during the try
            return
        if partition is not None:
            raise PartitionError(str(partition))

    def find_partition(
        self, hosts: Sequence[int], seconds: float = BRIEF_SECONDS, answer_seconds: float = 2 * BRIEF_SECONDS
    ) -> Partition | None:
        """Have the hosts numbered `hosts` try for `seconds` to reach each other; return which could not.

        Returns None if all could. Raises GroupError if a host does not answer the notebook within `answer_seconds`.
        """
        began, places = time.time(), tuple(hosts)
        gaps = []
        if len(places) > 1:
            networks = self._networks_between(places)
            try:
                gaps = network.find_gaps([*map(self._host_at, places)], networks, seconds, answer_seconds)
            except (RuntimeError, OSError) as error:
                raise GroupError(str(error)) from None
        since = began if self._partition is None else self._partition.since
        self._partition = Partition(gaps, since) if gaps else None
        return self._partition

    def forget_partition(self) -> None:
        """Discard the last result: cells have used the group since."""
        self._partition = None

    def prepare(self, number: int, ranks: Sequence[int]) -> Rendezvous:
        """Create the rendezvous `number` of `ranks`, with a new MASTER_PORT; raise GroupError if that fails."""
        hosts = tuple(dict.fromkeys(self._ranks.members[rank].binding.host for rank in ranks))
        meeting = Rendezvous(tuple(ranks), hosts, self._networks_between(hosts))
        first = self._host_at(hosts[0])
        try:
            if len(hosts) == 1:
                folder = str(first.run_folder)
                wait_for(first, first.begin(on_host.ensure_private, folder))  # a cell may have removed it
                meeting.store = f"{folder}/store-{number}"
            else:
                port = self._serve_store(ranks[0], meeting.networks[0].address)
                meeting.store = f"tcp://{_bracket_ipv6(meeting.networks[0].address)}:{port}/{number}"
            self.hold_port(first)
        except HostLost as error:
            raise GroupError(str(error)) from None
        meeting.master_port = self.held
        return meeting

    def _networks_between(self, hosts: tuple[int, ...]) -> tuple[Network, ...]:
        now = tuple(map(self._host_at, hosts))
        known = self._networks.get(hosts)
        if known is None or known[0] != now:
            known = self._networks[hosts] = now, tuple(network.of_hosts(now))
        return known[1]

    def _host_at(self, number: int) -> Host:
        return self._ranks.cluster.hosts[number]

    def _serve_store(self, rank: int, address: str) -> int:
        """Make `rank` serve the store at `address`, and return the port.

        Raises RequestFailed if the rank does not answer in time.
        """
        (answer,) = self._ranks.call_on_control_channel([rank], on_rank.serve_store(address), NEEDED_SECONDS).values()
        if answer is None:
            problem = f"rank {rank} did not open the group's store at {address} within {NEEDED_SECONDS:g} s"
            raise RequestFailed(problem, {}, [rank])
        return answer

    def hold_port(self, holder: Host | None = None) -> tuple[int, int]:
        """Reserve a new MASTER_PORT, release the former one, and return both: the former and the new one.

        The port is on `holder`, by default the host of the former port, at first host 0. The former port is 0 if there
        was none. Raises HostLost if the host is lost or does not answer.
        """
        former, self._holder = self._holder, holder or self._holder or self._host_at(0)
        same_host = former is self._holder
        held = wait_for(self._holder, self._holder.begin(on_host.hold_port, self.held if same_host else 0))
        former_port, self.held = self.held, held
        if former is not None and not same_host:
            former.begin(on_host.release_port, former_port)
        return former_port, self.held

    def close(self) -> None:
        """Release the MASTER_PORT that is held, if there is one."""
        if self._holder is not None:
            self._holder.begin(on_host.release_port, self.held)

    def specs(
        self, meeting: Rendezvous, spec: GroupSpec, *, collect: bool, groups: int, seconds: float
    ) -> dict[int, RankSpec]:
        """Return the `RankSpec` of each rank that meets, by rank.

        `collect`, `groups` and `seconds` are fields of it.
        """
        specs = {}
        # read once per host: for this host, each access computes them again
        hosts = {number: self._host_at(number).facts for number in meeting.hosts}
        for place, rank in enumerate(meeting.ranks):
            number = self._ranks.members[rank].binding.host
            beside = [other for other in meeting.ranks if self._ranks.members[other].binding.host == number]
            facts = hosts[number]
            position = meeting.hosts.index(number)
            specs[rank] = RankSpec(
                rank=place,
                world_size=len(meeting.ranks),
                local_rank=beside.index(rank),
                local_world_size=len(beside),
                group_rank=position,
                group_world_size=len(meeting.hosts),
                run_id=self._ranks.cluster.run_folder.name,
                master_addr=meeting.networks[0].address,
                master_port=meeting.master_port,
                device=spec.device(place if rank >= spec.size else rank),
                backend=spec.backend,
                store=meeting.store,
                groups=groups,
                seconds=seconds,
                interfaces=self._interface_variables(meeting.networks[position], len(meeting.hosts) > 1),
                threads=threads_per_rank(facts["cores"], len(spec.ranks_on(number))),
                notebook=preload_client.notebook_name(),
                collect=collect,
                directory=facts["directory"],
                path=tuple(sys.path if isinstance(self._host_at(number), LocalHost) else facts["path"]),
            )
        return specs

    @staticmethod
    def _interface_variables(own: Network, several: bool) -> dict[str, str]:
        """Return the interface variables; between hosts, the user's settings take precedence over the routes."""
        if not several:
            return dict.fromkeys(INTERFACE_VARIABLES, own.interface)
        return {name: os.environ.get(name) or own.interface for name in INTERFACE_VARIABLES}

    def poison_store(self, meeting: Rendezvous) -> None:
        """Make waits for a key in the store of `meeting` raise.

        A TCPStore needs nothing here: shutting down its connections has this effect.
        """
        self._ask_store_host(meeting, on_host.poison_store)

    def remove_store(self, meeting: Rendezvous) -> None:
        """Remove the file store of `meeting`, if it has one; call this once no rank needs the store.

        Raises nothing if the host is lost; the file then stays there.
        """
        self._ask_store_host(meeting, on_host.remove_file)

    def _ask_store_host(self, meeting: Rendezvous, what: on_host.WithFile) -> None:
        if not meeting.store.startswith("tcp:"):
            with contextlib.suppress(HostLost, TimeoutError):
                self._host_at(meeting.hosts[0]).ask(what, meeting.store)
