"""What a package page shows beside ``pyproject.toml``: README, whose links must be absolute there, and addresses.

The environment names the repository, as GitHub's does in workflows; without it, a build keeps README as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^][]*\])\((?!https?:|#)([^)#]+)")
PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Source": ""}


def with_addresses(text: str, repository: str, tag: str) -> str:
    """Return a text whose links to files of the repository, pictures too, are absolute."""
    return LINK.sub(lambda x: f"{x[1]}{x[2]}({repository}/{'raw' if x[1] else 'blob'}/{tag}/{x[3]}", text)


class Hook(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dynamic fields."""
        text, urls = (Path(self.root) / "README.md").read_text(encoding="utf-8"), {}
        if name := os.environ.get("GITHUB_REPOSITORY"):
            repository, tag = f"{os.environ['GITHUB_SERVER_URL']}/{name}", os.environ["GITHUB_REF_NAME"]
            text = with_addresses(text, repository, tag)
            urls = {page: f"{repository}/blob/{tag}/{path}" if path else repository for page, path in PAGES.items()}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls | {"Paper": "https://arxiv.org/abs/2108.12409"}
