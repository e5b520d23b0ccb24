"""Metadata that setup.cfg cannot express."""

import re
from pathlib import Path

from setuptools import setup


def long_description() -> str:
    """Return the README without pictures and relative links, which a package index cannot resolve."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<picture>.*?</picture>\n|!\[[^\]]*\]\([^)]*\)\n|<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
