"""Type wrong lines in a notebook with a real group, and write a transcript of the answers.

    python -m tests.system.wrong_inputs transcript.md     run by hand; takes a minute

Each answer should be one line that names what was typed and what to type instead. A line is marked if it raises
nothing, if the answer is longer, or if ranks or variables have changed; some marked lines are right.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.notebook import Notebook, Shown

OPTIONS = "--no-such-option ¦ -x ¦ \u2013r 0 ¦ \u2014help ¦ \u2212\u2212now"
"""Arguments that are wrong for each magic."""
SEPARATOR = " \u00a6 "
LINES = {
    "%makedip": (
        "5x ¦ -n ¦ -n two ¦ -n 0 ¦ -n -1 ¦ -n 2.5 ¦ -n 999999 ¦ -n 2 -n 3 ¦ -n 2,3 ¦ -N 2 ¦ 2 ¦ n 2 ¦ -n 1e3 ¦ -g ¦ "
        "-g x ¦ -g 99 ¦ -g -1 ¦ -g all 0 ¦ -g 0 -n 2 ¦ -g \uff10 ¦ --gpu all ¦ -gall ¦ -a ¦ -a fastia ¦ -a '' ¦ "
        "-a fastai -a hf ¦ -a nosuch ¦ -b ¦ -b '' ¦ -b glo ¦ -b nccl ¦ -b gloo,nccl ¦ --backend=mpi ¦ --hosts ¦ "
        "--hosts '' ¦ --hosts h1:x ¦ --hosts h1:0 ¦ --hosts h1:2,h1:2 ¦ --hosts no.such.host.invalid:1 ¦ --slurm ¦ "
        '--slurm nodes ¦ --slurm "nodes=x" ¦ --slurm "color=red" ¦ --dry-run ¦ --here ¦ --here 2 ¦ --engines ¦ '
        "--engines nosuch ¦ --profile x ¦ -c ¦ -c nosuch ¦ --here -c x ¦ --hosts h1 --slurm nodes=1 ¦ --cd ¦ "
        "--cd /no/such ¦ --python ¦ --python nosuch ¦ --setup ¦ --setup \"module load ¦ --setup 'a b ¦ "
        "-r -k ¦ -k -n 2 ¦ "
        "-k -i ¦ -k 3 ¦ -i x ¦ -i -i x ¦ --repair 0 ¦ --repair -n 2 ¦ --repair -k ¦ --from 0 ¦ --from ¦ "
        "--repair --from ¦ --repair --from 0 ¦ --repair --from 9 x ¦ --repair --from x 0 ¦ "
        "--repair --from 0 no_such_name ¦ --repair --from -1 x ¦ --repair --from 0 1a ¦ --yes ¦ --yes 3 ¦ "
        "--repair -r ¦ "
        "-t ¦ -t x ¦ -t 0 ¦ -t -5 ¦ -t nan ¦ -t inf ¦ -t 1e999 ¦ -t 5 -t 6x ¦ -v x ¦ -v 1 ¦ -v True False ¦ -S all ¦ "
        '--bg ¦ -n 2; ¦ -n 2 x ¦ -n= ¦ -n 2 # rest \' ¦ "-n 2" ¦ --restrat ¦ -repair ¦ -kill ¦ help ¦ ?x'
    ),
    "%%dip": (
        "-r ¦ -r 7 ¦ -r x ¦ -r -1 ¦ -r 0-9 ¦ -r 1-0 ¦ -r 0..1 ¦ -r 0;1 ¦ -r , ¦ -r all 5 ¦ -r \u0661 ¦ "
        "-r 0.0 ¦ -S ¦ -S 7 ¦ "
        "-S x ¦ -S -1 ¦ -S all x ¦ -s all ¦ -all ¦ --all ¦ -r 0 -S 1 ¦ -S 'all ¦ -S ALL ¦ -S none ¦ --timeout ¦ "
        "--timeout x ¦ --timeout 0 ¦ --timeout -1 ¦ --timeout nan ¦ --timeout inf ¦ -t 5 ¦ --timeout 1 2 ¦ locl ¦ "
        "loacl ¦ LOCAL ¦ remote local ¦ everywhere --bg ¦ local --bg ¦ here ¦ local -r 0 ¦ local -S 1 ¦ local -q ¦ "
        "local --timeout 5 ¦ local --log x ¦ local --queue ¦ local -a x ¦ everywhere --profile ¦ local --unmatched ¦ "
        "--log ¦ --log /no/such/folder/x ¦ --log /proc/x ¦ --log '' ¦ --profile remote ¦ --profile local ¦ "
        "--profile /proc/x ¦ --bg --queue x ¦ -a ¦ -a nosuch ¦ -a '' ¦ print(1) ¦ x = 1 ¦ -q 0 ¦ --quite ¦ --bg=1 ¦ "
        '--unmatch ¦ -n 2 ¦ --now ¦ -r 0 -r 1 ¦ -S 0 -S 1 ¦ "-S all" ¦ -r \'0 ¦ --queue 3 ¦ -bg ¦ on ¦ # c ¦ -rx'
    ),
    "%dip": (" ¦ -S all ¦ local ¦ print(1) ¦ x"),
    "%autodip": (
        'onn ¦ ON ¦ yes ¦ 1 ¦ on off ¦ off on ¦ -a ¦ -a -S ¦ -a "-S all" ¦ on -a "-S 9" ¦ on -a "-x" ¦ on -a \'-S ¦ '
        'off -a "-q" ¦ on -S all ¦ on -a "local" ¦ on -a "print(1)" ¦ on -a "" ¦ toggle ¦ on -a "-a" ¦ -on ¦ --off'
    ),
    "%dipush": (
        " ¦ no_such_name ¦ data no_such ¦ 1a ¦ data, ¦ ,data ¦ data,,other ¦ data.x ¦ data[0] ¦ 'data' ¦ 'data ¦ * ¦ "
        "data=1 ¦ data other=2 ¦ print(1) ¦ if ¦ None ¦ data data ¦ rank ¦ lambda ¦ d\u0430ta ¦ datta ¦ "
        "data as x ¦ -r ¦ "
        "-r 1 ¦ -r 9 data ¦ data -r 9 ¦ data -r x ¦ data -r ¦ data -r -1 ¦ data -r all ¦ data --now ¦ -S all data ¦ "
        "--modules ¦ --modules no_such ¦ --modules 1a ¦ --modules torch ¦ --modules '' ¦ --modules os ¦ lock ¦ "
        "data lock ¦ gen ¦ data -r '' ¦ -rdata ¦ open_file"
    ),
    "%dipull": (
        " ¦ no_such_name ¦ there no_such ¦ 1a ¦ there, ¦ ,there ¦ there.x ¦ there[0] ¦ 'there ¦ * ¦ there=1 ¦ "
        "there() ¦ "
        "if ¦ None ¦ there there ¦ th\u0435re ¦ ther ¦ there as ¦ as x ¦ there as 1a ¦ there as if ¦ there as x y as ¦ "
        "there as x as y ¦ there as x,y ¦ there as there2 there ¦ there other as there ¦ -r ¦ -r 1 ¦ -r 9 there ¦ "
        "there -r 9 ¦ there -r x ¦ there -r ¦ there -r -1 ¦ -r 0-9 there ¦ -t 5 there ¦ --now ¦ --now no_such ¦ "
        "--now there -t ¦ --now there -t x ¦ --now there -t 0 ¦ --now there -t -1 ¦ --Now there ¦ there_lock ¦ "
        "there_gen ¦ there there_lock ¦ -S all there ¦ --modules x ¦ -now there ¦ only_1 ¦ only_1 -r all ¦ "
        "-r all no_such ¦ there -r '' ¦ -r 1,0 there as a,b"
    ),
    "%dipshards": (
        " ¦ no_such ¦ there ¦ 1a ¦ model.no_such ¦ model. ¦ .model ¦ model model ¦ model -r 0 ¦ 'model ¦ model() ¦ "
        "model[0]"
    ),
    "%dipcheck": ("no_such ¦ 1a ¦ there no_such ¦ there,other ¦ there.x ¦ 'there ¦ -r 0 ¦ all ¦ -a ¦ there=1 ¦ *"),
    "%dipsync": (
        "no_such ¦ 1a ¦ there no_such ¦ there --from ¦ there --from 9 ¦ there --from x ¦ there --from -1 ¦ "
        "--from 0 1 ¦ "
        "there --from 0,1 ¦ there --from all ¦ there -r 1 ¦ 'there ¦ there.x ¦ --from '' ¦ there_lock"
    ),
    "%diprun": (
        " ¦ nowhere.py ¦ -m ¦ -m no_such_module ¦ -m x.py ¦ . ¦ -x a.py ¦ --nproc-per-node 2 a.py ¦ -r 9 a.py ¦ "
        "-r x a.py ¦ -r ¦ -S 9 a.py ¦ --timeout a.py ¦ --timeout 0 a.py ¦ 'a.py ¦ -h ¦ --bg ¦ a.py -r 0"
    ),
    "%dipcells": ("5 ¦ -a 3 ¦ all ¦ --al ¦ -n 3 ¦ 'x ¦ --json"),
    "%dipstatus": ("5 ¦ --jsn ¦ -i ¦ json ¦ 'x ¦ -json"),
    "%dipcell": ("999 ¦ 0 ¦ -1 ¦ x ¦ 1 2 ¦ 1,2 ¦ 1.5 ¦ '1 ¦ last ¦ -n 1 ¦ \u0661 ¦ 99999999999999999999999 ¦ [1]"),
    "%dipwait": (
        "999 ¦ 0 ¦ -1 ¦ x ¦ 1,x ¦ 1 999 ¦ 1.5 ¦ '1 ¦ -t ¦ -t x ¦ -t -1 ¦ -t nan ¦ -t 5 x ¦ --timeout ¦ all ¦ \u0662"
    ),
    "%dipstop": (" ¦ 999 ¦ 0 ¦ -1 ¦ x ¦ 1 2 ¦ 1 ¦ all ¦ '1 ¦ -r 0 ¦ \u0663"),
    "%dipstack": ("0 ¦ -r 0 ¦ -v 1 ¦ --verbos ¦ 'x ¦ all"),
    "%dipwatch": ("onn ¦ off on ¦ ON ¦ --onc ¦ -1 off ¦ 5 ¦ on off ¦ -r 0 ¦ 'x ¦ off --once ¦ -2"),
    "%dipper": (" ¦ 1a ¦ a b ¦ if ¦ a.b ¦ g= ¦ 'g ¦ -g ¦ None ¦ g, h ¦ g # c ¦ g; ¦ \u0261\xa0"),
    "%dipexport": (
        " ¦ train ¦ train.txt ¦ no/such/train.py ¦ a.py b.py ¦ a.py --cells x ¦ a.py --cells 9-3 ¦ a.py --cells"
    ),
}
"""Wrong arguments by magic, and some right ones that look wrong."""
NEEDING_A_GROUP = (
    "%%dip ¦ %%dip everywhere ¦ %autodip on ¦ %dipush data ¦ %dipush --modules x ¦ %dipull x ¦ %dipull x --now ¦ "
    "%dipshards model ¦ %dipcheck ¦ %dipsync ¦ %dipcells ¦ %dipcell ¦ %dipcell 1 ¦ %dipwait ¦ %dipwait 1 ¦ "
    "%dipstop ¦ %dipstop 1 ¦ %dipstack ¦ %dipwatch ¦ %dipwatch --once ¦ %dipwatch off ¦ %dipper g ¦ %dipstatus ¦ "
    "%makedip -i ¦ %makedip --repair ¦ %makedip -k ¦ %autodip ¦ %autodip off ¦ %dipull ¦ %dipush no_such ¦ "
    "%%dip -r x ¦ %%dip -S ¦ %diprun a.py"
)
WHILE_BUSY = (
    "%%dip ¦ %%dip -r 0 ¦ %%dip --bg ¦ %%dip -a patches ¦ %dipush data ¦ %dipull there ¦ %dipull there -r 1 ¦ "
    "%dipcheck ¦ %dipsync there ¦ %dipshards model ¦ %makedip -n 3 ¦ %makedip -a hf ¦ %makedip -b nccl ¦ "
    "%makedip -v x ¦ %makedip --repair ¦ %dipwait -t 0.1 ¦ %dipstop 999 ¦ %dipull --now no_such ¦ "
    "%dipull --now there_lock"
)
SETUP = """
import threading
data, other, lock, gen, open_file = [1], 2, threading.Lock(), (i for i in "a"), open("written", "w")
"""
ON_RANKS = """
import threading, torch
there, other, there_lock, there_gen, model = [1], 2, threading.Lock(), (i for i in 'a'), torch.nn.Linear(2, 2)
if rank: only_1 = 1
"""
STATE = """%autodip
%autodip off
print([rank.pid for rank in group_.info()], [group_.variable_names("", rank) for rank in (0, 1)])
print(sorted(name for name in dir() if name[0] != "_"), data)
%config DipMagics.timeout
%config DipMagics.verbose
"""
"""A cell that prints what wrong input must leave unchanged."""


class Transcript:
    """Types lines, and collects the answers as rows of Markdown tables."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._rows: list[str] = []
        self.marked = 0

    def add_table(self, title: str, lines: list[str], state: str = STATE) -> None:
        """Type `lines`; the cell `state` prints what they must leave unchanged."""
        self._rows += [f"\n## {title}\n", "| typed | answer | mark |", "|---|---|---|"]
        before = self._notebook.ok(state).stdout
        for line in lines:
            shown = self._notebook.run(f"{line}\npass" if line.startswith("%%") else line, timeout=60)
            text = "<br>".join(_lines(shown))
            after = self._notebook.ok(state).stdout
            marks = [*_marks(shown), *(["changed"] if after != before else [])]
            before = after
            self.marked += bool(marks)
            cells = [cell.replace("|", "\\|") for cell in (f"`{line}`", text, ", ".join(marks))]
            self._rows.append(f"| {' | '.join(cells)} |")

    def write(self, path: Path) -> None:
        """Write the tables to a file."""
        path.write_text("\n".join(["# Answers to wrong input", *self._rows, ""]))


