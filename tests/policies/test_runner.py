"""The runner of an exported folder: the policy's numbers, its plans over time, and no PyTorch anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from small_policies import ACTION_DIM, OBS_DIM, small_policy

from policies.execution.history import ChunkActor
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.export.folder import RUNNER, Surroundings
from policies.policy import Policy
from policies.processes import RectifiedFlow, VPDiffusion
from policies.runner import Limits, RateReport, Runner, Track, _typed, check, draw_noise, run_at_rate
from policies.samplers.ddpm import DDPM
from policies.samplers.ode import Euler

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

TO, TH, TA, START = 2, 5, 2, 1
LOW, HIGH = (-0.2, -0.3), (0.25, 0.35)


def policy_of(stochastic: bool) -> Policy:
    parts = (
        (VPDiffusion(num_levels=3, prediction="eps"), DDPM())
        if stochastic
        else (RectifiedFlow(), Euler(steps=2))
    )
    return small_policy(*parts, horizon=TH, act_steps=TA, obs_steps=TO, action_start=START)


@pytest.fixture(scope="module", params=["whole", "step"])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path]:
    """A policy with a history, exported once in each kind of graph."""
    policy, folder = policy_of(request.param == "step"), tmp_path_factory.mktemp("exports") / "made"
    around = Surroundings(task="reach", control_hz=20.0, action_low=LOW, action_high=HIGH)
    export_onnx(policy, folder, graph=request.param, latency_batches=(), surroundings=around)
    return policy, folder


def observations(steps: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((steps, OBS_DIM)).astype(np.float32)


def test_a_closed_loop_is_the_policy_with_its_history_its_chunks_and_the_limits(made: Any) -> None:
    policy, folder = made
    runner, seen = Runner(folder, seed=3), observations(7)
    for step in range(7):
        command = runner.act({"observation": seen[step]})
        if step % TA == 0:
            history = np.stack([seen[max(step - 1, 0)], seen[step]])[None]
            drawn = draw_noise((3, 0, step // TA), (1, *policy.noise_shape))
            chunk = policy.act(history, noise=torch.from_numpy(drawn)).numpy()[0]
        np.testing.assert_allclose(command, np.clip(chunk[step % TA], LOW, HIGH), atol=1e-5)
    assert runner.track.limited > 0 and runner.track.starved == 0


def test_a_bare_array_is_an_observation(made: Any) -> None:
    one, other, seen = Runner(made[1], seed=5), Runner(made[1], seed=5), observations(1)[0]
    np.testing.assert_array_equal(one.act(seen), other.act({"observation": seen}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_observation_that_is_not_finite_is_refused_and_forgotten(made: Any, bad: float) -> None:
    runner, other, seen = Runner(made[1], seed=5), Runner(made[1], seed=5), observations(2)
    broken = seen[1].copy()
    broken[2] = bad
    np.testing.assert_array_equal(runner.act(seen[0]), other.act(seen[0]))
    with pytest.raises(ValueError, match=mentions(f"observation finite {bad} [2]")):
        runner.act(broken)
    np.testing.assert_array_equal(runner.act(seen[1]), other.act(seen[1]))
    assert runner.track.step == other.track.step == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_histories_that_are_not_finite_are_refused_by_every_way_in(made: Any, bad: float) -> None:
    runner, seen = Runner(made[1]), observations(TO)[None].astype(np.float32)
    seen[0, 1, 2] = bad
    for decide in (
        lambda: runner.predict({"observation": seen, "noise": runner.draw_noise(1)}),
        lambda: ExportedPolicy(made[1]).act(seen),
    ):
        with pytest.raises(ValueError, match=mentions(f"observation finite {bad} [0, 1, 2]")):
            decide()


def test_a_robot_that_asks_elsewhere_acts_as_one_that_runs_the_folder_seed_for_seed(made: Any) -> None:
    runner, elsewhere = Runner(made[1], seed=4), Runner(made[1])

    def decide(obs: Any, key: Any) -> np.ndarray:
        noise = draw_noise(key, elsewhere.inputs["noise"]["shape"][1:])
        return elsewhere.predict(
            {name: value[None] for name, value in {**obs, "noise": noise}.items()}
        ).action[0]

    actor = ChunkActor(decide, TO, seed=4, low=LOW, high=HIGH)
    for _ in range(2):
        for seen in observations(5):
            np.testing.assert_array_equal(actor.act({"observation": seen}), runner.act({"observation": seen}))
        actor.reset()
        runner.reset()


def test_a_plan_is_the_whole_chunk_from_its_first_executed_row_on(made: Any) -> None:
    policy, folder = made
    runner = Runner(folder)
    inputs = {"observation": observations(6).reshape(3, TO, OBS_DIM), "noise": runner.draw_noise(3)}
    action, plan = runner.predict(inputs)
    cond = policy.encode({"state": torch.from_numpy(inputs["observation"])})
    chunk = policy.physical(policy.decode(cond, torch.from_numpy(inputs["noise"])))
    assert action.shape == (3, TA, ACTION_DIM) and plan.shape == (3, TH - START, ACTION_DIM)
    np.testing.assert_allclose(plan, chunk.detach().numpy()[:, START:], atol=1e-5)
    np.testing.assert_array_equal(plan[:, :TA], action)


def test_an_episode_is_repeated_by_its_seed_and_by_nothing_else(made: Any) -> None:
    seen = observations(4)

    def play(runner: Runner) -> np.ndarray:
        return np.stack([runner.act({"observation": one}) for one in seen])

    runner = Runner(made[1], seed=1)
    first, second = play(runner), None
    runner.reset()
    second = play(runner)
    runner.reset(seed=1)
    assert np.array_equal(first, play(runner)) and not np.array_equal(first, second)
    quiet = [play(Runner(made[1], seed=seed, is_noisy=False)) for seed in (1, 2)]
    assert np.array_equal(*quiet)


def test_a_decision_that_fails_is_made_at_the_next_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = Runner(made[1], seed=1), observations(2)
    with monkeypatch.context() as failing:
        failing.setattr(runner, "predict", lambda _: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            runner.act({"observation": seen[0]})
    assert runner.track.is_due
    runner.act({"observation": seen[1]})
    assert runner.track.has_plan and not runner.track.is_pending
    other = Runner(made[1], seed=1)
    for one in seen:
        other.see({"observation": one})
    np.testing.assert_array_equal(runner.plan(), (other.plan(), other.plan())[1])


def test_an_evaluation_gets_the_noise_and_the_actions_of_the_policy(made: Any) -> None:
    policy, folder = made
    exported = ExportedPolicy(folder)
    noises = [p.sample_noise(4, generator=torch.Generator().manual_seed(5)) for p in (policy, exported)]
    assert torch.equal(*noises) and exported.chunk == policy.chunk and exported.obs_dim == OBS_DIM
    obs = {"state": torch.from_numpy(observations(4 * TO).reshape(4, TO, OBS_DIM))}
    torch.testing.assert_close(exported.act(obs, noise=noises[0]), policy.act(obs, noise=noises[0]))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for packages that holds numpy and onnxruntime, and nothing else."""
    place = tmp_path_factory.mktemp("bare")
    for package in (np, onnxruntime):
        inside = Path(package.__file__).parent
        for one in (inside, inside.with_name(f"{inside.name}.libs")):
            if one.exists():
                (place / one.name).symlink_to(one)
    return place


