"""`python -m lerobot_policy_burnish <source> <folder>`: write what `--policy.path` takes."""

from __future__ import annotations

import argparse

from lerobot_policy_burnish import prepare


def main() -> None:
    """Parse the arguments and write the folder."""
    parser = argparse.ArgumentParser(prog="python -m lerobot_policy_burnish")
    parser.add_argument("source", help="policy directory, run, exported folder, or tcp://<host>:<port>")
    parser.add_argument("out", help="folder to write, for --policy.path")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument(
        "--timeout-s", type=float, default=1.0, help="time that a server has for an answer [s]"
    )
    given = parser.parse_args()
    prepare(given.source, given.out, seed=given.seed, timeout_s=given.timeout_s)


if __name__ == "__main__":
    main()