def _lines(shown: Shown) -> list[str]:
    """Return the lines that a cell has shown."""
    data = [bundle.get("text/plain", "") for bundle in shown.data]
    return [line for text in (shown.stdout, shown.stderr, *data, shown.traceback) for line in text.strip().splitlines()]


def _marks(shown: Shown) -> Iterator[str]:
    if shown.status != "error":
        yield "raises nothing"
    elif len(_lines(shown)) != 1:
        yield f"{len(_lines(shown))} lines"


def main(path: Path) -> None:
    """Write the transcript to the file `path`."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = Notebook(Path(folder))
        try:
            transcript = Transcript(notebook)
            notebook.ok(f"%load_ext ddip\n%config DipMagics.report_after = 100\n{SETUP}")
            transcript.add_table("Without a group", NEEDING_A_GROUP.split(SEPARATOR), "%makedip -k")
            notebook.ok("%makedip -n 2")
            notebook.ok(f"%%dip\n{ON_RANKS}")
            notebook.ok("%dipper group_")
            for magic, typed in LINES.items():
                wrong = [*typed.split(SEPARATOR), *OPTIONS.split(SEPARATOR)]
                transcript.add_table(magic, [f"{magic} {line}".rstrip() for line in wrong])
            notebook.ok("%%dip --bg\nwhile 'end' not in globals(): pass")
            transcript.add_table("While the ranks run a cell in the background", WHILE_BUSY.split(SEPARATOR))
            notebook.ok("%dipstop")
            transcript.write(path)
            print(f"{transcript.marked} lines are marked")
        finally:
            notebook.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
