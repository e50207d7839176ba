"""What a user sees: a run in TensorBoard, in a browser, with its reward curve."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import matplotlib.image
import numpy as np
import pytest

from rl.config import Config
from rl.telemetry import Telemetry
from rl.trajectory import Trajectory

ROOT = Path(__file__).parents[1]


def picture() -> ModuleType:
    """`benchmarks/tensorboard_picture.py`, which drives the browser."""
    spec = importlib.util.spec_from_file_location("tensorboard_picture", ROOT / "benchmarks/tensorboard_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = picture()
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="no playwright: `pip install playwright` enables this"
    ),
    pytest.mark.skipif(
        browser.chromium() is None, reason="no Chromium: `sudo apt-get install -y chromium` enables this"
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose reward rises from .25 to .75 in ten steps."""
    directory = tmp_path_factory.mktemp("runs") / "rising"
    telemetry = Telemetry.open(directory, Config())
    ids = np.arange(3, dtype=np.int32)
    sampled = Trajectory(
        0, 0, ids, ids, ids >= 0, np.zeros(3, np.float32), "stop", 0, "1 + 1 =", "two | 寿司", "", "2", score=0.5,
        values=np.array([0.125, 0.25, 0.75, 0], np.float32),
    )  # fmt: skip
    for step in range(11):
        telemetry.log(step, [sampled], {"reward/mean": 0.25 + step / 20})
    telemetry.close()
    return directory


def coloured(png: bytes) -> np.ndarray:
    """[height, width]: where a picture is neither white nor grey, which axes and grid are."""
    pixels = matplotlib.image.imread(io.BytesIO(png))[..., :3]
    return pixels.max(-1) - pixels.min(-1) > 0.1


def test_the_reward_curve_is_drawn_and_rises(run: Path) -> None:
    with browser.tensorboard(run) as address, browser.page(address + "#timeseries") as page:
        card = browser.curve(page, "reward/mean")
        drawn = coloured(card.locator(".series-view").first.screenshot())
        columns = np.flatnonzero(drawn.any(0))
        assert columns[-1] - columns[0] > 0.7 * drawn.shape[1], "no line across the chart"
        height = [-np.flatnonzero(drawn[:, c]).mean() for c in columns]
        left, middle, right = (np.mean(part) for part in np.array_split(height, 3))
        assert left < middle < right


def test_samples_are_a_table_and_hyperparameters_are_there(run: Path) -> None:
    with browser.tensorboard(run) as address, browser.page(address + "#text") as page:
        cell = page.locator("td", has_text="two | 寿司").first
        cell.wait_for(timeout=60_000)
        for text in ("█", "0.75"):  # the critic's values, token by token
            page.locator("td", has_text=text).first.wait_for(timeout=60_000)
        page.goto(address + "#hparams")
        page.reload()
        page.get_by_text("policy.optimizer.lr").first.wait_for(timeout=60_000)
