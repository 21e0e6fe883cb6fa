"""Opens hostile files one after another: `python hostile_files.py FOLDER COUNT SEED`; prints figures as JSON.

A process of its own, so that its end is noticed; it writes the number of the file at hand to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from mutations import CANARY, copied, honest_inputs, spoil

from policies.errors import BurnishError

PATIENCE_S = 20
EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn", "socket.connect")
_seen: list[str] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in EXECUTES:
        _seen.append(event)
    if event == "open" and isinstance(args[0], str) and os.path.basename(args[0]) == "canary":
        _seen.append("open canary")


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"it took more than {PATIENCE_S} s")


def main(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Return the figures."""
    os.environ["CANARY"] = CANARY
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    (folder / "honest").mkdir(parents=True)
    inputs = honest_inputs(folder / "honest")
    for name, (path, open_it) in inputs.items():
        open_it(copied(path, folder / "copy"))
        print(f"honest: {name}", file=sys.stderr)
    sys.addaudithook(_audit)
    signal.signal(signal.SIGALRM, _too_long)
    rng, ends, faults, slowest = random.Random(seed), Counter[str](), [], 0.0
    names = sorted(inputs)
    for number in range(count):
        name = names[number % len(names)]
        path, open_it = inputs[name]
        target = copied(path, folder / "copy")
        state = rng.getstate()
        try:
            done = spoil(target, rng)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            rng.setstate(state)  # this change cannot be written: bytes instead
            done = f"unwritten ({type(error).__name__})"
            rng.random()
        print(number, name, done, file=sys.stderr)
        _seen.clear()
        begun = time.monotonic()
        signal.alarm(PATIENCE_S)
        said = ""
        try:
            open_it(target)
            end = "read"
        except BurnishError as error:
            end, said = "refused", str(error)
        except BaseException:
            end, said = "traceback", traceback.format_exc(limit=-4)
        finally:
            signal.alarm(0)
        slowest = max(slowest, time.monotonic() - begun)
        ends[end] += 1
        what = f"{number} {name}: {done}: "
        if end == "traceback":
            faults.append(what + said)
        elif len(said) > 3000 or CANARY in said:
            faults.append(what + said[:3000])
        elif _seen:
            faults.append(what + ", ".join(_seen))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "files": count, **ends, "slowest_s": round(slowest, 2), "peak_mb": round(peak), "faults": faults
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