BARE = """
import sys
from importlib.util import find_spec
sys.path[:0] = [PLACE, FOLDER]
for name in ("torch", "onnx", "safetensors", "policies", "envs", "algos", "burnish"):
    assert find_spec(name) is None, name
import numpy as np, runner
one = runner.Runner(FOLDER, seed=0)
command = one.act({"observation": np.zeros(WIDTH, np.float32)})
print(runner.check(FOLDER), *[float(x) for x in command])
"""


def test_the_shipped_file_runs_in_an_environment_of_numpy_and_onnxruntime_alone(
    made: Any, bare: Path
) -> None:
    """Nothing is hidden from it: neither PyTorch nor this package is there."""
    policy, folder = made
    script = BARE.replace("PLACE", repr(str(bare))).replace("FOLDER", repr(str(folder)))
    command = [sys.executable, "-I", "-S", "-c", script.replace("WIDTH", str(OBS_DIM))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    difference, *action = map(float, done.stdout.split())
    assert difference < 1e-5
    noise = draw_noise((0, 0, 0), (1, *policy.noise_shape))
    expected = policy.act(torch.zeros(1, TO, OBS_DIM), noise=torch.from_numpy(noise))[0, 0].numpy()
    np.testing.assert_allclose(action, np.clip(expected, LOW, HIGH), atol=1e-5)


def test_the_shipped_file_checks_its_folder_and_finds_a_changed_one(made: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made[1], folder)
    assert check(folder) < 1e-5
    sample = dict(np.load(folder / "sample.npz"))
    np.savez(folder / "sample.npz", **{**sample, "action": sample["action"] + 0.01})
    done = subprocess.run([sys.executable, folder / RUNNER], capture_output=True, text=True)
    assert done.returncode == 1 and "largest difference to the sample: " in done.stdout


@pytest.mark.parametrize(
    ("newest", "message"),
    [
        ({}, "['observation']"),
        ({"observation": np.zeros(OBS_DIM + 1)}, f"observation ({OBS_DIM},)"),
    ],
)
def test_what_does_not_fit_is_refused(made: Any, newest: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=mentions(message)):
        Runner(made[1]).act(newest)
    with pytest.raises(ValueError, match=mentions("signature.json")):
        Runner(tmp_path)
    with pytest.raises(ValueError, match=mentions("['noise', 'observation'] ['noise']")):
        Runner(made[1]).predict({"noise": np.zeros(1)})


def test_images_are_taken_as_bytes_and_never_rounded_to_black() -> None:
    assert _typed("front", np.full((2, 2, 3), 200), "uint8").dtype == np.uint8
    for image in (np.full((2, 2, 3), 0.9), np.full((2, 2, 3), -1), np.full((2, 2, 3), 256)):
        with pytest.raises(ValueError, match=mentions("0 255 bytes")):
            _typed("front", image, "uint8")
    assert _typed("observation", [1, 2], "float32").dtype == np.float32


def test_the_table_of_steps_is_plain_json(made: Any) -> None:
    if (made[1] / "loop.json").exists():
        loop = json.loads((made[1] / "loop.json").read_text(), parse_constant=pytest.fail)
        assert len(loop["rows"]) == 3 and loop["act_steps"] == TA


# -- plans over time ------------------------------------------------------------------------------------


def numbered(plan: int, rows: int = 6) -> np.ndarray:
    """Rows that tell their plan and their place: 10 plan + row."""
    return (10.0 * plan + np.arange(rows))[:, None]


def walk(track: Track, latency: int, steps: int) -> list[float]:
    """Decide whenever it is due; plans arrive `latency` steps later, the first one at once."""
    arrivals: dict[int, np.ndarray] = {}
    out, decisions = [], 0
    for step in range(steps):
        if track.is_due:
            track.begin()
            arrivals[step + (latency if decisions else 0)] = numbered(decisions)
            decisions += 1
        if step in arrivals:
            track.deliver(arrivals.pop(step))
        out.append(float(track.next()[0]))
    return out


def test_without_latency_the_first_rows_of_every_plan_are_executed() -> None:
    assert walk(Track(2), 0, 6) == [0, 1, 10, 11, 20, 21]
    assert walk(Track(2), 0, 6) == walk(Track(2, compensate=False), 0, 6)


def test_a_plan_that_is_shorter_than_what_is_to_be_executed_is_followed_by_the_next() -> None:
    track = Track(5)
    for number in range(3):
        assert track.is_due and track.left == 0
        track.begin()
        track.deliver(numbered(number, rows=2))
        assert [track.left, float(track.next()[0]), float(track.next()[0])] == [
            2,
            10 * number,
            10 * number + 1,
        ]
    assert track.starved == 0


def test_a_late_plan_goes_on_where_time_is_or_begins_at_its_first_row() -> None:
    assert walk(Track(3), 2, 9) == [0, 1, 2, 3, 4, 12, 13, 14, 22]
    assert walk(Track(3, compensate=False), 2, 9) == [0, 1, 2, 3, 4, 10, 11, 12, 20]


def test_a_decision_that_takes_longer_than_the_chunk_delays_the_next_and_a_plan_that_ends_is_held() -> None:
    track = Track(2)
    assert walk(track, 5, 9) == [0, 1, 2, 3, 4, 5, 5, 15, 15]
    assert track.starved == 2


def test_plans_that_speak_of_one_step_are_mixed_with_weights_that_fall_with_age() -> None:
    mixed = walk(Track(2, ensemble=0.5), 0, 4)
    new, old = np.exp(-0.5), 1.0
    assert mixed[:2] == [0, 1]
    assert mixed[2:] == pytest.approx([(old * (2 + k) + new * (10 + k)) / (old + new) for k in (0, 1)])
    assert walk(Track(2, ensemble=0.0), 0, 3)[2] == pytest.approx(6.0)


def test_commands_keep_to_the_box_and_change_by_no_more_than_the_jump() -> None:
    track = Track(6, limits=Limits(np.array([-1.0]), np.array([3.5]), max_jump=2.0))
    track.begin()
    track.deliver(np.array([[0.0], [1.0], [9.0], [9.0], [-9.0], [-9.0]]))
    assert [float(track.next()[0]) for _ in range(6)] == [0.0, 1.0, 3.0, 3.5, 1.5, -0.5]
    assert track.limited == 4


def test_an_action_that_is_not_finite_holds_the_last_command_and_is_counted() -> None:
    """What follows goes on from the command that was held, within its jump."""
    track = Track(6, limits=Limits(np.array([-1.0, -1.0]), np.array([1.0, 1.0]), max_jump=0.5))
    track.begin()
    rows = [[0.1, 0.2], [np.nan, 0.3], [np.inf, 0.3], [0.3, -np.inf], [9.0, 0.3], [0.5, 0.3]]
    track.deliver(np.array(rows))
    got = np.stack([track.next() for _ in rows])
    np.testing.assert_allclose(got, [[0.1, 0.2]] * 4 + [[0.6, 0.3], [0.5, 0.3]])
    assert (track.not_finite, track.limited, track.starved) == (3, 1, 0)
    track.reset()
    assert track.not_finite == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_before_there_is_a_command_to_hold_an_action_that_is_not_finite_is_refused(bad: float) -> None:
    track = Track(1)
    track.begin()
    track.deliver(np.array([[bad]]))
    with pytest.raises(ValueError, match=mentions("finite")):
        track.next()
    assert track.step == 0


class Machine:
    """A robot, a clock and a computer whose decisions take as long as they are told to."""

    def __init__(self, ticks: int, decision_s: float, work_s: float = 0.0, rows: int = 6) -> None:
        self.now, self.sent, self.decisions, self.rows = 0.0, [], 0, rows
        self.ticks, self.decision_s, self.work_s = ticks, decision_s, work_s

    def submit(self, decide: Any, observation: Any) -> Machine._Future:
        before, value = self.now, decide(observation)
        ends, self.now = self.now, before
        return Machine._Future(self, value, ends)

    def send(self, command: np.ndarray) -> bool:
        self.sent.append(float(command[0]))
        self.now += self.work_s
        return len(self.sent) < self.ticks

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def decide(self, observation: Any) -> np.ndarray:
        self.decisions += 1
        self.now += self.decision_s
        return numbered(self.decisions - 1, self.rows)

    class _Future:
        def __init__(self, machine: Machine, value: np.ndarray, at: float) -> None:
            self.machine, self.value, self.at = machine, value, at

        def done(self) -> bool:
            return self.machine.now >= self.at - 1e-9

        def result(self) -> np.ndarray:
            self.machine.now = max(self.machine.now, self.at)
            return self.value

    def run(self, track: Track) -> RateReport:
        parts = {"submit": self.submit, "clock": lambda: self.now, "sleep": self.sleep}
        return run_at_rate(self.decide, lambda: None, self.send, track, hz=10.0, **parts)


def test_a_loop_at_a_rate_executes_what_the_track_says_and_is_never_late_where_it_need_not() -> None:
    machine = Machine(ticks=9, decision_s=0.2)
    report = machine.run(Track(3))
    assert machine.sent == walk(Track(3), 2, 9)
    assert (report.steps, report.late, report.starved) == (9, 0, 0)
    assert report.decision_s == pytest.approx([0.2, 0.2, 0.2])
    assert machine.now == pytest.approx(0.2 + 9 / 10) and "9 steps, 0 late" in str(report)


def test_a_decision_takes_what_it_takes_not_the_ticks_until_its_plan_is_used() -> None:
    machine = Machine(ticks=9, decision_s=0.012)
    report = machine.run(Track(3))
    assert report.decision_s == pytest.approx([0.012] * 3) and "12.0 ms (median)" in str(report)


def test_slow_ticks_are_counted_as_late_and_slow_decisions_as_steps_without_a_plan() -> None:
    assert Machine(ticks=5, decision_s=0.0, work_s=0.13).run(Track(3)).late == 5
    report = Machine(ticks=9, decision_s=0.5).run(Track(2))
    assert report.late == 0 and report.starved == 2


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_costs_a_tick_at_most(jump_s: float) -> None:
    machine, waits = Machine(ticks=9, decision_s=0.0), list[float]()
    sent, slept = machine.send, machine.sleep

    def send(command: np.ndarray) -> bool:
        machine.now += jump_s if len(machine.sent) == 3 else 0.0
        return sent(command)

    machine.send, machine.sleep = send, lambda s: (waits.append(s), slept(s))  # type: ignore[method-assign]
    report = machine.run(Track(3))
    assert report.late == (jump_s > 0)
    assert waits == pytest.approx([0.1] * 3 + [0.1 if jump_s < 0 else 0.0] + [0.1] * 5)


def test_plans_that_are_not_finite_are_reported_as_missed_deadlines_are() -> None:
    machine = Machine(ticks=9, decision_s=0.0)
    sound = machine.decide
    machine.decide = lambda seen: sound(seen) * (np.nan if machine.decisions == 2 else 1.0)  # type: ignore[method-assign]
    report = machine.run(Track(3))
    assert machine.sent == [0, 1, 2, 2, 2, 2, 20, 21, 22]
    assert (report.not_finite, report.late, report.starved) == (3, 0, 0)
    assert "3 without finite numbers" in str(report)


def test_a_plan_that_is_asked_for_after_the_last_row_leaves_gaps_and_a_warning() -> None:
    """Four rows, decisions of one tick: begun one tick before the rows end they leave no gap."""

    def starved(act_steps: int | None) -> int:
        return Machine(ticks=12, decision_s=0.1, rows=4).run(Track(act_steps)).starved

    with pytest.warns(RuntimeWarning, match="after the last row") as found:
        assert starved(4) == starved(None) == 2
    assert [one.category for one in found].count(RuntimeWarning) == 2  # beside what others leave behind
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert starved(3) == 0


def test_a_loop_at_a_rate_decides_on_a_thread_and_passes_its_errors_on() -> None:
    sent: list[float] = []

    def send(command: np.ndarray) -> bool:
        sent.append(float(command[0]))
        return len(sent) < 4

    report = run_at_rate(lambda _: numbered(0, 50), lambda: None, send, Track(1), hz=1000.0)
    assert report.steps == 4 and len(report.decision_s) >= 1 and sent[0] == 0

    def fail(_: Any) -> np.ndarray:
        raise RuntimeError("no such observation")

    with pytest.raises(RuntimeError, match="no such observation"):
        run_at_rate(fail, lambda: None, send, Track(1), hz=1000.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Track(0), "act_steps 1 0"),
        (lambda: Track(1, ensemble=-1.0), "ensemble 0"),
        (lambda: Limits(max_jump=0.0), "max_jump"),
        (lambda: Track(1).next(), "no plan"),
        (lambda: Track(1).deliver(numbered(0)), "no decision begin"),
        (lambda: run_at_rate(lambda _: numbered(0), lambda: None, lambda _: False, Track(1), hz=0.0), "hz 0"),
    ],
)
def test_what_makes_no_sense_over_time_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=mentions(message)):
        make()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[1.0], [1.0, 2.0]], "observation array of numbers"),
        ({"x": 1.0}, "observation array of numbers"),
        (["1.0"] * OBS_DIM, "observation real numbers"),
        (np.full(OBS_DIM, 1j), "observation real numbers complex128"),
        (None, "observation finite"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_name(made: Any, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=mentions(words)):
        Runner(made[1]).act({"observation": value})


def test_decisions_for_a_batch_take_any_numbers_of_one_batch(made: Any) -> None:
    runner, seen = Runner(made[1]), observations(TO)[None]
    noise = runner.draw_noise(1)
    expected = runner.predict({"observation": seen, "noise": noise}).action
    for given in (seen.astype(np.float64), seen.tolist()):
        np.testing.assert_array_equal(runner.predict({"observation": given, "noise": noise}).action, expected)
    with pytest.raises(ValueError, match=mentions("one batch 2 1")):
        runner.predict({"observation": np.repeat(seen, 2, axis=0), "noise": noise})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("signature.json", b"{", "signature.json is no JSON file"),
        ("signature.json", b"[]", "signature.json lacks inputs another version"),
        ("signature.json", None, "made no export of this version"),
        ("graph", b"", "is empty"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_its_file(
    made: Any, tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    folder = Path(shutil.copytree(made[1], tmp_path / "made"))
    if content is None:
        content = json.dumps({**Runner(folder).signature, "format": "torch"}).encode()
    graphs = sorted(path.name for path in folder.glob("*.onnx"))
    (folder / {"graph": graphs[-1]}.get(name, name)).write_bytes(content)
    with pytest.raises(ValueError, match=mentions(words)):
        Runner(folder)


def test_a_damaged_loop_is_refused_by_name(made: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made[1], tmp_path / "made"))
    (folder / "loop.json").write_text("{}")
    if Runner(made[1]).signature["graph"] == "whole":
        assert Runner(folder).signature, "a whole graph has no loop"
    else:
        with pytest.raises(ValueError, match=mentions("loop.json lacks action_scale another version")):
            Runner(folder)
