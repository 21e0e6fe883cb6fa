"""A fleet that learns after deployment: four simulated robots on `avoid`, with kills and a cut connection.

    python -m benchmarks.fleet_learns [--minutes 6] [--folder DIRECTORY]
    python -m benchmarks.fleet_learns --report      the page from what is there

needs the extra `serve`. It records demonstrations and clones them, unless the folder has the clone; starts
`burnish fleet learn` and four `burnish fleet act`; kills one robot and, later, the learner by SIGKILL and
starts them again, and cuts another robot's connection for a while. At the end every robot sends what is left
in its spool, and the first and the last version are evaluated on the same episodes. It writes
docs/results/fleet_learns.md, its picture, and docs/results/scale/fleet_learns.json.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import burnish
from algos.cloning.fleet_run import EPISODES, summary
from benchmarks.options import study_parser
from benchmarks.pages import RESULTS, keep, origin, record, success, table, write
from burnish.reports.figures import new_figure
from policies.serving.fleet import EpisodeFiles, FleetTask

PAGE, PICTURE = "fleet_learns", RESULTS / "fleet_learns.png"
TASK = FleetTask("env=avoid", obs_dim=4, action_dim=2, max_steps=100)
ROBOTS = ("arm1", "arm2", "arm3", "arm4")
KILLED, CUT = "arm2", "arm4"
PLAN = {
    **{f"{KILLED} killed": 0.2, f"{KILLED} again": 0.27, f"{CUT} cut off": 0.4, "learner killed": 0.5},
    **{"learner again": 0.55, f"{CUT} joined": 0.65},
}
"""When something happens, as fractions of the time."""
CLONING = {"algo.steps": 5000, "algo.batch_size": 128, "algo.lr": 2e-3, "backbone.width": 256}
DEMONSTRATIONS, EVALUATED, WINDOW = 20, 100, 60


class Cable:
    """A connection to the learner that can be cut: bytes in both directions, as they come."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self._is_cut = target, False
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Drop all connections, and refuse new ones until `join`."""
        self._is_cut = True
        pairs, self._pairs = self._pairs, []
        for one in pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        self._is_cut = False

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                if self._is_cut:
                    raise OSError
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._pairs += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class Fleet:
    """The programs of the demonstration.

    Args:
        folder: Where they write.
        policy: The clone.
        dataset: Its demonstrations.
    """

    def __init__(self, folder: Path, policy: Path, dataset: Path) -> None:
        self.folder, self._given = folder, (policy, dataset)
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self.events: list[tuple[float, str]] = []
        self.started = time.time()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.cable = Cable(("127.0.0.1", self.port))

    def start(self, name: str, *words: str) -> None:
        """Start a program under a name; its log is a file."""
        with (self.folder / f"{name}.log").open("a") as log:
            command = [sys.executable, "-m", "burnish", "fleet", *words]
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def start_learner(self) -> None:
        policy, dataset = self._given
        listen = f"listen=tcp://127.0.0.1:{self.port}"
        out = f"out={self.folder / 'learner'}"
        given = (f"policy={policy}", f"dataset={dataset}", "lr=3e-4", "batch_size=128")
        self.start("learner", "learn", *given, listen, out)

    def start_robot(self, name: str, *words: str) -> None:
        address = self.cable.address if name == CUT else f"tcp://127.0.0.1:{self.port}"
        own = (f"name={name}", f"out={self.folder / name}", f"address={address}")
        self.start(name, "act", "env=avoid", *own, *words)

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def stop(self, *names: str) -> None:
        """End programs as their user does."""
        for name in names:
            self.running[name].send_signal(signal.SIGTERM)
        for name in names:
            self.running[name].wait()

    def note(self, what: str) -> None:
        self.events.append((time.time() - self.started, what))

    def spooled(self) -> dict[str, list[int]]:
        """Return the numbers of the episodes that robots still keep."""
        return {name: sorted(int(p.stem) for p in (self.folder / name).glob("*.msgpack")) for name in ROBOTS}


def cloned(folder: Path) -> tuple[Path, Path]:
    """Return policy and demonstrations, made unless they are there."""
    policy, dataset = folder / "clone", folder / "demonstrations.hdf5"
    if not dataset.exists():
        burnish.collect(env="avoid", episodes=DEMONSTRATIONS, out=str(dataset))
    if not policy.exists():
        values = {**CLONING, "algo.validation_fraction": 0.0, "trainer.eval_every": 0}
        burnish.train(algo="bc", env="avoid", dataset=str(dataset), directory=str(policy), **values)
    return policy, dataset


def play(fleet: Fleet, seconds: float) -> None:
    """Let robots act and the learner learn, with what happens to them."""
    steps = {
        f"{KILLED} killed": lambda: fleet.kill(KILLED),
        f"{KILLED} again": lambda: fleet.start_robot(KILLED),
        f"{CUT} cut off": fleet.cable.cut,
        "learner killed": lambda: fleet.kill("learner"),
        "learner again": fleet.start_learner,
        f"{CUT} joined": fleet.cable.join,
    }
    fleet.start_learner()
    for name in ROBOTS:
        fleet.start_robot(name)
    fleet.started = time.time()
    for what, share in PLAN.items():
        time.sleep(max(0.0, fleet.started + share * seconds - time.time()))
        fleet.note(what)
        steps[what]()
    time.sleep(max(0.0, fleet.started + seconds - time.time()))
    fleet.stop(*ROBOTS)
    left = fleet.spooled()
    for name in ROBOTS:  # an end that is past already: only what is left is sent
        fleet.start_robot(name, "episodes=1")
    for name in ROBOTS:
        fleet.running[name].wait()
    fleet.stop("learner")
    fleet.note(f"end, {sum(map(len, left.values()))} episodes in spools")


def measured(fleet: Fleet, seconds: float) -> dict[str, Any]:
    """Return the episodes, what is missing of them, and the evaluation of the first and the last version."""
    learner = fleet.folder / "learner"
    episodes = EpisodeFiles(learner / EPISODES, TASK).read()
    numbers = {name: sorted(one.number for one in episodes if one.robot == name) for name in ROBOTS}
    missing = {
        name: sorted(set(range(int((fleet.folder / name / "acknowledged").read_text()) + 1)) - set(found))
        for name, found in numbers.items()
    }
    versions = sorted(int(path.name) for path in (learner / "checkpoints").iterdir() if path.name.isdecimal())
    first, last = (learner / "checkpoints" / str(one) / "policy" for one in (versions[0], versions[-1]))
    out = str(fleet.folder / "eval.json")
    result = burnish.evaluate(last, baseline=str(first), episodes=EVALUATED, out=out)
    assert result.baseline is not None
    rows = [
        {
            **{"robot": one.robot, "number": one.number, "version": one.version},
            **{"t": one.time - fleet.started, "success": one.success, "watched": one.watched},
            "corrected": float(one.corrected.mean()),
        }
        for one in episodes
    ]
    return {
        **{"seconds": seconds, "load": os.getloadavg()[0], "events": fleet.events, "versions": versions},
        **{"missing": missing, "left": fleet.spooled(), "episodes": rows, "summary": summary(episodes)},
        "first": [row.success for row in result.baseline.rows],
        "last": [row.success for row in result.evaluation.rows],
    }


def moving(rows: Sequence[dict[str, Any]], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return times [s] and moving averages of the success of episodes without help."""
    alone = [row for row in rows if not row["watched"]]
    if len(alone) < window:
        return np.zeros(0), np.zeros(0)
    values = np.convolve([row["success"] for row in alone], np.ones(window) / window, mode="valid")
    return np.array([row["t"] for row in alone])[window - 1 :], values


