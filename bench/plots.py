"""Draws the kept results of benchmarks: `python -m cellama.bench.plots` writes docs/images/*.png.

    --results FOLDER   other results than bench/results/
    --images FOLDER    other place for the pictures

Each picture shows the last kept line of its benchmarks, and says on which machine and commit they ran.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from cellama.bench.benchmarks.bulk.offline import NAIVE, WORKLOADS
from cellama.bench.benchmarks.load.arrivals import LOADS
from cellama.bench.benchmarks.load.at_once import PART as AT_ONCE
from cellama.bench.harness.kept import Results
from cellama.bench.harness.report import RESULTS

matplotlib.use("Agg")  # before pyplot chooses one
from matplotlib import pyplot
from matplotlib.ticker import LogLocator

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
# Okabe and Ito's colours, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8A8A8A"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 6,
}
DPI = 110


@dataclass(frozen=True, slots=True)
class Bar:
    """One comparison: above 1 is in our favour."""

    label: str
    ratio: float
    hoped: float | None = None


def slots(results: Results) -> Any:
    """Throughput and time to the first token against slots and callers; None without results."""
    decode, callers = results.last("decode"), results.last("server_concurrent")
    if not decode or not callers:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.9))
    at = [row["slots"] for row in decode["rows"]]
    for column, name, color, mark in (
        ("batched-bench t/s", "llama-batched-bench (the limit)", GREY, "s"),
        ("engine t/s", "cellama", BLUE, "o"),
    ):
        if all(isinstance(row[column], float) for row in decode["rows"]):
            left.plot(at, [row[column] for row in decode["rows"]], color=color, marker=mark, label=name)
    left.set(title="Decoding", xlabel="slots", ylabel="tokens per second", ylim=(0, None), xticks=at)
    left.legend(loc="lower right")
    at = [row["callers"] for row in callers["rows"]]
    for column, name, color, mark in (("ttft p95 ms", "p95", VERMILION, "^"), ("ttft median ms", "median", BLUE, "o")):
        right.plot(at, [row[column] / 1e3 for row in callers["rows"]], color=color, marker=mark, label=name)
    right.axvline(callers["slots"], color=GREY, linestyle=":", linewidth=1.5)
    right.text(callers["slots"], right.get_ylim()[1], f" {callers['slots']} slots", color="#555555", va="top")
    right.set(title="First token, callers at once", xlabel="callers", ylabel="seconds", ylim=(0, None))
    right.set_xscale("log", base=2)
    right.set_xticks(at, [str(value) for value in at])
    right.legend(loc="center left")
    _caption(figure, [decode, callers])
    return figure


def comparisons(results: Results) -> Any:
    """Each comparison as a bar; None without results."""
    bars, lines = _kept_bars(results)
    if not bars:
        return None
    figure, axes = pyplot.subplots(figsize=(9.6, 1.5 + 0.42 * len(bars)))
    _draw_bars(axes, bars)
    _title(figure, "How many times faster (1 = the same)")
    _caption(figure, lines)
    return figure


def _draw_bars(axes: Any, bars: Sequence[Bar]) -> None:
    bars = bars[::-1]
    colors = [BLUE if bar.ratio >= 1 else ORANGE for bar in bars]
    axes.barh(range(len(bars)), [bar.ratio for bar in bars], color=colors, height=0.62)
    for place, bar in enumerate(bars):
        if bar.hoped:
            axes.plot([bar.hoped] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
        text = max(bar.ratio, bar.hoped or 0)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        place_of = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{bar.ratio:.2f}", (text, place), bbox=white, **place_of)
    axes.axvline(1, color=GREY, linewidth=1.5)
    axes.plot([], [], color="black", linewidth=2, label="hoped for")
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.1 * max(max(bar.ratio, bar.hoped or 0) for bar in bars))
    axes.legend(loc="lower right")


def _kept_bars(results: Results) -> tuple[list[Bar], list[dict[str, Any]]]:
    """The bars that there are results for, and the lines they are from."""
    wanted: tuple[tuple[str, str, str], ...] = (
        ("uniform", "best against best", "128 prompts at once, over llama-server"),
        ("shared_prefix", "llama-server over the engine's best", "128 that share a prefix, over llama-server"),
        ("prefix_cache", "median ms", "first token in a chat, cache on over off"),
        ("decode", "64 slots", "decoding, 64 slots, over llama-batched-bench"),
        ("queue_tax", "throughput, queue over engine", "through Celery and Redis, over the engine"),
    )
    bars, lines = [], []
    for name, ratio, label in wanted:
        if line := results.last(name, ratio):
            bars.append(Bar(label, line["ratios"][ratio], _number(line["targets"].get(ratio, ""))))
            lines.append(line)
    return bars, lines


def _number(target: str) -> float | None:
    """2.0 of ">= 2.0"."""
    return float(target.removeprefix(">=")) if target.startswith(">=") else None


def offline(results: Results) -> Any:
    """Bulk runs over each peer; None without results."""
    kept = {kind: results.last("offline", f"{kind}: over {NAIVE}") for kind in WORKLOADS}
    found = {kind: line for kind, line in kept.items() if line is not None}
    if not found:
        return None
    bars = [
        Bar(_offline_label(key, line["lines"]), ratio, _number(line["targets"].get(key, "")))
        for kind, line in found.items()
        for key, ratio in line["ratios"].items()
        if key.startswith(f"{kind}: over ")
    ]
    figure, axes = pyplot.subplots(figsize=(9.6, 1.5 + 0.42 * len(bars)))
    _draw_bars(axes, bars)
    _title(figure, "Bulk runs from file to file: lines per second over those of others")
    _caption(figure, list(found.values()))
    return figure


def _offline_label(key: str, num_lines: int) -> str:
    """Of "families: over naive Celery task"."""
    workload, _, peer = key.partition(": over ")
    kind = {"independent": "nothing shared", "families": "shared prefixes"}[workload]
    return f"{num_lines} lines, {kind}: {peer.replace(', from', ' by').replace(', its', ' with its')}"


def online(results: Results) -> Any:
    """Time to the first token at each rate, alone and beside a bulk load; None without results."""
    line = results.last("online")
    if not line:
        return None
    figure, both = pyplot.subplots(1, 2, figsize=(9.6, 3.9), sharey=True)
    _draw_first_tokens(both, line["rows"], "load")
    _caption(figure, [line])
    return figure


def _draw_first_tokens(both: Sequence[Any], rows: Sequence[dict[str, Any]], load_key: str) -> None:
    """Alone, and beside a bulk load."""
    for axes, load in zip(both, LOADS, strict=True):
        for who, color, mark in (("llama-server", ORANGE, "s"), ("cellama", BLUE, "o")):
            found = [row for row in rows if row["who"] == who and row[load_key] == load]
            at = [row["rate/s"] for row in found]
            for share, style in (("p50", "-"), ("p95", "--")):
                values = [row[f"ttft {share} ms"] / 1e3 for row in found]
                axes.plot(at, values, style, color=color, marker=mark, label=f"{who}, {share}")
        axes.set(title=f"First token, {load}", xlabel="arrivals per second", yscale="log")
        axes.set_xticks(at, [f"{rate:.2g}" for rate in at])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.grid(axis="y", which="minor", color="#F2F2F2")
    both[0].set_ylabel("seconds")
    both[0].legend(loc="best", handlelength=3.5, markerscale=0.8)


def mixed(results: Results) -> Any:
    """A load of mixed lengths, each part from the last line that has it: all at once, and arrivals; None without."""
    found = {part: _last_with(results.lines("mixed"), part) for part in (AT_ONCE, *LOADS)}
    lines = {part: line for part, line in found.items() if line}
    if AT_ONCE not in lines:
        return None
    arrivals = [row for load in LOADS if load in lines for row in _rows_of(lines, load)]
    figure, axes = pyplot.subplots(1, 3 if arrivals else 1, figsize=(12.8 if arrivals else 9.6, 3.9), squeeze=False)
    left, rows = axes[0][0], _rows_of(lines, AT_ONCE)[::-1]
    colors = [_color_of(row["who"]) for row in rows]
    left.barh(range(len(rows)), [row["new tok/s"] for row in rows], color=colors, height=0.62)
    left.set_yticks(range(len(rows)), [row["who"] for row in rows])
    left.grid(visible=False, axis="y")
    left.set(title=f"{lines[AT_ONCE]['requests']} at once", xlabel="new tokens per second")
    if arrivals:
        axes[0][2].sharey(axes[0][1])
        _draw_first_tokens(axes[0][1:], arrivals, "part")
    _caption(figure, list(lines.values()))
    return figure


def _last_with(lines: Sequence[dict[str, Any]], part: str) -> dict[str, Any] | None:
    return next((line for line in reversed(lines) if any(row["part"] == part for row in line["rows"])), None)


def _rows_of(lines: Mapping[str, dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [row for row in lines[part]["rows"] if row["part"] == part]


def speculation(results: Results) -> Any:
    """Guessed tokens on over off by kind of work and streams; None without results."""
    line = results.last("speculation")
    ends = ": on over off"
    found = {key: ratio for key, ratio in line["ratios"].items() if key.endswith(ends)} if line else {}
    if not line or not found:
        return None
    bars = [Bar(key.removesuffix(ends), ratio, _number(line["targets"].get(key, ""))) for key, ratio in found.items()]
    figure, axes = pyplot.subplots(figsize=(9.6, 1.5 + 0.42 * len(bars)))
    _draw_bars(axes, bars)
    _title(figure, "Tokens per second with guessed tokens, over without")
    _caption(figure, [line])
    return figure


def _color_of(who: str) -> str:
    return ORANGE if who.startswith("llama-server") else GREY if who.startswith("full passes") else BLUE


FIGURES: dict[str, Callable[[Results], Any]] = {
    "slots": slots,
    "comparisons": comparisons,
    "offline": offline,
    "online": online,
    "mixed": mixed,
    "speculation": speculation,
}


def _title(figure: Any, text: str) -> None:
    """Over the labels, too."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _caption(figure: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Below the picture: model, hardware, commits."""
    models = ", ".join(dict.fromkeys(line["model"] for line in lines))
    machines = "; ".join(dict.fromkeys(line["machine"] for line in lines))
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    figure.tight_layout(rect=(0, 0.06 if figure.get_figheight() > 3 else 0.1, 1, 1))
    figure.text(0.01, 0.015, f"{models} · {machines} · commit {commits}", fontsize=7.5, color="#666666")


def draw(results: Path, images: Path) -> list[Path]:
    """Writes the pictures that there are results for, and returns their paths."""
    images.mkdir(parents=True, exist_ok=True)
    written = []
    with pyplot.rc_context(STYLE):
        for name, make in FIGURES.items():
            if (figure := make(Results(results))) is not None:
                written.append(images / f"{name}.png")
                figure.savefig(written[-1], dpi=DPI, metadata={"Software": None})
                pyplot.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    for path in draw(args.results, args.images):
        print(path)


if __name__ == "__main__":
    main()
