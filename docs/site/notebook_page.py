#!/usr/bin/env python3
"""Writes docs/attention_in_an_hour.md and its figures from the notebook of the same name.

notebook_page.py           executes the notebook (nbconvert, ipykernel, matplotlib, the library)
notebook_page.py --check   exits with 1 if the page does not have the notebook's text and code

The site and GitHub show the page, so the notebook is stored without outputs. Outputs are not
compared: their last digits depend on NumPy.
"""
import json
import os
import pathlib
import re
import subprocess
import sys

DOCS = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOK = DOCS / "attention_in_an_hour.ipynb"
PAGE = NOTEBOOK.with_suffix(".md")
NOTE = f"<!-- Written by docs/site/{pathlib.Path(__file__).name} from {NOTEBOOK.name}. -->"


def figure_of(cell):
    return f"figures/hour_{cell['id']}.svg"


def text_of(cell):
    """The Markdown of a cell: formulae in fences, as on the other pages."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return re.sub(r"^\$\$\n(.*?)\n\$\$$", r"```math\n\1\n```", text, flags=re.M | re.S)
    return f"```python\n{text}\n```"


def printed_by(cell):
    """What a cell of an executed notebook printed, as a fence."""
    text = "".join("".join(output["text"]) for output in cell["outputs"]
                   if output["output_type"] == "stream" and output["name"] == "stdout")
    return f"```text\n{text.rstrip()}\n```" if text else ""


def page_of(cells, outputs):
    """The page; with `outputs` the cells are those of an executed notebook."""
    parts = []
    for cell in cells:
        parts.append(text_of(cell))
        if len(parts) == 1:
            title, rest = parts.pop().split("\n", 1)
            parts += [title, NOTE, rest.strip("\n")]
        if cell["cell_type"] == "code" and outputs:
            parts += filter(None, [printed_by(cell)])
        if "alt" in cell["metadata"]:
            parts.append(f"![{cell['metadata']['alt']}]({figure_of(cell)})")
    return "\n\n".join(parts) + "\n"


def svg_of(cell):
    pictures = ["".join(output["data"]["image/svg+xml"]) for output in cell["outputs"]
                if "image/svg+xml" in output.get("data", {})]
    assert len(pictures) == 1, f"{cell['id']}: {len(pictures)} pictures, must be one"
    lines = (line.rstrip() for line in pictures[0].splitlines())
    return "\n".join(lines) + "\n"


def write():
    # Text stays text, and neither the date nor random names of elements change from run to run.
    settings = {"MATPLOTLIBRC": str(DOCS / "site" / "matplotlibrc"), "SOURCE_DATE_EPOCH": "0"}
    executed = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--stdout",
         str(NOTEBOOK)], check=True, stdout=subprocess.PIPE, env={**os.environ, **settings})
    cells = json.loads(executed.stdout)["cells"]
    for cell in cells:
        if "alt" in cell["metadata"]:
            (DOCS / figure_of(cell)).write_text(svg_of(cell))
    PAGE.write_text(page_of(cells, outputs=True))


def check():
    notebook = json.loads(NOTEBOOK.read_text())
    wrong = [f"{cell['id']}: has outputs; clear them" for cell in notebook["cells"]
             if cell.get("outputs") or cell.get("execution_count")]
    for cell in notebook["cells"]:
        if "alt" in cell["metadata"] and not (DOCS / figure_of(cell)).exists():
            wrong.append(f"docs/{figure_of(cell)} does not exist")
        wrong += [f"{cell['id']}: longer than 100 columns: {line}" for line in
                  "".join(cell["source"]).splitlines()
                  if len(line) > 100 and cell["cell_type"] == "code"]
    shown = re.sub(r"^```text\n.*?^```\n\n", "", PAGE.read_text(), flags=re.M | re.S)
    if shown.strip("\n") != page_of(notebook["cells"], outputs=False).strip("\n"):
        wrong.append(f"{PAGE.name} differs from {NOTEBOOK.name}: run docs/site/notebook_page.py")
    print("\n".join(wrong) or f"{PAGE.name} has the text and the code of {NOTEBOOK.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["--check"] else write())
