"""Sphinx builds the pages of this folder: `python -m sphinx -W -b html docs build/site`.

Everything that a page shows lies beside it: no font, script or inventory is fetched, neither when it is built nor when it is
read.
"""

import re
from pathlib import Path

import llama_jax

HERE = Path(__file__).parent

project = "llama_jax"
author = "The llama_jax contributors"
copyright = author
version = release = llama_jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["build", "_static"]
nitpicky = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"llama_jax {version}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "code"  # docstrings are Markdown as far as `names` go
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _files_beside(app, docname, source):
    """A link to Markdown that is no page (tables of `experiments/results`) is one to the file, a folder its name."""

    def found(link: re.Match) -> str:
        path = ((HERE / docname).parent / link[2]).resolve()
        if HERE in path.parents:
            return link[0]
        return link[1] if path.is_dir() else f"[{link[1]}](path:{link[2]})" if path.is_file() else link[0]

    source[0] = re.sub(r"(?<!!)\[([^]\[]*)\]\(([\w./-]+)\)", found, source[0])


def _no_aliases(app, what, name, obj, options, lines):
    """What `typing.NamedTuple` says of its fields says nothing."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(app):
    app.connect("source-read", _files_beside)
    app.connect("autodoc-process-docstring", _no_aliases)
