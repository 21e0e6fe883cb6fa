"""The laboratory in a browser: frames per second, and the time from the mouse to a new plan.

    python -m benchmarks.studies.lab policy=runs/base                       two minutes on two idle cores
    python -m benchmarks.studies.lab policy=runs/base --picture lab.webp    and a picture of the page
    python -m benchmarks.studies.lab --report                               the page from what is there

`burnish lab` runs in a process of its own and Chromium without a window beside it. The policy is one of
`avoid`; for docs/results it is cloned by `experiment=avoid_steering_bc`. Under every strategy a line is drawn
with simulated moves of the mouse while the policy acts, then 20 starts are played. Numbers go to
docs/results/lab/run.json; the page docs/results/lab.md is made of them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.chromium import Browser, browser
from benchmarks.options import study_parser
from envs.tasks.avoid.task import Avoid
from envs.tasks.plane import Place, Plane
from policies.wrappers.sketch_settings import STRATEGIES

LINE = [(-0.04, 0.03), (-0.06, 0.14), (0.0, 0.27), (0.06, 0.4), (0.0, 0.53), (0.0, 0.62)]
"""Through the gaps of `avoid`; it begins beside the disc, which would be dragged."""
MOVES = 40  # of the mouse, along the line
PACE_S = 0.05  # between two of them
WATCHED_S = 6.0  # of play, for the frame rate


@contextmanager
def laboratory(policy: str) -> Iterator[str]:
    """Run `burnish lab` meanwhile; yields the address of its page."""
    command = [sys.executable, "-m", "burnish", "lab", f"policy={policy}", "runs=null"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("laboratory: ").strip()
            if not address:
                raise SystemExit("burnish lab has not started")
            yield address
        finally:
            process.terminate()


def opened(tab: Browser, address: str, **window: Any) -> None:
    """Open the page, and wait for its first plans."""
    tab.open(address, **window)
    tab.wait("return document.querySelector('#python').textContent.length > 0")


def choose(tab: Browser, name: str, value: str) -> None:
    """Set a control, as a hand does."""
    script = f"const c = document.querySelector('#{name}'); c.value = '{value}';"
    tab.run(f"{script} for (const kind of ['input', 'change']) c.dispatchEvent(new Event(kind));")


def click(tab: Browser, name: str) -> None:
    """Press a button."""
    tab.run(f"document.querySelector('#{name}').click()")


def drag(tab: Browser, plane: Plane, places: Sequence[Place], *, pace_s: float = 0.0) -> None:
    """Press the mouse at the first place [m], move it to the others, and release it."""
    script = "const b = document.querySelector('#scene').getBoundingClientRect();"
    left, top, width, height = tab.run(f"{script} return [b.left, b.top, b.width, b.height]")

    def pixel(place: Place) -> tuple[float, float]:
        share = (np.array(place) - plane.low) / (np.array(plane.high) - plane.low)
        return left + share[0] * width, top + (1 - share[1]) * height

    tab.mouse("press", *pixel(places[0]))
    for place in places[1:]:
        time.sleep(pace_s)
        tab.mouse("move", *pixel(place))
    tab.mouse("release", *pixel(places[-1]))


def scene() -> Plane:
    """Return `avoid` from above, where its rows do not move."""
    stepper = Avoid().stepper(1)
    stepper.reset(0, 0)
    return stepper.plane(0)


def between(places: Sequence[Place], moves: int) -> list[Place]:
    """Return points of a polyline, the given number of them after the first."""
    corners = np.array(places)
    along = np.concatenate([[0.0], np.cumsum([np.hypot(*(b - a)) for a, b in pairwise(corners)])])
    at = np.linspace(0.0, along[-1], moves + 1)
    x, y = (np.interp(at, along, corners[:, axis]) for axis in (0, 1))
    return list(zip(x.tolist(), y.tolist(), strict=True))


def measure(policy: str, picture: Path | None) -> dict[str, Any]:
    """Return the measurements by strategy."""
    plane, found = scene(), {}
    with laboratory(policy) as address, browser() as tab:
        for strategy in ("off", *STRATEGIES):
            opened(tab, address)
            choose(tab, "strategy", strategy)
            found[strategy] = one = watched(tab, plane)
            print(strategy, {name: value for name, value in one.items() if name != "delays_ms"})
            if picture is not None and strategy == "guided_diffusion":
                write_picture(tab, picture)
        complaints = tab.complaints()
    if complaints:
        raise SystemExit(f"the page complains: {complaints}")
    return {"policy": Path(policy).name, "strategies": found}


def watched(tab: Browser, plane: Plane) -> dict[str, Any]:
    """Draw a line while the policy acts, watch it, and compare starts."""
    click(tab, "play")
    drag(tab, plane, between(LINE, MOVES), pace_s=PACE_S)
    delays = tab.wait("return document.querySelector('#scene').dataset.delays").split()
    rates, end = [], time.monotonic() + WATCHED_S
    while time.monotonic() < end:
        time.sleep(0.25)
        if shown := tab.run("return document.querySelector('#rate').textContent"):
            rates.append(float(shown.split()[0]))
    click(tab, "play")
    click(tab, "compare")
    tab.wait("return !document.querySelector('#compared').hidden")
    rows = tab.run(
        "return [...document.querySelector('#compared').rows].slice(1).map("
        "(row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return {
        "frames_per_s": float(np.median(rates)),
        "delays_ms": [float(delay) for delay in delays],
        "starts": {"plain" if name.endswith("alone") else "steered": cells for name, *cells in rows},
    }


def write_picture(tab: Browser, path: Path) -> None:
    """Write what is seen, as WebP."""
    from PIL import Image

    tab.run("scrollTo(0, 0)")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(tab.picture())).convert("RGB").save(path, format="WEBP", quality=80)


def table(strategies: dict[str, Any]) -> list[str]:
    """Return the lines of a table of what was watched, by strategy."""
    rows = []
    for name, one in strategies.items():
        median, late = (f"{value:.0f}" for value in np.percentile(one["delays_ms"], (50, 90)))
        success, off = one["starts"].get("steered", one["starts"]["plain"])
        rows.append([name, f"{one['frames_per_s']:.1f}", median, late, success, off])
    columns = ("strategy", "frames/s", "mouse to plan, median [ms]", "90th percentile [ms]")
    plain = strategies["guided_diffusion"]["starts"]["plain"]
    return [
        *pages.table((*columns, "success of 20 starts", "off the line"), rows),
        "",
        f"The policy alone: success {plain[0]}, {plain[1]} off the line.",
    ]


def page(content: dict[str, Any]) -> list[str]:
    """Return the lines of the page."""
    return [
        "# The laboratory in a browser",
        "",
        f"`burnish lab` with {content['policy']} on `avoid`, in Chromium without a window. A line of",
        f"{MOVES} mouse moves, one in {1000 * PACE_S:.0f} ms, is drawn while the policy acts with 16 plans.",
        "",
        *table(content["strategies"]),
        *pages.origin("lab", content),
    ]


def main() -> None:
    """Measure, and write the page."""
    parser = study_parser(__doc__)
    parser.add_argument("policy", nargs="?", help="policy=<run or policy directory>")
    parser.add_argument("--picture", type=Path, help="where to write a picture of the page, as WebP")
    options = parser.parse_args()
    if not options.report:
        key, _, policy = (options.policy or "").partition("=")
        if key != "policy" or not policy:
            parser.error("give policy=<run or policy directory>")
        pages.keep("lab", "run", measure(policy, options.picture), indent=1)
    (found,) = pages.kept("lab", advice="measure first")
    print(f"written: {pages.write('lab', page(found))}")


if __name__ == "__main__":
    main()
