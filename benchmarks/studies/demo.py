"""What `make demo` showed, on the page docs/results/demo.md and in README.

python -m benchmarks.studies.demo runs/2026-11-26/10-00-00-demo    keep the record of a demonstration
python -m benchmarks.studies.demo --report                         both texts from what was kept
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies.rows import describe_dataset
from envs.evaluation.intervals import paired_difference

PAGE = "demo"


def kept(folder: Path) -> Path:
    """Keep the record of a demonstration of code without changes; returns its file."""
    content = json.loads((folder / "demo.json").read_text())
    if (commit := str(content["environment"]["commit"])).endswith("-dirty"):
        raise SystemExit(f"the demonstration ran with changes on top of {commit}")
    runs = {"clone": folder / "cloned", "tune": folder / "tuned"}
    content["configuration"] = {name: pages.configuration(RunDirectory(run)) for name, run in runs.items()}
    content["dataset"] = describe_dataset(folder / "demonstrations.hdf5")
    target = pages.RESULTS / PAGE / "demo.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content) + "\n")
    return target


def report() -> Path:
    """Write the page and the block of README."""
    (found,) = pages.kept(PAGE, advice="run make demo first")
    where, seconds = found["environment"], found["seconds"]
    before, after = pages.success(found["before"]), pages.success(found["after"])
    change = paired_difference(found["before"], found["after"])
    value, low, high = (100 * x for x in (change.value, change.low, change.high))
    text = (
        f"One run on {where['cpu_count']} cores of an {pages.processor(where)}, "
        f"{sum(seconds.values()):.0f} s after installation: success {before} before fine-tuning and {after} "
        f"after it, on the same {len(found['after'])} episodes (95 % intervals); paired difference "
        f"{value:+.0f} points ({low:.0f} to {high:.0f}). The ONNX graph equals the policy to "
        f"{found['onnx_difference']:.1e}."
    )
    pages.replace_block("README.md", "demo", textwrap.wrap(text, 125))
    rows = [(what, f"{spent:.0f}") for what, spent in seconds.items()]
    lines = ["# The demonstration", "", f"`make demo`. {text}", "", *pages.table(("part", "seconds"), rows)]
    return pages.write(PAGE, [*lines, "", f"Commit: {pages.commits([found])}.", *pages.origin(PAGE, found)])


def main() -> None:
    """Keep a record, and write the texts."""
    parser = study_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="of a demonstration")
    options = parser.parse_args()
    if options.folder is not None:
        print(f"kept: {kept(options.folder)}")
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
