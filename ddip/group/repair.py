"""Repair a group: replace the processes of lost ranks, which is one step of the recovery from a fault.

A fault is an exception, a stop, a timeout or the death of a rank. This is the way from it to a process group in which
training continues:

    fault in a cell           1 UNBLOCK the other ranks, so that the cell ends      cells/running.py, process_group.py
        |                     2 RECORD what the fault may have left behind          cells/cells.py
        v
    error in the notebook
        |
        |  after this notebook cell (report_faults), before the next cell, or before another request
        v
    3 CHECK each rank: does it run, has its cell ended, does its GPU work?          lifecycle.py: ensure_ready
        |                |
        | yes            | no: GroupError, which names %makedip --repair
        |                v
        |        4 REPLACE these ranks by new processes, which have no variables    this file
        |                |
        v                v
    5 REBUILD the process group: leave, join, revive                                lifecycle.py: rebuild
        v
    6 RESET a training iteration that the fault has broken off                      process_group/iterations.py
        v
    7 COMPLETE new ranks: app, settings, modules, variables of --from               app.py, revival.py, modules.py
        v
    8 COMPARE the ranks, and print what differs                                     cells/differences.py

1. Unblock. When a rank has failed, the thread that follows the cell gives the others `failure_grace` seconds to end or
   to raise errors of their own (for a stop, see ``rank/kernel/kernel.py``). Then ``ProcessGroupManager.release``
   aborts the collectives in which the rest waits; torch would wait for half an hour. The preload process, or the agent
   of another host, reports the end of a process. ``OwnCluster`` then unregisters its engine, which ends its requests:
   a dead rank counts as having replied. Its child processes are ended as well, as they hold its connections open.

2. Record. ``Cells._record_end`` notes which ranks still run the cell, which have lost their GPU, where each was in a
   training iteration (`Iterations`), and that the ranks must be compared (`Differences`). When no cell runs,
   ``update_health`` marks the process group for a rebuild if a rank has sent no report, was released, or is in no
   group; if the ranks have begun different numbers of collectives, since the next one would meet an earlier one of
   another rank; and if only some have taken an optimizer step. Each rank itself has restored small tensors of its
   aborted collective (``aborted_tensors.py``).

3. Check. A rank that still runs an abandoned cell is interrupted again, and kept if it ends (``Cells.settle``). A rank
   without a working GPU keeps running until a repair, so that its CPU variables can be pulled. If the group cannot be
   rebuilt because hosts cannot reach each other, steps 5 to 8 wait until they can, and cells run in the released group.

4. Replace (`_Repair`). A rank that cannot run a collective or an empty cell counts as lost, too. If the error does not
   show which rank is to blame, ``fitness.py`` tries each rank alone, and then groups with one new process. If hosts
   cannot reach each other, no rank is to blame, and nothing is replaced (`_Repair._ensure_connected`). New engines
   start before the old ones end, and the variables of ``--from`` are pickled before both: if one of these steps fails,
   nothing has changed. All ranks are tested again afterwards, since a fault may hide another one.

5. Rebuild. The ranks leave their group in whatever state it is, and join another one through a new store. The path or
   address of the store identifies the group, so a release that arrives late does not abort the next group. Wrappers,
   meshes and subgroups refer to the former group, and raise an error when they are used. ``wrappers.revive_wrappers``
   makes DDP wrappers that all ranks have usable again, with rank 0's parameters and buffers, since the ranks may have
   stopped at different steps; a new rank has none, so they must be recreated. It does not revive FSDP wrappers, as
   shards of different steps do not fit together; ``ddip.dist_state`` keeps shards that do.

6. Reset. A reducer or gradient scaler in the middle of an iteration would fail in the next one, so it is reset. If a
   rank was within an iteration, or ranks were in different ones, gradients are cleared on all ranks
   (``rank/objects/iteration.py``).

7. Complete. A new rank prepares the app, and gets the process settings that cells have changed on the others.

8. Compare. Values that were equal on all ranks after the last good cells, and differ now, were broken by the fault.
   ``%dipsync`` copies rank 0's; ddip does not copy them by itself, since a difference may be intended. New ranks have
   no optimizers yet: `Differences.report_new_ranks` compares these before the first cell on all ranks that have them.

Threads: steps 3 to 8 run on the thread of the request, which holds ``Lifecycle.turn``. On a rank, leave, join, revive,
reset and compare run on the main thread, as cells do; a release runs on the control thread, because the main thread may
be waiting.

Invariants:

- Variables live as long as their process, and a recovery ends only the processes of lost ranks.
- ``ProcessGroupManager.healthy`` is False from the moment at which ddip begins to take a group apart, and True again
  only when all ranks have joined the next one.
- A step that was stopped is repeated by the next request, which finds a mark of it: ``healthy``,
  ``Iterations._pending``, ``App._unprepared``, ``Differences._failed``. Within steps that must not be cut in two,
  ``stopping.note_presses`` holds back the KeyboardInterrupt.

Without ``DDIP_NATIVE_SOCKETS``, step 1 cannot unblock ranks that wait in gloo: they are interrupted, abandoned, and
must be replaced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddip.errors import (
    BadInput,
    GroupError,
    PartitionError,
    RequestFailed,
    RequestInterrupted,
    TransferError,
    ranks_text,
)
from ddip.group import stopping
from ddip.group.lifecycle import Lifecycle
from ddip.group.members import placement, wanted
from ddip.group.members.placement import HostRequest
from ddip.group.objects import delivery, transfer
from ddip.group.objects.modules import Modules
from ddip.group.objects.transfer import Fetched
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.protocol import on_rank

CELL_ENDS_WITHIN = 5.0
"""Seconds for a cell to end after the failure grace, once one of its ranks has died and the others wait for it."""

COPIED_RANKS = (
    "copied with the number of rank {source}: {paths}; set them to `rank` on {ranks}, or recreate their objects there; "
    "otherwise, a part of the data is read twice, and another never"
)


def repair_group(
    lifecycle: Lifecycle,
    modules: Modules,
    names: Sequence[str],
    source: int | None,
    hosts: Sequence[HostRequest],
    report: Report,
) -> list[int]:
    """Repair the group as ``Group.repair`` describes, and send the pushed `modules` to new ranks."""
    _wait_for_cells(lifecycle)
    with lifecycle.turn, lifecycle.progress.reported_to(report):
        one = _Repair(lifecycle, modules)
        one.replace_hosts(hosts)
        return one.replace_ranks(names, source)


def _wait_for_cells(lifecycle: Lifecycle) -> None:
    """Wait until background cells that lost a rank have ended.

    Raises GroupError if other cells run, or if one does not end in time.
    """
    parts = lifecycle.parts
    ended, end = set(parts.ranks.ended), lifecycle.options.failure_grace + CELL_ENDS_WITHIN
    left = [cell.done for cell in parts.cells.active_on(ended)]
    with stopping.note_presses("the repair was interrupted; no rank has been replaced") as button:
        button.wait_for(left, end)
    parts.cells.ensure_not_running(range(lifecycle.size), "a repair rebuilds the group, which needs all ranks free")


class _Repair:
    """One repair. Its caller holds the turn."""

    def __init__(self, lifecycle: Lifecycle, modules: Modules) -> None:
        self._lifecycle, self._modules = lifecycle, modules
        self._options, self._progress = lifecycle.options, lifecycle.progress
        parts = lifecycle.parts
        self._ranks, self._cluster, self._cells = parts.ranks, parts.ranks.cluster, parts.cells
        self._engines, self._manager, self._fitness = parts.engines, parts.manager, parts.fitness
        self._app, self._new_ranks = parts.app, parts.new_ranks

    def replace_hosts(self, hosts: Sequence[HostRequest]) -> None:
        """Connect to the replacements of lost hosts, and to lost or new Slurm nodes; wait for them.

        `hosts`: all hosts of the group, as typed; empty: the same hosts. Raises BadInput, GroupError or
        RequestInterrupted.
        """
        lost = [bool(host.lost) for host in self._cluster.hosts]
        try:
            for number in wanted.replaced_hosts(hosts, self._lifecycle.request, lost):
                self._lifecycle.replace_host(number, hosts[number].name, self._lifecycle.request.reach)
            if self._lifecycle.request.reach.jobs:
                self._replace_nodes(lost)
        except KeyboardInterrupt as error:
            if isinstance(error, RequestInterrupted):
                raise
            raise RequestInterrupted("the repair was interrupted; no rank has been replaced") from None

    def _replace_nodes(self, lost: Sequence[bool]) -> None:
        """Connect to lost Slurm nodes again, and replace those that stay unreachable."""
        lost_nodes = [number for number, is_lost in enumerate(lost) if is_lost and not self._is_up_again(number)]
        if not lost_nodes:
            return
        try:
            job, names = self._lifecycle.place.request_nodes(lost_nodes, self._progress)
            for number, name in zip(lost_nodes, names, strict=True):
                self._lifecycle.replace_host(number, name, self._lifecycle.request.reach.moved(number, job))
        finally:
            self._lifecycle.place.move(self._lifecycle.request)

    def _is_up_again(self, number: int) -> bool:
        """Connect to the lost node `number` again, and return whether that worked."""
        if not self._lifecycle.place.has(number):
            return False
        try:
            request = self._lifecycle.request
            self._lifecycle.replace_host(number, request.hosts[number].name, request.reach)
        except GroupError:
            return False
        return True

    def replace_ranks(self, names: Sequence[str], source: int | None) -> list[int]:
        """Replace the lost ranks, copy `names` from rank `source` (None: 0) to them, and return their numbers.

        Raises the errors of ``Group.repair``.
        """
        if source is not None:
            (source,) = placement.check_ranks([source], self._lifecycle.size, "source")
        transfer.check_own(names, "repair")
        self._cluster.ensure_controller()
        self._ensure_connected()
        began = time.monotonic()
        self._ranks.carry_on()
        lost = self._lost() or self._find_lost()
        fetched: Fetched | None = None
        if names:
            fetched = self._pack_for_repair(names, 0 if source is None else source, lost)
        replaced: list[int] = []
        while lost:
            self._replace(lost)
            replaced = sorted({*replaced, *lost})
            lost = [rank for rank in self._find_lost() if rank not in replaced]
        if not replaced:
            return []
        self._app.drop_if_unfit(replaced)
        self._lifecycle.ensure_ready()
        self._modules.send_again(self._ranks, self._progress)  # before variables that may be objects of these modules
        if fetched is not None:
            self._unpack(fetched, replaced)
        self._lifecycle.seconds = time.monotonic() - began
        return replaced

    def _ensure_connected(self) -> None:
        """Raise PartitionError if hosts cannot reach each other: ranks that cannot meet would seem unfit."""
        try:
            self._manager.ensure_connected(self._lifecycle.spec)
        except PartitionError as error:
            raise PartitionError(f"no rank was replaced: {error}") from None

    def _lost(self) -> list[int]:
        """Return the ranks known to need a new process, after waiting for ranks that are only slow to stop."""
        return sorted({*self._cells.settle(), *self._ranks.ended, *self._ranks.gpu_lost, *self._fitness.unfit})

    def _find_lost(self) -> list[int]:
        """Test all ranks together, and return those that need a new process.

        If the test fails although no rank is known to be lost, repeat it in a rebuilt process group, and test the ranks
        one by one if that cannot be formed.
        """
        try:
            self._lifecycle.ensure_ready()
            self._manager.check(time.monotonic() + self._options.timeout)
            return self._fitness.find_cell_failures(self._options.timeout)
        except PartitionError:
            raise
        except GroupError:
            if self._lost():
                return self._lost()
        try:
            self._lifecycle.rebuild()
            self._manager.check(time.monotonic() + self._options.timeout)
        except PartitionError:
            raise
        except GroupError:
            self._manager.ensure_connected(self._lifecycle.spec)
            spec, collect = self._lifecycle.spec, self._options.collect
            if not self._lost():
                self._fitness.unfit = set(self._fitness.find_unfit(spec, collect))
            deadline = time.monotonic() + self._options.timeout
            return self._lost() or self._fitness.blame_with_helpers(spec, collect, self._app.name, deadline)
        return self._fitness.find_cell_failures(self._options.timeout)

    def _replace(self, lost: Sequence[int]) -> None:
        """Start new processes in place of the ranks `lost`; the process group must be rebuilt afterwards."""
        try:
            self._progress(f"ddip: starting {ranks_text(lost)}", 0.0)
            deadline = time.monotonic() + self._options.timeout
            members = self._engines.replace(lost, self._lifecycle.spec, self._app.name, deadline)
        except BaseException as error:
            with stopping.note_presses():
                self._cluster.stop_engines_but([member.engine for member in self._ranks.members])
            if isinstance(error, KeyboardInterrupt):
                raise RequestInterrupted(f"the repair was interrupted; {ranks_text(lost)} not replaced") from None
            raise
        with stopping.note_presses():
            self._manager.release()
            self._cluster.stop_engines_but([member.engine for member in members])
            self._new_ranks.set_members(members)
            self._cells.forget(lost)
            self._fitness.unfit.difference_update(lost)
            self._app.mark_replaced(lost)

    def _unpack(self, fetched: Fetched, ranks: Sequence[int]) -> None:
        try:
            delivery.deliver_objects(self._ranks, fetched.values, fetched.reply["along"], ranks, self._progress)
        except TransferError as error:
            raise TransferError(f"ddip replaced {ranks_text(ranks)}, but {error}") from None
        transfer.notify_shares(fetched.reply["shares"], "copied")
        call = on_rank.find_copied_ranks([*fetched.values], fetched.rank, self._lifecycle.size)
        try:
            answers = self._ranks.ask_soon(dict.fromkeys(ranks, call))
        except RequestFailed:  # a search of too many objects makes no repair fail
            return
        if paths := sorted({path for answer in answers for path in answer}):
            notify(COPIED_RANKS.format(paths=", ".join(paths), source=fetched.rank, ranks=ranks_text(ranks)))

    def _pack_for_repair(self, names: Sequence[str], source: int, lost: Sequence[int]) -> Fetched:
        what = f"--from {source} {' '.join(names)}"
        if not lost:
            raise BadInput(f"{what}: all ranks are running, so nothing was copied; %dipull and %dipush copy variables")
        if source in lost:
            raise BadInput(f"{what}: rank {source} is lost itself; copy from another, or type %makedip --repair alone")
        (fetched,) = transfer.fetch_variables(self._ranks, names, [source], self._progress)
        transfer.pickled_values(fetched, "repaired")
        return fetched
