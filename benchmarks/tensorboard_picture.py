"""A picture of a run in TensorBoard, by headless Chromium: what README shows.

    python benchmarks/tensorboard_picture.py runs/ppo-seed0 docs/tensorboard.png
    python benchmarks/tensorboard_picture.py runs/ppo-seed0 docs/samples.png --view text
    python benchmarks/tensorboard_picture.py runs/compare-ppo-grpo/overlay docs/overlay.png --view custom_scalars
    python benchmarks/tensorboard_picture.py runs/ppo-seed0 docs/values.png --image samples/values

The last takes a picture that the run logged, as it is. The others need Debian's `chromium` (or another Chromium on
PATH) and the package `playwright`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--no-sandbox",  # root in a container has no other way
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Without these it calls home at every start, which a closed network answers by refusing.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """Where Chromium is; Playwright's own download is not needed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """A TensorBoard of that directory on a free port; yields its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    # Its notices go to a file: a pipe that nobody empties would stop it.
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stderr=said, stdout=said) as server:
        try:
            yield _address(server, said)
        finally:
            server.terminate()


def _address(server: subprocess.Popen[bytes], said: Any) -> str:
    for _ in range(300):
        said.seek(0)
        text = said.read()
        if found := re.search(r"http://127\.0\.0\.1:\d+/", text):
            return found[0]
        try:
            server.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
        break
    raise RuntimeError(f"tensorboard did not start: {text}")


@contextmanager
def page(address: str) -> Iterator[Any]:
    """A page of headless Chromium at that address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(FLAGS))
        try:
            opened = browser.new_page(viewport={"width": 1400, "height": 900})
            opened.goto(address)
            yield opened
        finally:
            browser.close()


def filter_tags(opened: Any, expression: str) -> None:
    """Show only the cards whose tag matches."""
    box = opened.locator("input[placeholder^='Filter tags']")
    box.fill(expression, timeout=60_000)
    box.press("Escape")  # its list of suggestions would cover the curves


def curve(opened: Any, tag: str) -> Any:
    """The card of a scalar in the Time Series view, once its chart is drawn."""
    filter_tags(opened, f"^{re.escape(tag)}$")
    card = opened.locator(f'scalar-card:has(tb-truncated-path[title="{tag}"])').first
    card.locator(".series-view canvas, .series-view path").first.wait_for(timeout=60_000)
    opened.wait_for_timeout(2_000)  # the line is drawn by a worker that tells nobody
    return card


def logged(run: Path, tag: str) -> bytes:
    """The newest picture of that tag in a run's event files, as PNG. Raises KeyError."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events.Images(tag)[-1].encoded_image_string


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--tag", default="", help="only tags that match this expression")
    parser.add_argument("--view", default="timeseries", help="timeseries, text, images, custom_scalars or hparams")
    parser.add_argument("--image", help="the newest logged picture of this tag, without a browser")
    options = parser.parse_args()
    if options.image:
        options.picture.write_bytes(logged(options.run, options.image))
        return
    with tensorboard(options.run) as address, page(f"{address}#{options.view}") as opened:
        if options.view != "timeseries":
            opened.wait_for_timeout(15_000)  # each view has elements of its own, and none that says it is done
            opened.screenshot(path=str(options.picture))
            return
        opened.locator("scalar-card").first.wait_for(timeout=60_000)
        # The settings' side bar takes the place of a column of curves.
        opened.get_by_role("button", name="Settings").last.click()
        if options.tag:
            filter_tags(opened, options.tag)
        opened.wait_for_timeout(5_000)
        opened.screenshot(path=str(options.picture))


if __name__ == "__main__":
    main()
