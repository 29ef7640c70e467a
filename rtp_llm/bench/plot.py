"""Plots: bytes over time of our transport, and the speed of all contenders against the limits.  Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_llm.bench.faults import BenchError, BenchFault
from rtp_llm.errors import Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Stages in the order of a byte, and their labels.
_STAGES = {"storage": "from the disk", "read": "read calls returned", "copied": "copied to the device", "placed": "in place"}
#: Formats that matplotlib writes without other packages.
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """Refuses a plot that cannot be drawn, before anything is measured.

    Raises:
        BenchError: matplotlib is not installed, the suffix is not a format, or the directory does not exist.
    """
    problems = []
    if importlib.util.find_spec("matplotlib") is None:
        fix = "pip install matplotlib"
        problems.append(Problem(BenchFault.NO_PLOT, "matplotlib is not installed", expected="matplotlib", actual="nothing", fix=fix))
    if file.suffix not in _SUFFIXES:
        problems.append(
            Problem(BenchFault.NO_PLOT, "not the name of a picture", file=str(file), expected=f"one of {_SUFFIXES}", actual=file.suffix)
        )
    if not file.parent.is_dir():
        problems.append(
            Problem(BenchFault.NO_PLOT, "its directory is not there", file=str(file), expected="a directory", actual=str(file.parent))
        )
    if problems:
        raise BenchError(problems)


def draw_bench(file: Path, document: Mapping[str, Any], events: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the plot of a document of :func:`rtp_llm.bench.measure.run_bench`; ``events`` by state of the page cache."""
    from matplotlib.figure import Figure

    states = document["cache"]["states"]
    figure = Figure(figsize=(6 * len(states), 8), layout="constrained")
    axes = figure.subplots(2, len(states), squeeze=False)
    for column, state in enumerate(states):
        reached = document["reachable"][state]
        if state in events:
            _over_time(axes[0][column], state, events[state], reached)
        else:
            axes[0][column].set_axis_off()
        _speeds(axes[1][column], state, document["contenders"], reached)
    machine = document["machine"]
    figure.suptitle(f"{document['bytes'] / 1e9:.2f} GB, {machine['device_name']}, {machine['cpus']} CPUs, {machine['cpu']}", fontsize=9)
    figure.savefig(file, dpi=120)


def _over_time(axes: Axes, state: str, events: Mapping[str, Any], reached: Mapping[str, Any] | None) -> None:
    total = events["total"] / 1e9
    for stage, label in _STAGES.items():
        curve = events["curves"].get(stage)
        # No curve for the disk if everything is cached.
        if curve and curve[-1][1]:
            axes.plot([t for t, _ in curve], [n / 1e9 for _, n in curve], label=label, drawstyle="steps-post")
    if reached is not None:
        started = events["started"] or 0.0
        needed = total / reached["gb_per_s"]
        axes.plot([started, started + needed], [0, total], "k--", label=f"limit: {reached['name']}, {reached['gb_per_s']:.1f} GB/s")
    axes.set_title(f"rtp-llm, {state}: {events['seconds']:.2f} s")
    axes.set_xlabel("seconds since the call")
    axes.set_ylabel("GB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0, top=total * 1.05)
    axes.legend(fontsize=8)


def _speeds(axes: Axes, state: str, contenders: list[Mapping[str, Any]], reached: Mapping[str, Any] | None) -> None:
    rows = [(c["name"], c["results"][state], c["ours"]) for c in contenders if state in c["results"]][::-1]
    for place, (_, result, ours) in enumerate(rows):
        low, high = (result["bytes"] / 1e9 / seconds for seconds in reversed(result["range"]))
        axes.barh(place, result["gb_per_s"], color="tab:blue" if ours else "tab:gray")
        axes.plot([low, high], [place, place], "k-", linewidth=1)
        axes.annotate(f" {result['gb_per_s']:.2f}", (max(high, result["gb_per_s"]), place), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    if reached is not None:
        axes.axvline(reached["gb_per_s"], color="k", linestyle="--", linewidth=1)
    axes.margins(x=0.12)  # room for the numbers
    axes.set_title(f"{state}: median and range")
    axes.set_xlabel("GB/s")
