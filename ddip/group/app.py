"""The app of a group: a framework adapter that is prepared on every rank, and told of each new process group."""

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

WITHOUT = "; the group is there without the app"
"""End of the error of an app that cannot be prepared in a group that is there."""


class App:
    """The app of a group that runs, if it has one."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager, fitness: Fitness, progress: Report) -> None:
        self.name: str | None = None
        self._ranks, self._manager, self._fitness, self._progress = ranks, manager, fitness, progress
        self._unprepared: set[int] = set()
        """Ranks on which it has still to be prepared."""
        self._generation = 0
        """Of the process group that it is prepared for, or was told of."""

    def choose(self, name: str | None) -> None:
        """From now on it is `name`, which no rank has prepared."""
        self.name = name
        self._unprepared = set(self._everyone)

    def prepare(self, *, is_start: bool) -> None:
        """Prepare it on all ranks, for the process group that they are in; `is_start`: else there is no group."""
        self._generation = self._manager.generation
        self._prepare(self._everyone, "" if is_start else WITHOUT)

    def catch_up(self, form_again: Callable[[], None]) -> None:
        """Prepare it where that has still to be done, and tell it if the process group is another.

        `form_again` forms the process group again, if telling it fails on some ranks only.
        """
        if self._unprepared:
            self._prepare(sorted(self._unprepared))
        if self.name is not None and self._generation != self._manager.generation:
            self._tell(self.name, form_again)

    def has_new_processes(self, ranks: Collection[int]) -> None:
        """It has to be prepared on `ranks`, since these have new processes."""
        if self.name is not None:
            self._unprepared.update(ranks)

    def release(self) -> None:
        """All ranks let go of it, before they leave the process group."""
        if self.name is not None:
            self.choose(self.name)
            self.ask(self._everyone, on_rank.release_app(apps.find(self.name)))

    def drop_if_unfit(self, replaced: Collection[int]) -> None:
        """Give it up, and raise GroupError, if ranks that were `replaced` cannot prepare it either."""
        if self._fitness.unfit.intersection(replaced) and self._unprepared:
            raise self._dropped(f"{self.name} cannot be prepared in a new process either{WITHOUT}")

    def ask(self, ranks: Sequence[int], call: RemoteCall[R]) -> list[R]:
        """Have it do something; if only some ranks did it they are out of step, and the group is formed again."""
        try:
            return self._ranks.ask(ranks, call, release=self._manager.release)
        except RequestFailed as error:
            self._manager.healthy = self._manager.healthy and len(error.by_rank) == len(ranks)
            raise
        except RequestInterrupted:
            self._manager.healthy = False
            raise

    @property
    def _everyone(self) -> range:
        return range(len(self._ranks.members))

    def _prepare(self, ranks: Sequence[int], remark: str = WITHOUT) -> None:
        """Prepare it on `ranks`; if that fails it is tried again before the next cell."""
        if self.name is not None:
            self._progress(f"ddip: preparing {self.name}", 0.95)
            try:
                self.ask(ranks, on_rank.prepare_app(apps.find(self.name)))
            except RequestFailed as error:
                if len(error.by_rank) == len(self._everyone):
                    raise self._dropped(f"{error}{remark}") from None
                self._fitness.unfit.update(error.by_rank)
                raise GroupError(self._ranks.with_repair(str(error))) from None
        self._unprepared -= set(ranks)

    def _dropped(self, why: str) -> GroupError:
        """Give it up, since it cannot be prepared; the error to raise."""
        self.name = None
        self._unprepared.clear()
        self._fitness.unfit.clear()
        return GroupError(why)

    def _tell(self, name: str, form_again: Callable[[], None]) -> None:
        """Tell it on every rank that the group was formed again; ranks that are new have prepared it before.

        What fails there is said, and not tried again: the group is there, formed once more if some ranks only failed.
        """
        try:
            self.ask(self._everyone, on_rank.tell_app_rejoined(apps.find(name)))
        except RequestFailed as error:
            notify(f"{error}; the group is there")
            if not self._manager.healthy:
                form_again()
        self._generation = self._manager.generation
