"""Sphinx: the site of `make site`, from the Markdown pages of the repository and the docstrings of `fedcenters`."""

from __future__ import annotations

from edge_client import __version__

project, release = "fedcenters", __version__
root_doc = "docs/site/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["docs/*.md", "docs/*.ipynb", "docs/site/*.md", "*.md"]

myst_heading_anchors = 4  # a link to a heading is written as on GitHub
nb_execution_mode = "off"  # tests/docs/test_notebooks.py runs them

default_role = "code"  # docstrings put code between single backticks
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80  # then one parameter a line

html_theme = "furo"
html_title = f"fedcenters {release}"
html_extra_path = ["index.html"]  # the folder's own index leads to root_doc
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = html_copy_source = html_show_sourcelink = False
