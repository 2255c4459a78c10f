"""How Sphinx builds the documentation: `make docs`."""

import sys
from pathlib import Path

import forge

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "forge"
author = "the authors of forge"
version = release = forge.__version__
html_title = f"forge {forge.__version__}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "forge_reference"]
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False}
html_show_sourcelink = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are written as people read them in an editor: `name` is code.
default_role = "literal"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
