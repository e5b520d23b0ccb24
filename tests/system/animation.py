"""Record the README's animation from a real JupyterLab: ``python -m tests.system.animation FOLDER``.

A person starts a group and runs cells; one rank fails, and the next cell runs on all ranks again. The film is made of
screenshots: the durations of typing and reading are set here, and long waits are shortened.
"""

from __future__ import annotations

import sys
import tempfile
import time
from io import BytesIO
from itertools import pairwise
from pathlib import Path

from PIL import Image

from .lab import Lab, open_lab

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SCENES = {
    "%load_ext ddip": 0.2,
    "%makedip -n 4": 0.7,
    "%%dip -S all\nimport torch, torch.distributed as dist\nx = torch.randn(1000) + rank\n"
    'print(f"rank {rank} of {world_size}: mean {x.mean():.2f}")': 1.7,
    '%%dip\nif rank == 2: raise ValueError("a bad batch on one rank")\ndist.all_reduce(x)': 3.0,
    '%%dip\ndist.all_reduce(x)\nprint(f"no restart, x is still there: mean {x.mean() / world_size:.2f}")': 2.8,
}
"""Cells, and the seconds for which a viewer reads their output."""
TYPED_CHARS, TYPING_SECONDS = 6, 0.05
LONGEST_WAIT_SECONDS = 0.8
IMPORT_SECONDS = 8
"""Pause after ``%load_ext``, in which the preload process imports torch; the film leaves it out."""
MAX_SECONDS, MAX_BYTES = 15, 1_000_000
STYLE = """
.jp-Notebook-footer, .jp-cell-toolbar, .jp-Toolbar, .jp-Collapser { display: none !important }
.cm-cursorLayer { animation: none !important }
"""
SCROLL_TO_END = """panel => {
    const end = [...panel.querySelectorAll(".jp-Cell")].at(-1).getBoundingClientRect().bottom + 12
    panel.scrollTop += Math.max(end - panel.getBoundingClientRect().bottom, -panel.scrollTop)
}"""


class Film:
    """Frames of a part of a page, and how long each is shown."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.frames: list[Image.Image] = []
        self.seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """Take a frame of the end of the notebook that is shown for `seconds`."""
        panel = self.lab.page.locator(".jp-WindowedPanel-outer")
        panel.evaluate(SCROLL_TO_END)
        self.frames.append(Image.open(BytesIO(panel.screenshot(caret="initial"))).convert("RGB"))
        self.seconds.append(seconds)

    def add_wait(self, number: int) -> None:
        """Take frames until a cell has ended; a long wait is shown in less time."""
        first, times = len(self.frames), [time.monotonic()]
        while self.lab.is_running(number):
            self.add(0)
            time.sleep(0.15)  # else the browser would slow down the cell
            times.append(time.monotonic())
        pace = min(1, LONGEST_WAIT_SECONDS / (times[-1] - times[0] or 1))
        self.seconds[first:] = [(end - begin) * pace for begin, end in pairwise(times)]

    def save(self, path: Path) -> None:
        """Write the frames as a GIF that is repeated indefinitely."""
        palette = _join(self.frames[-1], self.frames[-2]).quantize(255)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        milliseconds = [round(seconds * 100) * 10 for seconds in self.seconds]  # GIF counts in 10 ms
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, optimize=True)
        assert sum(self.seconds) <= MAX_SECONDS, f"{path} takes {sum(self.seconds):.1f} s"
        assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size} bytes"
        print(f"{path}: {sum(self.seconds):.1f} s, {len(frames)} frames, {path.stat().st_size // 1000} KB")


def _join(*pictures: Image.Image) -> Image.Image:
    joined = Image.new("RGB", (pictures[0].width, sum(picture.height for picture in pictures)))
    for number, picture in enumerate(pictures):
        joined.paste(picture, (0, number * picture.height))
    return joined


def play(lab: Lab, film: Film) -> None:
    """Type and run each cell of `SCENES`."""
    for number, (code, seconds) in enumerate(SCENES.items()):
        lab.cell(number).locator(".cm-content").click()
        for start in range(0, len(code), TYPED_CHARS):
            lab.page.keyboard.insert_text(code[start : start + TYPED_CHARS])
            film.add(TYPING_SECONDS)
        lab.page.keyboard.press("Shift+Enter")
        film.add_wait(number)
        if number == 0:
            time.sleep(IMPORT_SECONDS)
        film.add(seconds)


def record(theme: str, path: Path) -> None:
    """Record the animation in a theme of JupyterLab."""
    with tempfile.TemporaryDirectory() as scratch, open_lab(Path(scratch), THEMES[theme], scale=2) as lab:
        lab.open("film.ipynb", [""])
        lab.page.keyboard.press("Control+b")  # close the file browser
        lab.page.set_viewport_size({"width": 800, "height": 640})
        lab.page.add_style_tag(content=STYLE)
        film = Film(lab)
        play(lab, film)
        film.save(path)


def main(folder: Path) -> None:
    """Record the animation in each theme."""
    for theme in THEMES:
        record(theme, folder / f"animation_{theme}.gif")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
