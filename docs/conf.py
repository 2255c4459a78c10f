"""How Sphinx builds the documentation: `make docs`."""

import os
import sys
from pathlib import Path

import forge

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "forge"
author = "the authors of forge"
version = release = forge.__version__
html_title = f"forge {forge.__version__}"
REPOSITORY = os.environ.get("FORGE_REPOSITORY", "https://git.example.org/forge")
"""The target of the icon in the header. The host of the site sets the variable."""

extensions = [
    *("myst_parser", "sphinx_design", "sphinx_copybutton"),
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "forge_reference"),
]
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "navbar_persistent": ["search-button"],
    "icon_links": [{"name": "Repository", "url": REPOSITORY, "icon": "fa-solid fa-code-branch"}],
    "secondary_sidebar_items": {"**": ["page-toc"], "index": [], "reference/policy": []},
    "show_toc_level": 2,
    "footer_end": [],
}
# A page without pages below it would have an empty column at the left.
html_sidebars = {
    name: [] for name in ("index", "tutorial", "cheat-sheet", "symptoms", "glossary", "changelog")
}
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["forge.css"]
html_search_scorer = str(HERE / "_static" / "search_scorer.js")
html_show_sourcelink = False
html_copy_source = False

# What a command prints is not copied.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# Docstrings are written as people read them in an editor: `name` is code.
default_role = "literal"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
