"""Run by torchrun: train as the script says, and write this rank's losses to FOLDER/RANK.

torchrun ... under_torchrun.py SCRIPT FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

script, folder = map(Path, sys.argv[1:])
del sys.path[0]  # as in a notebook, so that no script of this folder shadows a module
namespace = {"__name__": "__main__"}
exec(compile(script.read_text(), script, "exec"), namespace)  # its functions are pickled like those of a cell
(folder / os.environ["RANK"]).write_text(json.dumps(namespace["train"](lambda step: None)))
if dist.is_initialized():
    dist.barrier()
os._exit(0)  # scripts do not destroy their group, and torch's threads may then abort the process
