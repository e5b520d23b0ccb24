"""Output of a script leaves its ``__main__`` alone.

The script runs in a separate process, which has no IPython shell.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import pickle, sys
from ddip.output.area import CellOutputArea
class Own: pass
before = sys.modules["__main__"]
CellOutputArea().show({"text/plain": "shown"})
assert sys.modules["__main__"] is before and before.Own is Own
pickle.dumps(Own())
"""


def test_the_first_output_does_not_replace_main() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    assert "shown" in done.stdout
