"""The app of a group: a framework adapter, prepared on every rank and notified of each new process group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ddip import apps
from ddip.errors import GroupError, RequestFailed, RequestInterrupted
from ddip.group.members.ranks import Ranks
from ddip.group.process_group.fitness import Fitness
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.protocol import on_rank
from ddip.protocol.on_rank import R, RemoteCall

WITHOUT = "; the group runs without the app"
"""End of the error message if an app cannot be prepared in an existing group."""


class App:
    """The app of a running group, if it has one."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager, fitness: Fitness, progress: Report) -> None:
        self.name: str | None = None
        self._ranks, self._manager, self._fitness, self._progress = ranks, manager, fitness, progress
        self._unprepared: set[int] = set()
        """Ranks that have not prepared the app yet."""
        self._generation = 0
        """Generation of the process group that the app is prepared for, or was notified of."""

    def choose(self, name: str | None) -> None:
        """Set the app to `name`, or to none for None, and mark all ranks as unprepared; calls no rank."""
        self.name = name
        self._unprepared = set(self._everyone)

    def prepare(self, *, is_start: bool) -> None:
        """Prepare the app on all ranks for their current process group; do nothing without an app.

        `is_start`: the group is still starting, so an error message does not say that the group runs without the app.
        Raises GroupError if the app fails on any rank, and drops the app if it fails on all. Also raises
        RequestInterrupted.
        """
        self._generation = self._manager.generation
        self._prepare(self._everyone, "" if is_start else WITHOUT)

    def catch_up(self, rebuild: Callable[[], None]) -> None:
        """Prepare the app on ranks that lack it, and notify it of a new process group.

        If the notification fails on only some ranks, `rebuild` is called to rebuild the process group. Raises
        GroupError if the app cannot be prepared or `rebuild` fails, and RequestInterrupted; a failed notification is
        only printed.
        """
        if self._unprepared:
            self._prepare(sorted(self._unprepared))
        if self.name is not None and self._generation != self._manager.generation:
            self._notify_rebuilt(self.name, rebuild)

    def mark_replaced(self, ranks: Collection[int]) -> None:
        """Mark `ranks` as unprepared, because their processes are new."""
        if self.name is not None:
            self._unprepared.update(ranks)

    def release(self) -> None:
        """Release the app on all ranks, before they leave the process group, and mark them as unprepared.

        Does nothing without an app. Raises RequestFailed or RequestInterrupted.
        """
        if self.name is not None:
            self.choose(self.name)
            self.ask(self._everyone, on_rank.release_app(apps.find_module(self.name)), together=False)

    def drop_if_unfit(self, replaced: Collection[int]) -> None:
        """Drop the app and raise GroupError if a rank's new process could not prepare it either.

        `replaced`: the ranks whose processes are new. Otherwise do nothing.
        """
        if self._fitness.unfit.intersection(replaced) and self._unprepared:
            raise self._dropped(f"{self.name} cannot be prepared in a new process either{WITHOUT}")

    def ask(self, ranks: Sequence[int], call: RemoteCall[R], *, together: bool = True) -> list[R]:
        """Call a function of the app on `ranks`, wait for all of them, and return the results in their order.

        If the call fails on only some of them, the ranks are out of step, and the process group is marked for a
        rebuild. If the ranks act `together`, a failure interrupts the others, which may wait for the failed rank.
        Raises RequestFailed, RequestInterrupted, or GroupError if the controller ends.
        """
        try:
            calls = dict.fromkeys(ranks, call)
            return self._ranks.ask_each(calls, release=self._manager.release, together=together)
        except RequestFailed as error:
            self._manager.healthy = self._manager.healthy and (not together or len(error.by_rank) == len(ranks))
            raise
        except RequestInterrupted:
            self._manager.healthy = False
            raise

    @property
    def _everyone(self) -> range:
        return range(len(self._ranks.members))

    def _prepare(self, ranks: Sequence[int], remark: str = WITHOUT) -> None:
        """Prepare the app on `ranks`. After a failure, the next cell tries again; `remark` ends its message."""
        if self.name is not None:
            self._progress(f"ddip: preparing {self.name}", 0.95)
            try:
                self.ask(ranks, on_rank.prepare_app(apps.find_module(self.name)), together=False)
            except RequestFailed as error:
                if len(error.by_rank) == len(self._everyone):
                    raise self._dropped(f"{error}{remark}") from None
                self._fitness.unfit.update(error.by_rank)
                raise GroupError(self._ranks.with_repair(str(error))) from None
        self._unprepared -= set(ranks)

    def _dropped(self, why: str) -> GroupError:
        """Drop the app, which cannot be prepared because of `why`, and return the GroupError to raise."""
        self.name = None
        self._unprepared.clear()
        self._fitness.unfit.clear()
        return GroupError(why)

    def _notify_rebuilt(self, name: str, rebuild: Callable[[], None]) -> None:
        """Notify the app `name` on every rank of the rebuilt process group.

        New ranks have prepared the app before. A failure is printed and not retried. If only some ranks failed,
        `rebuild` is called to rebuild the process group.
        """
        try:
            self.ask(self._everyone, on_rank.notify_app_rejoined(apps.find_module(name)))
        except RequestFailed as error:
            notify(f"{error}; the group is running")
            if not self._manager.healthy:
                rebuild()
        self._generation = self._manager.generation
