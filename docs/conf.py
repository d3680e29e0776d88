"""How Sphinx builds the book: one project, once for each language (``make docs``).

``sphinx-build -t zh`` builds the Chinese pages of ``docs/zh``, ``-t en`` the English ones of ``docs/en``; both have the
same paths, so a page's counterpart is found without a table.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import jieba

import phalanx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "extensions"))

CHINESE = tags.has("zh")  # noqa: F821 Sphinx gives it to this file

if CHINESE:
    jieba.setLogLevel(logging.WARNING)  # the words of its search index; it would tell how long its dictionary took

project = "Phalanx"
author = copyright = "the authors of Phalanx"
version = release = phalanx.__version__
language = "zh_CN" if CHINESE else "en"
html_title = f"Phalanx {version}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "book_pages",
    "book_commands",
    "book_search",
]
if CHINESE:
    extensions.append("book_chinese")
source_suffix = {".md": "markdown"}
root_doc = "index"
templates_path = ["templates"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

smartquotes_action = "q"  # quotation marks alone: the dashes of --flags and dots stay as they are

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_theme_options = {"top_of_page_buttons": ["view"]}  # templates/components/view-this-page.html: the other language
html_context = {
    "other_language": "en" if CHINESE else "zh",
    "other_language_tag": "en" if CHINESE else "zh-CN",
    "other_language_name": "English" if CHINESE else "中文",
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"  # docstrings put names between single backticks
add_module_names = True
toc_object_entries_show_parents = "hide"
autosummary_generate = False
