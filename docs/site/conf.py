"""Sphinx: the site of `make site`, from the Markdown pages of the repository and the docstrings of `fedcenters`."""

from __future__ import annotations

import inspect
import posixpath
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from edge_client import __version__

project, release = "fedcenters", __version__
root_doc = "docs/site/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["docs/*.md", "docs/*.ipynb", "docs/site/*.md", "*.md"]

myst_heading_anchors = 4  # a link to a heading is written as on GitHub
nb_execution_mode = "auto"  # the notebooks are kept without outputs
nb_execution_in_temp = nb_execution_raise_on_error = True
nb_execution_timeout = 300

default_role = "code"  # docstrings put code between single backticks
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80  # then one parameter a line

html_theme = "furo"
html_title = f"fedcenters {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = html_copy_source = html_show_sourcelink = False


def show_equations_as_they_stand(_app: Any, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:  # noqa: ANN401 - Sphinx's
    """Docstrings set equations in by four spaces after an empty line; for Sphinx this needs a mark."""
    for at in reversed(range(1, len(lines))):
        begins = lines[at].startswith("    ") and not lines[at - 1]
        before = next((line for line in reversed(lines[:at]) if line), "")
        if begins and before[:1].strip() and before not in ("Args:", "Raises:", "Returns:"):
            lines[at:at] = ["::", ""]


def show_settings(_app: Any, what: str, _name: str, of: Any, _options: Any, _signature: str, returns: str) -> Any:  # noqa: ANN401 - Sphinx's
    """A dataclass is called with its fields, also where a base class looks at the arguments first."""
    if what != "class" or not is_dataclass(of):
        return None
    made = inspect.signature(of.__init__)
    told = str(made.replace(parameters=list(made.parameters.values())[1:], return_annotation=made.empty))
    return re.sub(r": '([^']*)'", r": \1", told), returns  # annotations are texts


def put_first_page_at_the_root(app: Any, failed: Exception | None) -> None:  # noqa: ANN401 - Sphinx's
    """The folder's own index.html is root_doc with the paths of its links; a redirect would be an empty first page."""
    if failed is not None:
        return
    folder = posixpath.dirname(root_doc)
    page = Path(app.outdir, f"{root_doc}.html").read_text(encoding="utf-8")

    def from_root(found: re.Match[str]) -> str:
        return f'{found[1]}="{posixpath.normpath(posixpath.join(folder, found[2]))}{found[3]}"'

    moved = re.sub(r'\b(href|src|action)="(?!\w+:|/|#)([^"#?]+)([^"]*)"', from_root, page)
    moved = moved.replace('data-content_root="../../"', 'data-content_root="./"')
    Path(app.outdir, "index.html").write_text(moved, encoding="utf-8")


def setup(app: Any) -> None:  # noqa: ANN401 - Sphinx's
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", show_settings)
    app.connect("build-finished", put_first_page_at_the_root)
    app.connect("autodoc-process-docstring", show_equations_as_they_stand, priority=100)  # before napoleon
