"""Curves of arms as pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rl.curves import RunLog, band

COLUMNS = 3


def curves_png(arms: Mapping[str, Sequence[RunLog]], metrics: Sequence[str], axis: str) -> bytes | None:
    """One small chart per metric: every seed thin, the mean thick, lowest to highest seed shaded; None if all is empty.

    Curves are drawn whole; mean and band end with the arm's shortest run.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [m for m in metrics if any(log.against(m, axis) for logs in arms.values() for log in logs)]
    if not drawn:
        return None
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 2.9 * rows), layout="constrained")
    for place, metric in enumerate(drawn, start=1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        for number, (arm, logs) in enumerate(arms.items()):
            color = colormaps["tab10"](number % 10)
            curves = [curve for log in logs if (curve := log.against(metric, axis))]
            for x, values in curves:
                axes.plot(x, values, color=color, alpha=0.35, lw=0.8)
            if curves and (seeds := band(curves)):
                axes.fill_between(seeds.x, seeds.seeds.min(0), seeds.seeds.max(0), color=color, alpha=0.12, lw=0)
                axes.plot(seeds.x, seeds.mean, color=color, lw=2, label=arm)
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel(axis, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if place == 1:
            axes.legend(fontsize=8)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
