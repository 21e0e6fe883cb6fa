"""Full pipeline on a MuJoCo task, without external data; run by `make demo`.

Records demonstrations, clones a policy, fine-tunes it with DPPO, evaluates both on the same episodes, and
writes a report with pictures and an exported graph. Nothing is downloaded or pre-recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

ENV = "avoid"
DEMONSTRATIONS = 20  # few, so that the cloned policy is imperfect
EPISODES = 100  # per evaluation
STAGES = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0, or 1 without a clear improvement by fine-tuning.

    Args:
        arguments: Command-line arguments (only --help); None: from `sys.argv`.
    """
    parser = argparse.ArgumentParser(
        prog="burnish-demo",
        description=__doc__,
        epilog="It takes no arguments and a few minutes on two cores, and writes to runs/<date>/<time>-demo.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    from burnish.cli import set_thread_defaults

    set_thread_defaults()
    import burnish
    from algos.training.provenance import describe_environment
    from algos.training.run_directory import new_folder
    from burnish.console import output
    from burnish.runs.locate import dated_folder
    from envs.evaluation.comparison import format_interval

    out, console = new_folder(dated_folder("demo")), output()
    workers = min(2, os.cpu_count() or 1)
    started, seconds = time.perf_counter(), dict[str, float]()

    def stage(title: str, do: Callable[[], T]) -> T:
        begin = time.perf_counter()
        console.rule(f"{len(seconds) + 1}/{STAGES}  {title}")
        result = do()
        seconds[title] = round(time.perf_counter() - begin, 1)
        console.print(f"  {seconds[title]:.0f} s")
        return result

    demos = stage(
        "record demonstrations",
        lambda: burnish.collect(env=ENV, episodes=DEMONSTRATIONS, out=str(out / "demonstrations.hdf5")),
    )
    base = stage(
        "clone a diffusion policy",
        lambda: burnish.clone(demos, "experiment=demo_bc", directory=out / "cloned"),
    )
    tuned = stage(
        "fine-tune it with DPPO",
        lambda: burnish.train(
            "experiment=demo_dppo", init=base, directory=out / "tuned", num_workers=workers
        ),
    )
    result = stage(
        "evaluate before and after on the same episodes",
        lambda: burnish.evaluate(tuned, baseline=base, episodes=EPISODES, num_workers=workers),
    )
    page = stage("draw", lambda: burnish.report(tuned, num_workers=workers))
    exported = stage("export to ONNX", lambda: burnish.export(tuned, out=str(out / "exported")))
    for picture in page.parent.glob("behaviour.*"):
        shutil.copy(picture, out)

    assert result.baseline is not None and result.comparison is not None
    record = {
        "before": result.baseline.values("success").tolist(),
        "after": result.evaluation.values("success").tolist(),
        "onnx_difference": exported.worst, "seconds": seconds, "environment": describe_environment(),
    }  # fmt: skip
    (out / "demo.json").write_text(json.dumps(record) + "\n")
    console.rule("result")
    for name, evaluation in (("before", result.baseline), ("after", result.evaluation)):
        mean, interval = format_interval("success", evaluation.summary()["success"])
        console.print(f"  success {name:<7} {mean}  (95 % interval {interval}, {EPISODES} episodes)")
    console.print(f"  after - before  {result.comparison}")
    console.print(
        f"  ONNX graph equals the policy to {exported.worst:.1e} (tolerance {exported.tolerance:.0e})"
    )
    console.print(f"  look at         {page}, {out}/behaviour.webp, {out}/behaviour.png")
    console.print(f"  run on a robot  {out}/exported (README.md inside)")
    console.print(f"  {time.perf_counter() - started:.0f} s in all")
    return 0 if result.comparison.difference.low > 0 else 1
