"""Run by torchrun: train as the script says, and write this rank's losses to FOLDER/RANK.

torchrun ... under_torchrun.py SCRIPT FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

script, folder = map(Path, sys.argv[1:])
del sys.path[0]  # as in a notebook: no script here hides a module
here = {"__name__": "__main__"}
exec(compile(script.read_text(), script, "exec"), here)  # and its functions are pickled as those of a cell
(folder / os.environ["RANK"]).write_text(json.dumps(here["train"](lambda step: None)))
if dist.is_initialized():
    dist.barrier()
os._exit(0)  # scripts leave their group as it is, and torch's threads may end the process with SIGABRT then
