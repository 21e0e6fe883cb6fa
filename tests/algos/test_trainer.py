"""The loop: what is logged and saved when, what a continuation repeats, and how runs stop."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
import torch
from messages import mentions
from random_walk import RandomWalk

from algos.training.loggers import TensorBoardLogger
from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from algos.training.signals import Interrupted, StopSignals
from algos.training.trainer import TrainerSettings, train
from policies.errors import CheckpointError, TrainingError, WorkerError
from policies.storage.policy_folder import load_policy


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create_at(tmp_path / "walk", {"seed": 0})


def rows_without_time(run: RunDirectory) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(run.metrics_path)
    ]


def test_defaults_log_every_iteration_and_save_a_tenth_of_the_run(run: RunDirectory) -> None:
    train(RandomWalk(20), run, progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path)] == list(range(1, 21))
    assert run.checkpoints() == list(range(2, 21, 2))


def test_intervals_count_units_also_when_an_iteration_steps_over_a_multiple(run: RunDirectory) -> None:
    settings = TrainerSettings(log_every=10, checkpoint_every=20)
    train(RandomWalk(50, stride=7), run, settings, progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path)] == [14, 21, 35, 42, 50]
    assert run.checkpoints() == [21, 42, 50]


@pytest.mark.parametrize("rare", ["validation/loss", "refit/loss"])
def test_every_validation_or_refit_is_a_row_whatever_the_interval(run: RunDirectory, rare: str) -> None:
    class Validated(RandomWalk):
        def advance(self) -> dict:
            found = super().advance()
            return found | ({rare: 0.5} if self.progress == 3 else {})

    train(Validated(10), run, TrainerSettings(log_every=4), progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path)] == [3, 4, 8, 10]


def test_last_checkpoint_holds_the_final_weights(run: RunDirectory) -> None:
    walk = RandomWalk(5)
    train(walk, run, TrainerSettings(checkpoint_every=0), progress=False)
    assert run.checkpoints() == [5]
    export_policy = load_policy(run.path / "checkpoints" / "last" / "policy")
    torch.testing.assert_close(
        dict(export_policy.named_parameters()), dict(walk.policy.named_parameters()), rtol=0, atol=0
    )


def test_only_the_newest_checkpoints_are_kept(run: RunDirectory) -> None:
    train(RandomWalk(10), run, TrainerSettings(checkpoint_every=2, keep_checkpoints=2), progress=False)
    assert run.checkpoints() == [8, 10]


@pytest.mark.parametrize("stop_at", [1, 4, 9])
def test_interrupted_run_continues_as_if_it_had_never_stopped(tmp_path: Path, stop_at: int) -> None:
    settings = TrainerSettings(checkpoint_every=4)
    whole = RunDirectory.create_at(tmp_path / "whole", {})
    torch.manual_seed(5)
    straight = RandomWalk(10)
    train(straight, whole, settings, progress=False)

    parts = RunDirectory.create_at(tmp_path / "parts", {})
    torch.manual_seed(5)
    first = RandomWalk(10)
    first.signals[stop_at] = signal.SIGTERM
    with pytest.raises(Interrupted):
        train(first, parts, settings, progress=False)
    assert parts.latest() == stop_at
    torch.manual_seed(99)
    second = RandomWalk(10)
    train(second, parts, settings, progress=False)

    assert torch.equal(second.weights(), straight.weights())
    assert rows_without_time(parts) == rows_without_time(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_lets_the_iteration_finish_then_saves_and_exits(
    run: RunDirectory, number: signal.Signals, code: int
) -> None:
    walk = RandomWalk(10)
    walk.signals[3] = number
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped:
        train(walk, run, TrainerSettings(checkpoint_every=0), progress=False)
    assert stopped.value.code == code
    assert run.checkpoints() == [3]
    assert signal.getsignal(number) is before


def test_a_schedulers_warning_saves_and_then_goes_to_the_scheduler(run: RunDirectory) -> None:
    queued_again: list[int] = []

    def requeue(number: int, _: object) -> None:
        queued_again.append(number)
        raise SystemExit(144)

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        walk = RandomWalk(10)
        walk.signals[3] = signal.SIGUSR2
        with pytest.raises(SystemExit) as ended:
            train(walk, run, TrainerSettings(checkpoint_every=0), progress=False)
        assert ended.value.code == 144 and queued_again == [signal.SIGUSR2]
        assert run.checkpoints() == [3]
        train(RandomWalk(10), run, TrainerSettings(checkpoint_every=0), progress=False)
        assert run.checkpoints() == [3, 10]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_second_signal_stops_at_once_without_a_checkpoint(run: RunDirectory) -> None:
    class Impatient(RandomWalk):
        def advance(self) -> dict:
            if self.progress == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().advance()

    with pytest.raises(KeyboardInterrupt):
        train(Impatient(10), run, TrainerSettings(checkpoint_every=2), progress=False)
    assert run.checkpoints() == [2]


def test_signal_that_also_ends_the_workers_keeps_the_last_checkpoint(run: RunDirectory) -> None:
    class Alone(RandomWalk):
        def advance(self) -> dict:
            if self.progress == 3:
                signal.raise_signal(signal.SIGTERM)
                raise WorkerError("worker 0 was killed by signal 15")
            return super().advance()

    with pytest.raises(Interrupted) as stopped:
        train(Alone(10), run, TrainerSettings(checkpoint_every=2), progress=False)
    assert stopped.value.code == 143
    assert run.checkpoints() == [2]


def test_a_signal_that_an_import_turns_into_an_error_still_stops() -> None:
    with StopSignals() as stop, pytest.raises(Interrupted) as stopped, stop.immediate():
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise ImportError("initialization failed") from None
    assert stopped.value.code == 143
    with StopSignals() as stop, pytest.raises(ImportError), stop.immediate():
        raise ImportError("missing")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_stops_and_leaves_the_last_good_checkpoint(run: RunDirectory, bad: float) -> None:
    walk = RandomWalk(10)
    walk.losses[6] = bad
    with pytest.raises(TrainingError, match=mentions("policy/loss finite 6 env_steps checkpoints/4")):
        train(walk, run, TrainerSettings(checkpoint_every=2), progress=False)
    assert run.checkpoints() == [2, 4]
    assert read_jsonl(run.metrics_path)[-1]["policy/loss"] is None
    assert all(p.isfinite().all() for p in load_policy(run.policy_path()).parameters())


def test_non_finite_weights_are_never_saved(run: RunDirectory) -> None:
    class Spoiled(RandomWalk):
        def advance(self) -> dict:
            metrics = super().advance()
            if self.progress == 4:
                with torch.no_grad():
                    next(self.policy.parameters()).view(-1)[0] = float("nan")
            return metrics

    with pytest.raises(TrainingError, match=mentions("finite")):
        train(Spoiled(10), run, TrainerSettings(checkpoint_every=2), progress=False)
    assert run.checkpoints() == [2]


def test_missing_quantities_do_not_stop_a_run(run: RunDirectory) -> None:
    walk = RandomWalk(3)
    walk.metrics["rollout/success"] = float("nan")
    train(walk, run, progress=False)
    assert [row["rollout/success"] for row in read_jsonl(run.metrics_path)] == [None] * 3


def test_evaluator_sees_the_shipped_policy_after_its_checkpoint(run: RunDirectory) -> None:
    seen: list[tuple[int, int | None]] = []

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        assert not policy.training
        seen.append((step, run.latest()))
        return {"success": 0.5}

    settings = TrainerSettings(checkpoint_every=2, eval_every=4, eval_first=True)
    train(RandomWalk(10), run, settings, evaluator=evaluator, progress=False)
    assert seen == [(0, None), (4, 4), (8, 8), (10, 10)]
    assert [row["step"] for row in read_jsonl(run.metrics_path) if "eval/success" in row] == [0, 4, 8, 10]


def test_signal_breaks_an_evaluation_off_and_resuming_repeats_it(run: RunDirectory) -> None:
    def interrupted(policy: torch.nn.Module, step: int) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the evaluation went on")

    settings = TrainerSettings(checkpoint_every=0, eval_every=4)
    with pytest.raises(Interrupted):
        train(RandomWalk(10), run, settings, evaluator=interrupted, progress=False)
    assert run.checkpoints() == [4]
    train(RandomWalk(10), run, settings, evaluator=lambda policy, step: {"success": 1.0}, progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path) if "eval/success" in row] == [4, 8, 10]


def test_rows_after_the_checkpoint_are_cut_off_on_resume(run: RunDirectory) -> None:
    class Dies(RandomWalk):
        def advance(self) -> dict:
            if self.progress == 7:
                raise OSError("power cut")
            return super().advance()

    with pytest.raises(OSError, match="power cut"):
        train(Dies(10), run, TrainerSettings(checkpoint_every=5), progress=False)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 8, "policy/lo')
    train(RandomWalk(10), run, TrainerSettings(checkpoint_every=5), progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path)] == list(range(1, 11))


def test_run_killed_before_its_first_checkpoint_starts_over(run: RunDirectory) -> None:
    run.log({"policy/loss": 1.0}, 3)
    train(RandomWalk(4), run, progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path)] == [1, 2, 3, 4]


def test_checkpoint_of_another_configuration_is_refused(run: RunDirectory) -> None:
    class Wider(RandomWalk):
        def load_state_dict(self, state: dict) -> None:
            self.policy.load_state_dict({**state["policy"], "more": torch.zeros(1)})

    train(RandomWalk(4), run, progress=False)
    before = run.metrics_path.read_text()
    with pytest.raises(CheckpointError, match=mentions("state_dict 4")):
        train(Wider(4), run, progress=False)
    assert run.metrics_path.read_text() == before


def test_tensorboard_files_hold_the_numbers(run: RunDirectory) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(RandomWalk(3), run, TrainerSettings(loggers=("tensorboard",)), progress=False)
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_tensorboard_hides_what_an_attempt_left_that_was_started_over(
    run: RunDirectory, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    both = tmp_path / "both"
    both.mkdir()
    for second, values in enumerate(((1.0, 2.0, 3.0), (9.0,))):
        writer = TensorBoardLogger(run, first_step=0)
        for step, value in enumerate(values, start=1):
            writer.write({"policy/loss": value}, step)
        writer.close()
        (events,) = (run.path / "tensorboard").iterdir()
        events.rename(both / f"events.out.tfevents.{second:010}")  # read in the order of these seconds
    shown = EventAccumulator(str(both)).Reload().Scalars("policy/loss")
    assert [(event.step, event.value) for event in shown] == [(1, 9.0)]


def test_lines_replace_the_bar_where_there_is_no_terminal(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(RandomWalk(3), run, progress=False)
    assert "walk: 3/3 env steps" in caplog.text
    assert "policy/loss 3" in caplog.text


def test_bar_shows_units_and_key_numbers(
    run: RunDirectory, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    train(RandomWalk(3), run, progress=True)
    shown = capfd.readouterr().err
    assert "3/3 env steps" in shown
    assert "policy/loss 3" in shown


def test_resuming_a_finished_run_says_so_and_changes_nothing(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations: list[int] = []

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        evaluations.append(step)
        return {"success": 1.0}

    train(RandomWalk(10), run, TrainerSettings(eval_every=0), evaluator=evaluator, progress=False)
    before = run.metrics_path.read_bytes()
    caplog.set_level(logging.INFO)
    caplog.clear()
    train(RandomWalk(10), run, TrainerSettings(eval_every=0), evaluator=evaluator, progress=False)
    assert evaluations == [10] and run.metrics_path.read_bytes() == before
    (line,) = caplog.messages
    advice = f"start a new run from its policy: init={run.path}"
    assert line.endswith(f"is already finished: 10 env steps. To go on, {advice}.")
    caplog.clear()
    train(RandomWalk(12), run, progress=False)  # raised: it goes on
    assert run.latest() == 12 and "finished" not in caplog.text


def test_a_finished_run_names_the_key_that_lengthens_it(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    class Lengthened(RandomWalk):
        budget = "algo.laps"

    train(Lengthened(3), run, progress=False)
    caplog.set_level(logging.INFO)
    train(Lengthened(3), run, progress=False)
    assert caplog.messages[-1].endswith("already finished: 3 env steps. To go on, raise algo.laps.")


def test_a_run_that_is_longer_than_asked_for_stays_described_as_it_was(run: RunDirectory) -> None:
    train(RandomWalk(4), run, progress=False)
    train(RandomWalk(2), run, progress=False, amendment=({"seed": 7}, ["seed=7"]))
    assert run.config == {"seed": 0} and run.overrides == []
    train(RandomWalk(6), run, progress=False, amendment=({"seed": 7}, ["seed=7"]))
    assert run.config == {"seed": 7} and run.overrides == ["seed=7"] and run.latest() == 6


def test_a_lengthened_run_keeps_the_evaluation_of_its_former_end(run: RunDirectory) -> None:
    evaluated: list[int] = []

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        evaluated.append(step)
        return {"success": step / 100}

    settings = TrainerSettings(eval_every=4)
    train(RandomWalk(6), run, settings, evaluator=evaluator, progress=False)
    train(RandomWalk(9), run, settings, evaluator=evaluator, progress=False)
    rows = read_jsonl(run.metrics_path)
    assert evaluated == [4, 6, 8, 9]
    assert [row["step"] for row in rows if "eval/success" in row] == evaluated
    assert [row["step"] for row in rows if "policy/loss" in row] == list(range(1, 10))
    times = [row["time/elapsed_s"] for row in rows]
    assert times == sorted(times)


def test_an_evaluation_behind_the_last_checkpoint_survives_a_kill(run: RunDirectory) -> None:
    class Dies(RandomWalk):
        def advance(self) -> dict:
            if self.progress == 5:
                raise OSError("power cut")
            return super().advance()

    evaluated: list[int] = []

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        evaluated.append(step)
        return {"success": 1.0}

    settings = TrainerSettings(checkpoint_every=4, eval_every=4)
    with pytest.raises(OSError, match="power cut"):
        train(Dies(8), run, settings, evaluator=evaluator, progress=False)
    train(RandomWalk(8), run, settings, evaluator=evaluator, progress=False)
    assert evaluated == [4, 8]
    steps = [(row["step"], "eval/success" in row) for row in read_jsonl(run.metrics_path)]
    assert steps == [(1, False), (2, False), (3, False), (4, False), (4, True),
                     (5, False), (6, False), (7, False), (8, False), (8, True)]  # fmt: skip


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 6]), (4, [0, 4, 6])])
def test_the_first_evaluation_is_made_whatever_the_interval(
    run: RunDirectory, every: int, steps: list[int]
) -> None:
    settings = TrainerSettings(eval_every=every, eval_first=True)
    train(RandomWalk(6), run, settings, evaluator=lambda policy, step: {"success": 1.0}, progress=False)
    assert [row["step"] for row in read_jsonl(run.metrics_path) if "eval/success" in row] == steps


@pytest.mark.parametrize(
    ("iteration_s", "evaluation_s", "steps"),
    [
        (100.0, 1.0, [*range(1, 11)]),  # cheap: every tenth
        (100.0, 50.0, [1, 4, 6, 8, 10]),  # 50 s each of 1000 s of training
        (0.5, 95.0, [10]),  # the last alone
    ],
)
def test_evaluations_take_a_fifth_of_the_time_unless_their_steps_are_fixed(
    run: RunDirectory,
    caplog: pytest.LogCaptureFixture,
    iteration_s: float,
    evaluation_s: float,
    steps: list[int],
) -> None:
    now = [0.0]

    class Slow(RandomWalk):
        def advance(self) -> dict:
            now[0] += iteration_s
            return super().advance()

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        now[0] += evaluation_s
        return {"success": 1.0}

    caplog.set_level(logging.INFO)
    train(Slow(10), run, evaluator=evaluator, progress=False, clock=lambda: now[0])
    evaluated = [row["step"] for row in read_jsonl(run.metrics_path) if "eval/success" in row]
    assert evaluated == steps
    assert caplog.text.count("trainer.eval_every=<n> fixes their steps") == int(len(steps) < 10)
    fixed = RunDirectory.create_at(run.path.with_name("fixed"), {"seed": 0}, [])
    train(
        Slow(10), fixed, TrainerSettings(eval_every=2), evaluator=evaluator, progress=False,
        clock=lambda: now[0],
    )  # fmt: skip
    rows = read_jsonl(fixed.metrics_path)
    assert [row["step"] for row in rows if "eval/success" in row] == [2, 4, 6, 8, 10]


def test_a_resumed_run_remembers_the_time_of_its_evaluations(run: RunDirectory) -> None:
    now, evaluated = [0.0], []

    class Slow(RandomWalk):
        def advance(self) -> dict:
            if self.progress == 3 and len(evaluated) == 1:
                raise OSError("power cut")
            now[0] += 100.0
            return super().advance()

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        now[0] += 50.0
        evaluated.append(step)
        return {"success": 1.0}

    with pytest.raises(OSError, match="power cut"):
        train(Slow(10), run, TrainerSettings(checkpoint_every=3), evaluator=evaluator, progress=False,
              clock=lambda: now[0])  # fmt: skip
    assert evaluated == [1]
    evaluated.append(0)
    train(Slow(10), run, TrainerSettings(checkpoint_every=3), evaluator=evaluator, progress=False,
          clock=lambda: now[0])  # fmt: skip
    assert evaluated == [1, 0, 4, 6, 8, 10]


def test_a_resumed_run_goes_on_counting_processor_time(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("algos.training.run_time.cpu_s", lambda: now[0])

    class Slow(RandomWalk):
        def advance(self) -> dict:
            now[0] += 10.0
            return super().advance()

    def evaluator(policy: torch.nn.Module, step: int) -> dict[str, float]:
        now[0] += 3.0
        return {"success": 1.0}

    settings = TrainerSettings(eval_every=2)
    train(Slow(2), run, settings, evaluator=evaluator, progress=False)
    now[0] = 1000.0  # of another process
    train(Slow(4), run, settings, evaluator=evaluator, progress=False)
    rows = read_jsonl(run.metrics_path)
    assert [row["time/cpu_s"] for row in rows] == [10, 20, 23, 33, 43, 46]
    state = run.load_training_state(4)
    assert state["trainer"]["cpu_s"] == 43
    del state["trainer"]["cpu_s"]  # of an earlier version
    monkeypatch.setattr(run, "load_training_state", lambda step: state)
    train(Slow(5), run, progress=False)
    assert read_jsonl(run.metrics_path)[-1]["time/cpu_s"] == 46 + 10


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(run: RunDirectory) -> None:
    train(RandomWalk(10), run, progress=False)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 10, "eval/suc')
    train(RandomWalk(10), run, evaluator=lambda policy, step: {"success": 0.5}, progress=False)
    assert read_jsonl(run.metrics_path)[-1]["eval/success"] == 0.5
