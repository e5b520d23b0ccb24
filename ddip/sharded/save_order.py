"""Find names of ``dist_state`` that belong to one training, from the order and the steps of their saves.

A loop that saves a generator and a discriminator under two names may fail between the two saves; they are then restored
at different steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SaveOrder:
    """The last saves and restores of all names on this rank.

    >>> order = SaveOrder()
    >>> for name, step in [("G", 1), ("D", 1), ("G", 2)]:
    ...     order.record_save(name, step)
    >>> order.peers_of("D")
    ['G']
    >>> order.record_restore("G", 2, [])
    []
    >>> order.record_restore("D", 1, ["G"])
    [('G', 2)]
    """

    _number: int = 0
    """Number of the last save of any name."""
    _saves: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number and step of the last save by name."""
    _pairs: set[frozenset[str]] = field(default_factory=set)
    """Names that were saved in turn, at the same steps."""
    _restored: dict[str, int] = field(default_factory=dict)
    """Restored step by name, until the next save under this name."""

    def record_save(self, name: str, step: int) -> None:
        """Record a save, and pair its name with those that were saved at the same step since its former save."""
        former, _ = self._saves.get(name, (0, 0))
        for other, (number, step_of_other) in self._saves.items():
            pair = frozenset((name, other))
            if number < former:
                self._pairs.discard(pair)
            elif step_of_other == step and other != name:
                self._pairs.add(pair)
        self._number += 1
        self._saves[name] = self._number, step
        self._restored.pop(name, None)

    def peers_of(self, name: str) -> list[str]:
        """Return the names that belong to the same training as `name`."""
        return [other for other in self._saves if other != name and frozenset((name, other)) in self._pairs]

    def record_restore(self, name: str, step: int, peers: list[str]) -> list[tuple[str, int]]:
        """Record a restore; return those `peers`, with their steps, that were restored at another step."""
        self._restored[name] = step
        return [(peer, found) for peer in peers if (found := self._restored.get(peer, step)) != step]

    def forget(self, name: str) -> None:
        """Forget the saves and restores of `name`."""
        self._saves.pop(name, None)
        self._restored.pop(name, None)
        self._pairs = {pair for pair in self._pairs if name not in pair}
