"""What a rank does when it joins its first group, and is interrupted there."""

from __future__ import annotations

import subprocess
import sys
import textwrap

INTERRUPTED = """
    import os, sys
    import ddip.rank.needed
    from ddip.protocol.rank_spec import RankSpec
    from ddip.rank import process_group

    visited = []

    def chdir(path):
        visited.append(path)
        if len(visited) == 1:
            raise KeyboardInterrupt

    def form(rank_spec):
        raise RuntimeError("as far as it goes")

    os.chdir, process_group._form = chdir, form
    spec = RankSpec(
        rank=0, world_size=1, local_rank=0, local_world_size=1, group_rank=0, master_addr="127.0.0.1", master_port=1,
        device="cpu", backend="gloo", store="/nowhere", groups=1, seconds=1.0, interface="lo", threads=1,
        notebook="here", collect=True, directory="/the/notebook", path=("/of/the/notebook", *sys.path),
    )
    for _ in range(3):
        try:
            process_group.join(spec)
        except (KeyboardInterrupt, RuntimeError) as error:
            print(type(error).__name__, len(visited), sys.path[0] == "/of/the/notebook")
"""


def test_what_an_interrupt_has_left_out_of_the_first_join_is_done_by_the_next() -> None:
    code = textwrap.dedent(INTERRUPTED)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["KeyboardInterrupt 1 False", "RuntimeError 2 True", "RuntimeError 2 True"]
