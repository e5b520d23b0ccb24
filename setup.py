"""Metadata that setup.cfg cannot express."""

import re
from pathlib import Path

from setuptools import setup

PICTURES = r"<picture>.*?</picture>\n|!\[[^\]]*\]\([^)]*\)\n"
COMMENTS = r"^<!--[^>]*-->\n|<!--[^>]*-->"
RELATIVE_LINK = r"\[([^\]]+)\]\((?!https?:)[^)]+\)"


def long_description() -> str:
    """Return the README without pictures and relative links, which a package index cannot resolve."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(f"{PICTURES}|{COMMENTS}", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(rf"\s\({RELATIVE_LINK}\)", "", text)  # a link in brackets, such as ([versions](Issues.md))
    return re.sub(RELATIVE_LINK, r"\1", text)


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown")
