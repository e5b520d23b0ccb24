"""Send the user's own modules to ranks on hosts that do not have the notebook's folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import site
import stat
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ddip.cluster.processes import on_host
from ddip.errors import BadInput, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.output.progress import Report
from ddip.output.tables.tables import size_text
from ddip.protocol import on_rank

MOST_BYTES = 16_000_000
"""Most bytes in all files of a module."""
MOST_FILES = 2000
MAGIC = "%dipush --modules"
LEFT_OUT = re.compile(r"\..*|__pycache__|.*\.py[co]|.*\.egg-info")
"""Names of files and folders that do not belong to a module's source."""
INSTALL = "install it on the hosts, in the Python of their ranks"
MISSING = re.compile(r"No module named '(\w+)")
COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)


@dataclass(frozen=True)
class Source:
    """A module as its source files."""

    name: str
    files: Mapping[str, bytes]
    """Contents by path with ``/``: ``utils.py``, or ``pkg/__init__.py``."""

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(map(len, self.files.values()))

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of paths and contents."""
        hasher = hashlib.sha256()
        for path, data in sorted(self.files.items()):
            hasher.update(f"{path}\0{len(data)}\0".encode() + data)
        return hasher.hexdigest()


@dataclass(frozen=True)
class ModulesPushed:
    """Result of `Group.push_modules`; ``str`` of it is a one-line summary."""

    names: tuple[str, ...]
    """Names of the modules."""
    hosts: tuple[str, ...]
    """Names of the hosts that have ranks, without the notebook's."""
    sent: tuple[str, ...]
    """Names of those `hosts` that a module was sent to, because they lacked it or had another version."""
    size: int
    """Total size of the modules, in bytes."""
    not_reloaded: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Reason of each rank that still uses the version of a module that it imported earlier, by module and rank."""

    def __str__(self) -> str:
        names = ", ".join(self.names)
        if not self.hosts:
            return f"the ranks are on the notebook's host and import {names} from the same files; nothing was sent"
        if not self.sent:
            return f"{', '.join(self.hosts)} had {names} already, unchanged"
        return f"pushed {names}: {size_text(self.size)} to {', '.join(self.sent)}"

    @property
    def notices(self) -> list[str]:
        """The messages to the user, one per reason in `not_reloaded`."""
        lines = []
        for name, by_rank in self.not_reloaded.items():
            for text in dict.fromkeys(by_rank.values()):
                on_ranks = ranks_text([rank for rank, message in by_rank.items() if message == text])
                lines.append(self._notice_text(name, on_ranks, text))
        return lines

    @staticmethod
    def _notice_text(name: str, on_ranks: str, text: str) -> str:
        if text == on_rank.IMPORTED:
            advice = f"run import importlib, {name}; importlib.reload({name}) in a %%dip cell"
            return (
                f"{name} {text} on {on_ranks}, which keeps the old version: {advice}, or turn %autoreload 2 on before "
                "the push"
            )
        return f"{name} could not be reloaded on {on_ranks}, which keeps the old version: {text}"


# -- in the notebook


def find_sources(names: str | Sequence[str]) -> list[Source]:
    """Read the sources of the user's own modules `names`.

    Raises BadInput if none is named or one cannot be sent.
    """
    given = names.split(",") if isinstance(names, str) else names
    wanted = [*dict.fromkeys(name.strip() for name in given if name.strip())]
    if not wanted:
        raise BadInput(f"{MAGIC}: type the names of modules, such as {MAGIC} utils,models")
    importlib.invalidate_caches()  # a file may be new
    return [_find_source(name) for name in wanted]


def _find_source(name: str) -> Source:
    if not name.isidentifier():
        better = Path(name).stem.partition(".")[0]
        advice = f"; type {MAGIC} {better}" if better.isidentifier() else ""
        raise BadInput(f"{MAGIC} {name}: {name!r} is not the name of a module or package{advice}")
    place = _own_path(name)
    if place.is_dir():
        return Source(name, dict(_files_of(name, place)))
    data = place.read_bytes()
    _ensure_small(name, len(data), 1, place)
    return Source(name, {f"{name}.py": data})


def _own_path(name: str) -> Path:
    """Return the path of a module as `_path_of` does; raise BadInput if it is not the user's own."""
    if name == "__main__":
        raise BadInput(f"{MAGIC} {name}: that is the notebook; %dipush copies its variables, functions and classes")
    place = _path_of(name)
    if _is_installed(name, place):
        raise BadInput(f"{MAGIC} {name}: {name} is an installed module, not your own; {INSTALL}")
    return place


def _path_of(name: str) -> Path:
    """Return the file of a module or the folder of a package; raise BadInput if it cannot be sent."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # such as __main__
        spec = None
    if spec is None:
        raise BadInput(f"{MAGIC} {name}: the notebook finds no module {name}, neither in its folder nor on sys.path")
    folders = [*(spec.submodule_search_locations or [])]
    if len(folders) > 1:
        raise BadInput(
            f"{MAGIC} {name}: {name} is in several folders, {', '.join(folders)}; put all files into one folder"
        )
    place = Path(folders[0] if folders else spec.origin or "")
    if not folders and (spec.origin in ("built-in", "frozen") or not spec.has_location):
        raise BadInput(f"{MAGIC} {name}: {name} belongs to Python, so every host has it; leave it out")
    if not (place.is_dir() if folders else place.is_file() and place.suffix == ".py"):
        raise BadInput(f"{MAGIC} {name}: {name} has no source file that can be sent ({place}); {INSTALL}")
    return place


def _is_installed(name: str, place: Path) -> bool:
    """Return whether the module `name` at `place` belongs to the Python environment, not to the user."""
    if name == "ddip":
        return True
    resolved = place.resolve()
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return any(resolved.is_relative_to(Path(folder).resolve()) for folder in folders)


def _files_of(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of each file of a package; raise BadInput if one cannot be sent."""
    size = count = 0
    root = folder.resolve()
    for path in _walk_files(name, root):
        size, count = size + path.stat().st_size, count + 1
        _ensure_small(name, size, count, folder)
        yield f"{name}/{path.relative_to(root).as_posix()}", path.read_bytes()
    if not count:
        raise BadInput(f"{MAGIC} {name}: the folder {folder} has no files")


