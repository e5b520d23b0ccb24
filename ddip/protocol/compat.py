"""Find private names of libraries that ddip uses, and that another version of the library may lack.

One file per library lists its names (``compat_torch.py``, ``compat_ipyparallel.py``, ...). Each process looks for the
names that it needs once, when it starts. A missing name turns off the feature that needs it, and the notebook prints
which; without a name of the core there is no group, or no app, and the error names it. Attributes of objects, such as
those of an FSDP model, are looked up where they are used.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from typing import Any

REFUSAL = re.compile(r"\S+ \S+ has no \S.*, which ddip needs; install .*")
"""Matches the text of `Names.find_refusal`, also in a log."""


def find_object(path: str) -> Any:
    """Return the object with this dotted name, importing the modules that the name begins with if necessary.

    Raises ImportError if the first part, or one in the middle, is missing, and AttributeError if only the last is.
    """
    parent, _, name = path.rpartition(".")
    if not parent:
        return importlib.import_module(name)
    try:
        owner = find_object(parent)
    except AttributeError:
        owner = importlib.import_module(parent)
    return getattr(owner, name)


@dataclass(frozen=True, eq=False)
class Names:
    """The private names of one library that ddip uses."""

    library: str
    """Name of the library, as ``import`` and pip know it."""
    tested: str
    """Versions that ddip has been tested with; the last word is the newest."""
    core: tuple[str, ...] = ()
    """Names that a group, or the app, cannot work without."""
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that each feature needs; the key says what the user loses without the feature."""
    optional: tuple[str, ...] = ()
    """Names in modules that a build of the library may leave out."""

    def __str__(self) -> str:
        return f"{self.library} {self.version} (tested: {self.tested})"

    @property
    def version(self) -> str:
        """The installed version."""
        return metadata.version(self.library)

    @property
    def is_installed(self) -> bool:
        """Return whether the library is installed; this does not import it."""
        return find_spec(self.library) is not None

    def has(self, name: str) -> bool:
        """Return whether the library has this name, or may lack it; this imports the name's module.

        "a.b or a.c" are the names of different versions, of which one is enough.
        """
        return any(self._has_one(alternative) for alternative in name.split(" or "))

    def _has_one(self, name: str) -> bool:
        try:
            find_object(name)
        except AttributeError:
            return False
        except ImportError:
            return name in self.optional
        return True

    def find_missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that the library lacks."""
        return [name for name in names if not self.has(name)]

    def find_off(self) -> dict[str, list[str]]:
        """Return the features that are off, each with the missing names."""
        return {feature: found for feature, names in self.features.items() if (found := self.find_missing(names))}

    @cached_property
    def off(self) -> dict[str, list[str]]:
        """Features that are off, each with its missing names; computed once per process."""
        return self.find_off()

    def is_on(self, feature: str) -> bool:
        """Return whether the library has all names that `feature` needs."""
        return feature not in self.off

    def find_refusal(self) -> str:
        """Return the error text if names of the core are missing, else an empty text."""
        missing = ", ".join(self.find_missing(self.core))
        where = f"{self.library} {self.version} has no {missing}, which ddip needs" if missing else ""
        return where and f"{where}; install {self.library} {self.tested}"


def find_refusal(*tables: Names) -> str:
    """Return the first error text of these tables, or an empty text."""
    return next(filter(None, (names.find_refusal() for names in tables)), "")


def find_off(*tables: Names) -> dict[str, dict[str, list[str]]]:
    """Return the features that are off, with the missing names, by library and version."""
    return {str(names): names.off for names in tables if names.off}


def describe_off(library: str, features: Iterable[str]) -> str:
    """Return the line that tells a user which `features` are off; `library`: a key of `find_off`."""
    return f"{library} lacks private names that ddip uses; {'; '.join(features)}. python -m ddip doctor names them"
