"""Draws a board of Grafana from what a Prometheus has for its expressions; no Grafana is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from cellama.bench.peers.prometheus import Prometheus, Sample

matplotlib.use("Agg")  # before pyplot chooses one
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, MaxNLocator

GROUND, PANEL, TEXT, FAINT = "#111217", "#181B1F", "#D0D1D8", "#2C3036"
COLORS = ("#73BF69", "#5794F2", "#F2CC0C", "#FF9830", "#B877D9", "#F2495C", "#8AB8FF", "#CA95E5")
DPI, WIDTH_IN, PANEL_IN, TITLE_IN = 100, 15.0, 2.15, 0.5
PER_ROW, GRID = 3, 24  # panels beside each other; Grafana's columns
NUM_POINTS, MOST_LINES = 120, 8
LEGEND_CHARACTERS = 80  # in a line below a panel
SCALES = {"bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")), "s": ((1, "s"), (1e-3, "ms"))}


def draw(prometheus: Prometheus, board: Path, between: tuple[float, float], picture: Path) -> None:
    """Writes a PNG of all panels between two Unix times. Raises RuntimeError with what is wrong with an expression."""
    panels = json.loads(board.read_text(encoding="utf-8"))["panels"]
    tops, height_in = _places(panels)
    with pyplot.rc_context({"font.size": 8.5, "text.color": TEXT, "axes.labelcolor": TEXT, "legend.frameon": False}):
        figure = pyplot.figure(figsize=(WIDTH_IN, height_in), facecolor=GROUND)
        for panel, top_in in zip(panels, tops, strict=True):
            if panel["type"] == "row":
                y = 1 - (top_in + TITLE_IN * 0.7) / height_in
                figure.text(0.012, y, panel["title"], fontsize=12, fontweight="bold")
                continue
            left, bottom = panel["gridPos"]["x"] / GRID, 1 - (top_in + PANEL_IN) / height_in
            size = (1 / PER_ROW - 0.01, (PANEL_IN - 0.12) / height_in)
            figure.patches.append(
                pyplot.Rectangle((left + 0.005, bottom), *size, transform=figure.transFigure, color=PANEL, zorder=-1)
            )
            inner = (left + 0.042, bottom + 0.52 / height_in, size[0] - 0.05, size[1] - 0.86 / height_in)
            _draw_panel(figure.add_axes(inner), panel, _lines(prometheus, panel, between))
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=DPI, facecolor=GROUND, metadata={"Software": None})
        pyplot.close(figure)


def _places(panels: Sequence[dict[str, Any]]) -> tuple[list[float], float]:
    """The top of each panel, in inches from the upper edge, and the height of all."""
    tops: dict[int, float] = {}
    height_in = 0.1
    for at in sorted({panel["gridPos"]["y"] for panel in panels}):
        tops[at] = height_in
        height_in += TITLE_IN if any(p["type"] == "row" and p["gridPos"]["y"] == at for p in panels) else PANEL_IN
    return [tops[panel["gridPos"]["y"]] for panel in panels], height_in + 0.1


def _lines(
    prometheus: Prometheus, panel: dict[str, Any], between: tuple[float, float]
) -> list[tuple[str, list[float], list[float]]]:
    """Legend, seconds since the beginning, and values of each."""
    begin, end = between
    lines = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "30s").replace("$model", ".*")
        for sample in prometheus.series(expression, begin, end, (end - begin) / NUM_POINTS):
            points = [(float(at) - begin, float(value)) for at, value in sample["values"]]
            known = [(at, value) for at, value in points if value == value]
            if known:
                at, values = [at for at, _ in known], [value for _, value in known]
                lines.append((_legend(target["legendFormat"], sample), at, values))
    return lines[:MOST_LINES]


def _legend(form: str, sample: Sample) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: sample["metric"].get(found[1], ""), form).strip()


def _draw_panel(axes: Any, panel: dict[str, Any], lines: list[tuple[str, list[float], list[float]]]) -> None:
    axes.set_facecolor(PANEL)
    axes.set_title(panel["title"], loc="left", fontsize=9.5, color=TEXT, pad=7)
    axes.tick_params(colors="#9FA1AA", length=0, labelsize=7.5)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for edge in axes.spines.values():
        edge.set_visible(False)
    for (legend, at, values), color in zip(lines, COLORS, strict=False):
        axes.plot([second / 60 for second in at], values, color=color, linewidth=1.4, label=legend)
        axes.fill_between([second / 60 for second in at], values, color=color, alpha=0.08, linewidth=0)
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#7B7D86")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_ylim(0, 1.12 * max(max(values) for _, _, values in lines) or 1)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _written(value, unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    columns = max(1, min(4, LEGEND_CHARACTERS // max(len(legend) + 4 for legend, _, _ in lines)))
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.14), "ncols": columns}
    axes.legend(**below, fontsize=7, handlelength=1.0, columnspacing=1.0)


def _written(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    for size, name in SCALES.get(unit, ()):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"
