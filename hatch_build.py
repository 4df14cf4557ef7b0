"""Add the README, with links that work on a package index, and the project's addresses to the metadata.

`tools/repository_links.py` finds the address of the repository. Without it, no address is written, and links to other
files of the repository become plain text.
"""

import re
import sys
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.append(str(Path(__file__).parent / "tools"))
from repository_links import LINK, link_to, repository


def with_absolute_links(text: str, address: str, reference: str) -> str:
    """Point the relative links and images of a page into the repository; without an address remove them.

    Args:
        text: Markdown.
        address: The address of the repository; empty if it is unknown.
        reference: The tag or branch to point at.
    """
    return LINK.sub(lambda match: link_to(*match.groups(), address, reference), text)


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
