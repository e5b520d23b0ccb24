"""The app of a group: prepared on every rank, and told when the group was formed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddip import apps
from ddip.errors import GroupError, RequestFailed, RequestInterrupted
from ddip.group.placement import Request
from ddip.group.process_group import ProcessGroupManager
from ddip.group.ranks import Ranks
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.protocol import on_rank
from ddip.protocol.on_rank import R, RemoteCall


class Prepared:
    """The part of a `Lifecycle` that knows the app."""

    request: Request
    _manager: ProcessGroupManager
    _progress: Report

    def __init__(self) -> None:
        self._app: str | None = None
        self._unprepared: set[int] = set()
        """Ranks on which the app has still to be prepared."""
        self._app_knows = 0
        """Generation of the group that the app is prepared for, or was told of."""
        self._unfit: set[int] = set()
        """Ranks that cannot be in a group."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of a group that has not ended."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        raise NotImplementedError

    def _form_again(self) -> None:
        raise NotImplementedError

    def _prepare(self, ranks: Sequence[int]) -> None:
        """Prepare the app on `ranks`; if that fails it is tried again before the next cell."""
        if self._app is not None:
            self._progress(f"ddip: preparing {self._app}", 0.95)
            try:
                self.ask_app(ranks, on_rank.prepare_app(apps.find(self._app)))
            except RequestFailed as error:
                if len(error.by_rank) == self.world_size:
                    raise self._without_the_app(str(error)) from None
                self._unfit.update(error.by_rank)
                raise GroupError(self.ranks.with_repair(str(error))) from None
        self._unprepared -= set(ranks)

    def _without_the_app(self, why: str) -> GroupError:
        """Give up the app that cannot be prepared."""
        self._app, self.request = None, replace(self.request, app=None)
        self._unprepared.clear()
        self._unfit.clear()
        return GroupError(f"{why}; the group is there without the app")

    def _tell_app(self, app: str) -> None:
        """Tell `app` on every rank that the group was formed again; ranks that are new have prepared it before.

        What fails there is said, and not tried again: the group is there, formed once more if some ranks only failed.
        """
        try:
            self.ask_app(range(self.world_size), on_rank.tell_app_rejoined(apps.find(app)))
        except RequestFailed as error:
            notify(f"{error}; the group is there")
            if not self._manager.healthy:
                self._form_again()
        self._app_knows = self._manager.generation

    def ask_app(self, ranks: Sequence[int], call: RemoteCall[R]) -> list[R]:
        """Have the app do something; if only some ranks did it they are out of step, and the group is formed again."""
        try:
            return self.ranks.ask(ranks, call, release=self._manager.release)
        except RequestFailed as error:
            self._manager.healthy = self._manager.healthy and len(error.by_rank) == len(ranks)
            raise
        except RequestInterrupted:
            self._manager.healthy = False
            raise
