"""Device meshes (``torch.distributed.device_mesh``) of a group that is left.

A mesh knows its groups by their names, and torch takes two meshes of the same ranks for one: what it remembers of
DTensors would lead those of the next group to the groups of the former one. And a mesh of all ranks would work on in
the next group, on parameters that ranks may have left at different steps.
``tests/unit/test_private_names.py`` fails when a release of torch changes what is used here.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ddip.rank.objects.live_objects import all_objects

LOST = (
    "{name} (its process group has been destroyed: the ranks have formed another since. Make the device mesh again, "
    "and what is sharded over it; ddip.dist_state brings parameters back)"
)
LEFT = "left by ddip in generation"
"""Begins what stands in a mesh in place of a thread's number: only for a test backend of torch's there is one."""
_generations = itertools.count()


def retire() -> int:
    """Have each mesh say so when it is used, and be equal to none that is made later; returns how many there were."""
    generation, found = f"{LEFT} {next(_generations)}", 0
    for thing in all_objects():
        if type(thing) is not DeviceMesh:
            continue
        mesh: Any = thing
        if not str(getattr(mesh, "_thread_id", "")).startswith(LEFT):
            mesh._thread_id, mesh._hash = generation, None
            names = getattr(mesh, "_dim_group_names", None)
            if names is not None:
                mesh._dim_group_names = [LOST.format(name=name) for name in names]
            found += 1
    return found
