"""The documentation: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import ddip  # noqa: E402

project = "ddip"
author = "the ddip authors"
version = release = ddip.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "ddip_pages"]
exclude_patterns = ["_ext"]
nb_execution_mode = "off"
nb_merge_streams = True
suppress_warnings = ["mystnb.mime_type"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = False
default_role = "code"
smartquotes = False

# Types in signatures that no page describes: those of other libraries, and a few of ours.
# The build fetches no inventory of other sites, so it needs no network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections\.abc|concurrent|pathlib|typing|types|IPython|torch)\..*"),
    ("py:class", r"(ddip\.output\.progress\.)?Report|(ddip\.output\.cells\.display_options\.)?DisplayOptions"),
    (
        "py:class",
        r"ddip\.call\.torchddp\.T|ddip\.protocol\.reports\.ShardsReport|ddip\.cluster\.reach\.Attachment"
        r"|ddip\.cluster\.cluster_api\.Cluster|InteractiveShell",
    ),
]

html_theme = "furo"
html_title = f"ddip {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["ddip.css"]
html_js_files = [("ddip.js", {"defer": "defer"})]
