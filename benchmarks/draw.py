"""What docs/draw.md shows: a policy for `avoid`, and all that its page needs to run it in a browser.

    python -m benchmarks.draw <run>                 the policy, its graphs, and what the page must know
    python -m benchmarks.draw docs/draw/cloned      the same of the policy that is there
    python -m benchmarks.draw picture               site/draw with a drawn line, in docs/pictures
    python -m benchmarks.draw measure               how fast it is, and how near to the line, in docs/results
    python -m benchmarks.draw --report              the page of results from what is there

writes into docs; pictures and measurements need Chromium, and the page that `make site` makes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.chromium import Browser, browser
from benchmarks.studies.lab import (
    LINE,
    MOVES,
    PACE_S,
    between,
    choose,
    click,
    drag,
    scene,
    table,
    watched,
    write_picture,
)
from burnish.lab.controls import START_SEED, Subject
from burnish.lab.session import Session
from burnish.runs.locate import Located, locate
from envs.tasks.avoid.scene import START_SPREAD_M, load_model, load_scene
from envs.tasks.avoid.task import CONTROL_HZ, MAX_SPEED, Avoid
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError
from policies.export.export import export_onnx
from policies.runner import ENCODER, LOOP, STEP
from policies.storage.checksums import CHECKSUMS
from policies.storage.policy_folder import CONFIG, WEIGHTS
from policies.wrappers.sketch_settings import STRATEGIES, SketchSettings

FOLDER = Path("docs/draw")
POLICY, GRAPHS, FACTS = FOLDER / "cloned", FOLDER / "graphs", FOLDER / "graphs" / "facts.json"
PICTURE, PAGE = Path("docs/pictures/draw.webp"), Path("site/draw/index.html")


def write(found: Located) -> None:
    """Write a policy, its graphs and its facts into docs/draw.

    Raises:
        CapabilityError: If the page does not know how to run it; nothing is written then.
    """
    facts(found)
    policy = found.load().eval()
    with tempfile.TemporaryDirectory() as name:
        export_onnx(policy, Path(name) / "graphs", graph="step", latency_batches=())
        for target, source, files in (
            (POLICY, found.path, (CONFIG, WEIGHTS, CHECKSUMS)),
            (GRAPHS, Path(name) / "graphs", (ENCODER, STEP, LOOP)),
        ):
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                (target / file).write_bytes((source / file).read_bytes())
    FACTS.write_text(json.dumps(facts(locate(POLICY)), indent=1) + "\n")


def facts(found: Located) -> dict[str, Any]:
    """Return what docs/draw/session.js has to know beside the graphs.

    Raises:
        CapabilityError: If the page does not know how to run the policy.
    """
    policy: Any = found.load().eval()
    _require_known(policy)
    session = Session(Subject((found,), (policy,), Avoid(), names_task=False))
    told, plane, scene = session.facts(), session.plane, load_scene()
    first = {**session.reset(START_SEED)}
    session.close()
    own = {told["sampler"]: {"steps": policy.table.num_steps, "is_free": False}}
    table, steering = policy.table, SketchSettings()
    return {
        "policy": str(POLICY),
        "first_seed": START_SEED,
        "facts": {**told, "samplers": own},
        "scene": first["scene"],
        "plane": {"pace": plane.pace, "reach": plane.reach},
        "task": {
            "max_speed": MAX_SPEED,
            "substeps": round(1.0 / CONTROL_HZ / load_model().opt.timestep),
            "start_spread": START_SPREAD_M,
            "half_width": scene.half_width,
            "back_y": scene.back_y,
            "finish_y": scene.finish_y,
            "radius": scene.disc_radius,
            "max_episode_steps": Avoid.max_episode_steps,
        },
        "levels": {
            "horizon": policy.chunk.horizon,
            "t": table.times[:-1],
            "alpha": table.alpha,
            "sigma": table.sigma,
        },
        "strategies": {name: one._asdict() for name, one in STRATEGIES.items()},
        "steering": {name: getattr(steering, name) for name in ("limit", "start", "noise_share")},
    }


def _require_known(policy: Any) -> None:
    """Refuse a policy whose loop has more than one number per coefficient, a memory, or no noise."""
    table = policy.table if isinstance(policy, DenoisingPolicy) else None
    is_known = (
        table is not None
        and table.memory is None
        and table.loop is None
        and table.eps_clip is None
        and table.clip_x0 is not None
        and table.recompute
        and not table.is_deterministic
        and table.second_time is None
        and len(table.rows) == table.num_steps
        and policy.chunk.obs_steps == 1
    )
    if not is_known:
        raise CapabilityError(
            "docs/draw/session.js runs denoising policies with a stochastic sampler of one evaluation per "
            "step, a bound on the clean plan, and obs_steps=1."
        )


def opened(tab: Browser, **window: Any) -> None:
    """Open the page, and wait for its first plans."""
    tab.open(PAGE, **window)
    tab.wait("return document.querySelector('#command').textContent.length > 0")


def picture() -> None:
    """Draw a line on the page, compare the starts, and keep what is seen."""
    with browser() as tab:
        opened(tab, width=1040, height=760)
        drag(tab, scene(), between(LINE, MOVES))
        click(tab, "compare")
        tab.wait("return !document.querySelector('#compared').hidden")
        write_picture(tab, PICTURE)


def measure() -> None:
    """Watch the page under every strategy, and write what was seen."""
    plane, found = scene(), {}
    with browser() as tab:
        for strategy in STRATEGIES:
            opened(tab)
            choose(tab, "strategy", strategy)
            found[strategy] = watched(tab, plane)
        complaints = tab.complaints()
    if complaints:
        raise SystemExit(f"the page complains: {complaints}")
    made = json.loads((FOLDER / "package.json").read_text())["dependencies"]
    pages.keep("draw", "page", {"packages": made, "strategies": found}, indent=1)


def page(content: dict[str, Any]) -> list[str]:
    """Return the lines of the page of results."""
    return [
        "# A policy in the browser alone",
        "",
        "`python -m benchmarks.draw measure`: the [page](../draw.md) opened from a file, in Chromium without",
        f"a window. A line of {MOVES} mouse moves, one in {1000 * PACE_S:.0f} ms, is drawn while the policy",
        "acts with 16 plans.",
        "",
        *table(content["strategies"]),
        "",
        f"Measured with {', '.join(map(' '.join, content['packages'].items()))}. All delays",
        "are in `draw/`.",
    ]


def main() -> None:
    """Write the policy of a run, the picture, or the measurements."""
    (what,) = sys.argv[1:]
    if what == "picture":
        picture()
    elif what in ("measure", "--report"):
        if what == "measure":
            measure()
        (found,) = pages.kept("draw")
        pages.write("draw", page(found))
    else:
        write(locate(what))


if __name__ == "__main__":
    main()
