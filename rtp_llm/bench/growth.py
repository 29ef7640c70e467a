"""How the time of a load grows: exponents, and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The slope of the least-squares line through the points' logarithms; None for fewer than two."""
    if len(set(xs)) < 2:
        return None
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def steepest(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The largest slope between neighbouring points, on logarithmic axes; None for fewer than two."""
    points = sorted(zip(xs, ys, strict=True))
    slopes = [math.log(d / b) / math.log(c / a) for (a, b), (c, d) in zip(points, points[1:], strict=False) if c > a]
    return max(slopes, default=None)


def growth(label: str, points: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """The points ``(x, measured)`` and their slopes against ``label``: of ``seconds``, of ``phases["transport"]``, and of
    ``processor_seconds``, which depends less on other work on the machine."""
    xs = [x for x, _ in points]
    seconds, moving = [p["seconds"] for _, p in points], [p["phases"]["transport"] for _, p in points]
    return {
        "against": label,
        "exponent": exponent(xs, seconds),
        "steepest": steepest(xs, seconds),
        "exponent_of_processor": exponent(xs, [p["processor_seconds"] for _, p in points]),
        "exponent_of_transport": exponent(xs, moving),
        "points": [{"x": x, **p} for x, p in points],
    }


def draw_growth(file: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Plots the seconds of each result of :func:`growth`, on logarithmic axes, with a linear slope to compare.

    Needs matplotlib; the file's suffix is the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        xs, ys = [p["x"] for p in one["points"]], [p["seconds"] for p in one["points"]]
        axes.loglog(xs, ys, "o-", label="load")
        axes.loglog(xs, [p["phases"]["transport"] for p in one["points"]], "s-", label="of it moving bytes")
        axes.loglog(xs, [ys[0] * x / xs[0] for x in xs], "k--", linewidth=1, label="linear")
        slope = "" if one["exponent"] is None else f", exponent {one['exponent']:.2f}"
        axes.set_title(f"seconds against {one['against']}{slope}")
        axes.set_xlabel(one["against"])
        axes.set_ylim(min(ys) / 3, max(ys) * 3)
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)
