"""Write a report's files: report.json, the pictures and report.html."""

import json
import re
from pathlib import Path

from ctxext.evaluate.report.report import Report
from ctxext.system.output_directory import write_whole


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write everything that is made from a report; each file appears whole or not at all.

    Args:
        report: The content of report.json.
        folder: Where to.

    Returns:
        The files, report.json first and report.html second.
    """
    from ctxext.evaluate.report.page import render_page
    from ctxext.evaluate.report.pictures import as_png, heat_maps, loss_curves

    files = {"report.json": (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode()}
    files["report.html"] = render_page(report).encode()
    for task in dict.fromkeys(cell["task"] for model in report["models"] for cell in model["cells"]):
        figure = heat_maps(report, task)
        if figure is not None and len(report["models"]) > 1:
            files[f"{task}.png"] = as_png(figure)
        for model in report["models"]:
            figure = heat_maps(report, task, names=[model["name"]])
            if figure is not None:
                files[f"{task}-{_file_name(model['name'])}.png"] = as_png(figure)
    figure = loss_curves(report)
    if figure is not None:
        files["perplexity.png"] = as_png(figure)
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
