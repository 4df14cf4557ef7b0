"""Links of Markdown pages to files of the repository, as package indexes and the documentation site need them.

CTXEXT_REPOSITORY sets the address of the repository. On GitHub's runners the default is GITHUB_REPOSITORY.
"""

import os
import re

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
"""A relative link or image of a Markdown page."""
_GITHUB = "https://github.com/"


def repository() -> str:
    """Return the address of the repository, without a trailing slash; empty if it is not set."""
    address = os.environ.get("CTXEXT_REPOSITORY", "")
    if not address and os.environ.get("GITHUB_REPOSITORY"):
        address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{os.environ['GITHUB_REPOSITORY']}"
    return address.rstrip("/")


def link_to(mark: str, label: str, path: str, address: str, reference: str) -> str:
    """Return a Markdown link to a file of the repository; a notebook of GitHub opens in Colab.

    Without an address, it is the label of a link, and nothing for an image.

    Args:
        mark: "!" for an image, otherwise empty.
        label: The text of the link.
        path: The file, from the root of the repository.
        address: The address of the repository; empty if it is unknown.
        reference: The tag or branch to point at.
    """
    if not address:
        return "" if mark else label
    place = f"{address}/{'raw' if mark else 'blob'}/{reference}/{path}"
    if path.endswith(".ipynb"):
        place = place.replace(_GITHUB, "https://colab.research.google.com/github/", 1)
    return f"{mark}[{label}]({place})"