def draw(found: dict[str, Any]) -> None:
    """Draw success over time, and the version that every robot acts with."""
    figure = new_figure(8, 5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rows = found["episodes"]
    for name in ROBOTS:
        own = [row for row in rows if row["robot"] == name]
        label = f"{name} ({WINDOW // 3} episodes)"
        above.plot(*moving(own, WINDOW // 4), linewidth=0.8, alpha=0.6, label=label)
        below.step([row["t"] for row in own], [row["version"] for row in own], where="post", linewidth=1)
    label = f"all ({WINDOW} episodes)"
    above.plot(*moving(rows, WINDOW), color="black", linewidth=2, label=label)
    for at, what in found["events"]:
        for axes in (above, below):
            axes.axvline(at, color="grey", linewidth=0.8, linestyle=":")
        text = {"rotation": 35, "fontsize": 7, "transform": above.get_xaxis_transform()}
        above.text(at, 1.02, what.partition(",")[0], **text)
    above.set(ylim=(0, 1), ylabel="success without help")
    below.set(xlabel="time [s]", ylabel="version [gradient steps]")
    above.legend(fontsize=7, loc="lower right")
    figure.savefig(PICTURE, dpi=110)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Return the text of the page."""
    rows, lost = found["episodes"], sum(map(len, found["missing"].values()))
    corrected = [row["corrected"] for row in rows if row["watched"]]
    yield "# A fleet that learns"
    yield ""
    yield (
        f"`python -m benchmarks.fleet_learns --minutes {found['seconds'] / 60:g}`, "
        f"{found['environment']['cpu_count']} cores, load {found['load']:.1f}. Four simulated robots act on "
        f"`avoid` with a clone of {DEMONSTRATIONS} "
        "demonstrations; what they do is described in [scale](../scale.md#a-fleet-that-learns)."
    )
    yield ""
    yield "![success over time](fleet_learns.png)"
    yield ""
    yield (
        f"Success of the first version: **{success(found['first'])}**, of the last one, "
        f"{found['versions'][-1]} gradient steps later: **{success(found['last'])}**, on the same "
        f"{len(found['first'])} episodes, intervals of 95 %."
    )
    yield ""
    alone = [row["success"] for row in rows if not row["watched"]]
    half = len(alone) // 2
    yield (
        "Success of the episodes in which nobody could help, while the fleet learned: "
        f"{success(alone[:half])} in the first half, {success(alone[half:])} in the second."
    )
    yield ""
    yield (
        f"{len(rows)} episodes arrived; of the numbers that robots gave, **{lost}** are missing, although "
        f"{KILLED} and the learner were killed and {CUT} was cut off. The expert acted in "
        f"{100 * np.mean(corrected):.0f} % of the steps of the {len(corrected)} episodes that it watched."
    )
    yield ""
    per_robot = [[f"`{name}`", count] for name, count in found["summary"]["robots"].items()]
    yield from table(("robot", "episodes"), per_robot)
    yield ""
    happened = [[f"{at:.0f} s", what] for at, what in found["events"]]
    yield from table(("time", "what happened"), happened)


def played(kept: Path | None, seconds: float) -> dict[str, Any]:
    """Let the fleet learn, and return what was measured; `kept` is where its clone is kept."""
    with contextlib.ExitStack() as held:
        folder = kept or Path(held.enter_context(tempfile.TemporaryDirectory()))
        given = cloned(folder)
        place = folder / "fleet"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        fleet = Fleet(place, *given)
        try:
            play(fleet, seconds)
        finally:
            for process in fleet.running.values():
                process.kill()
        return measured(fleet, seconds)


def main() -> None:
    """Measure and keep, unless only the page is asked for; draw, write."""
    asked = study_parser(__doc__)
    asked.add_argument("--minutes", type=float, default=6.0)
    asked.add_argument("--folder", type=Path, help="where the clone is kept; default: a temporary folder")
    options = asked.parse_args()
    if not options.report:
        keep("scale", PAGE, played(options.folder, 60 * options.minutes))
    found = record("scale", PAGE)
    draw(found)
    write(PAGE, [*lines(found), *origin("scale", found)])


if __name__ == "__main__":
    main()
