"""Disable device meshes (``torch.distributed.device_mesh``) of a group that this rank leaves.

A mesh holds the names of its groups, and torch treats two meshes of the same ranks as equal, so its caches would lead
DTensors of the next group to groups of the former one. A mesh of all ranks would also continue to work in the next
group, on parameters that ranks may have left at different steps.
``tests/unit/test_private_names.py`` fails when a release of torch changes the private names that are used here.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ddip.rank.objects.live_objects import all_objects

LOST = (
    "{name} (its process group has been destroyed: the ranks have formed another since. Recreate the device mesh and "
    "the models sharded over it; ddip.dist_state restores parameters)"
)
LEFT = "left by ddip in generation"
"""Prefix of the marker in a mesh's thread ID, which torch itself sets only for a test backend."""
_generations = itertools.count()


def disable_meshes() -> int:
    """Make device meshes unusable for collectives and unequal to new ones; return how many were usable before.

    A collective then fails with `LOST`. Subclasses are left alone.
    """
    generation, count = f"{LEFT} {next(_generations)}", 0
    for found in all_objects():
        if type(found) is not DeviceMesh:
            continue
        mesh: Any = found
        if not str(getattr(mesh, "_thread_id", "")).startswith(LEFT):
            mesh._thread_id, mesh._hash = generation, None
            names = getattr(mesh, "_dim_group_names", None)
            if names is not None:
                mesh._dim_group_names = [LOST.format(name=name) for name in names]
            infos = getattr(mesh, "_dim_group_infos", None)  # torch before 2.8: tag, ranks and name of each group
            if infos is not None:
                lost = [(LOST.format(name=name), ranks) for _, ranks, name in infos]
                mesh._dim_group_infos = [(name, ranks, name) for name, ranks in lost]
            count += 1
    return count