def _walk_files(name: str, root: Path) -> Iterator[Path]:
    for at, folders, files in os.walk(root):
        folders[:] = sorted(folder for folder in folders if not LEFT_OUT.fullmatch(folder))
        for entry in [*folders, *sorted(files)]:
            path = Path(at, entry)
            if LEFT_OUT.fullmatch(entry):
                continue
            if path.is_symlink() and not path.exists():
                raise BadInput(f"{MAGIC} {name}: {path} is a link to {path.readlink()}, which does not exist")
            if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(root)):
                raise BadInput(f"{MAGIC} {name}: {path} is a link to {path.resolve()}; copy that into {root}")
            if entry.endswith(COMPILED):
                raise BadInput(f"{MAGIC} {name}: it has a compiled part, {path.relative_to(root)}; {INSTALL}")
            if stat.S_ISREG(path.stat().st_mode):
                yield path


def _ensure_small(name: str, size: int, count: int, place: Path) -> None:
    if size > MOST_BYTES or count > MOST_FILES:
        most = f"{size_text(MOST_BYTES)} or {MOST_FILES} files"
        raise BadInput(f"{MAGIC} {name}: {place} has more than {most}; keep data elsewhere, and code in the module")


def suggest_push(text: str, ranks: Ranks) -> str:
    """Return the command to type if the ranks' error `text` is about missing modules of the user.

    It is empty otherwise, and if all ranks are on the notebook's host.
    """
    if not _ranks_elsewhere(ranks):
        return ""
    own = []
    for name in dict.fromkeys(MISSING.findall(text)):
        with contextlib.suppress(BadInput):
            _own_path(name)
            own.append(name)
    return f"{MAGIC} {','.join(own)} sends the notebook's own" if own else ""


# -- on other hosts


class Modules:
    """The modules that a group has on other hosts."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._digests: dict[Path, dict[str, str]] = {}
        """Digest of each module, by the run folder of its host."""

    def push(self, ranks: Ranks, sources: Sequence[Source], reload: bool, progress: Report) -> ModulesPushed:
        """Bring `sources` to all other hosts that lack them or have other versions.

        Waits until ranks there can import them. `reload`: ranks reload modules that they have imported. Raises
        RequestFailed or RequestInterrupted; some hosts may have received modules then.
        """
        changed = self._send_sources(ranks, sources, progress)
        by_host = _ranks_elsewhere(ranks)
        calls = {
            rank: on_rank.take_modules(str(_modules_folder(ranks, host)), changed[host], reload)
            for host, on_this_host in by_host.items()
            if changed[host]
            for rank in on_this_host
        }
        answers = dict(zip(calls, ranks.ask_each(calls), strict=True)) if calls else {}
        names = tuple(source.name for source in sources)
        not_reloaded = {
            name: {rank: answer[name] for rank, answer in answers.items() if name in answer} for name in names
        }
        return ModulesPushed(
            names,
            hosts=tuple(ranks.cluster.hosts[host].name for host in by_host),
            sent=tuple(ranks.cluster.hosts[host].name for host in by_host if changed[host]),
            size=sum(source.size for source in sources),
            not_reloaded={name: by_rank for name, by_rank in not_reloaded.items() if by_rank},
        )

    def send_again(self, ranks: Ranks, progress: Report) -> None:
        """Send all pushed modules to hosts that lack them, as hosts do after a restart.

        Raises RequestFailed or RequestInterrupted.
        """
        self._send_sources(ranks, [*self._sources.values()], progress)

    def _send_sources(self, ranks: Ranks, sources: Sequence[Source], progress: Report) -> dict[int, list[str]]:
        """Send `sources` to hosts that lack them; return the names of the sent modules by host number."""
        by_host = _ranks_elsewhere(ranks)
        changed: dict[int, list[str]] = {host: [] for host in by_host}
        with stopping.note_presses():
            for source in sources:
                lack = [host for host in by_host if self._digests_on(ranks, host).get(source.name) != source.digest]
                if lack:
                    progress(f"ddip: pushing {source.name}, {size_text(source.size)}", None)
                    files = dict(source.files)
                    write = {
                        by_host[host][0]: on_rank.write_module(str(_modules_folder(ranks, host)), source.name, files)
                        for host in lack
                    }
                    ranks.ask_each(write)
                for host in lack:
                    self._digests_on(ranks, host)[source.name] = source.digest
                    changed[host].append(source.name)
                self._sources[source.name] = source
        return changed

    def _digests_on(self, ranks: Ranks, host: int) -> dict[str, str]:
        return self._digests.setdefault(ranks.cluster.hosts[host].run_folder, {})


def _ranks_elsewhere(ranks: Ranks) -> dict[int, list[int]]:
    """Return the ranks on hosts other than the notebook's, by host number."""
    return ranks.by_host([rank for rank in range(len(ranks.members)) if not ranks.is_beside(rank)])


def _modules_folder(ranks: Ranks, host: int) -> Path:
    return on_host.modules_folder(ranks.cluster.hosts[host].run_folder)
