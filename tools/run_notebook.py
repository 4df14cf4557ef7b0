"""Execute a notebook in an empty folder and write it with its outputs.

    python tools/run_notebook.py examples/getting-started.ipynb

The Python that runs this needs ctxext, nbclient and ipykernel, as `make story` installs them. --out writes a copy
instead of the notebook itself.
"""

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Parse the arguments, execute the notebook, and remove what differs from run to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, help="Default: the notebook itself.")
    arguments = parser.parse_args()
    notebook = nbformat.read(arguments.notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:  # Progress and warnings are on stderr.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, arguments.out or arguments.notebook)


if __name__ == "__main__":
    main()
