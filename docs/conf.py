"""How Sphinx makes the site of the pages (``make docs``).

The whole repository is its source folder, so that links and pictures are the same files on the site and in a checkout.
"""

import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the reference imports JAX, which need not look for accelerators

project = "alibi-core"
author = project_copyright = "the authors of alibi-core"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "benchmarks/README.md",
    "alibi_core/conformance/FORMAT.md",
]
exclude_patterns = [".*", "out", "dist", "build"]

myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_default_options = {"members": True, "inherited-members": True}
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "alibi-core"
html_extra_path = ["site"]
html_show_sphinx = False
html_copy_source = False


def prepare(app, page, source):
    """Make the tables of the first page the navigation, a caption a section. Drop the empty last lines of examples."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")
    if page != root_doc:
        return
    for section in source[0].split("\n## ")[1:]:
        caption = section.partition("\n")[0]
        found = re.findall(r"^\| \[(.*?)\]\((.*?)\.md\)", section, re.MULTILINE)
        entries = "\n".join(f"{name} <{path}>" for name, path in found)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def skip_foreign(app, what, name, member, skip, options):
    """Leave out members that classes inherit from their framework; those that they inherit from the core are theirs."""
    module = getattr(getattr(member, "fget", member), "__module__", None) or ""
    return True if what == "class" and not module.startswith("alibi_") else None


def setup(app):
    """Connect with Sphinx."""
    app.connect("source-read", prepare)
    app.connect("autodoc-skip-member", skip_foreign)
