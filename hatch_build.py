"""Add the README, with links that work on a package index, and the project's addresses to the metadata.

CTXEXT_REPOSITORY sets the address of the repository; on GitHub's runners the default is GITHUB_REPOSITORY. Without
either, no address is written, and links to other files of the repository become plain text.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s]+)\)")


def repository() -> str:
    """Return the address of the repository, without a trailing slash; empty if it is not set."""
    address = os.environ.get("CTXEXT_REPOSITORY", "")
    if not address and os.environ.get("GITHUB_REPOSITORY"):
        address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{os.environ['GITHUB_REPOSITORY']}"
    return address.rstrip("/")


def with_absolute_links(text: str, address: str, reference: str) -> str:
    """Point the relative links and images of a page into the repository; without an address remove them.

    Args:
        text: Markdown.
        address: The address of the repository; empty if it is unknown.
        reference: The tag or branch to point at.
    """

    def absolute(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if not address:
            return "" if mark else label
        return f"{mark}[{label}]({address}/{'raw' if mark else 'blob'}/{reference}/{target})"

    return _LINK.sub(absolute, text)


class Metadata(MetadataHookInterface):
    """Metadata hook that fills in `readme` and `urls`."""

    def update(self, metadata: dict) -> None:
        """Add the fields that depend on the address of the repository."""
        address, reference = repository(), f"v{self._version()}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, address, reference)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/tree/{reference}/docs",
                "Changelog": f"{address}/blob/{reference}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }

    def _version(self) -> str:
        text = (Path(self.root) / "src" / "ctxext" / "version.py").read_text(encoding="utf-8")
        return re.search(r'__version__ = "(.+)"', text)[1]
