"""`python -m benchmarks.studies verify`, see `benchmarks.studies.verify`."""

from __future__ import annotations

import sys

from benchmarks.studies import verify

if __name__ == "__main__":
    if sys.argv[1:2] != ["verify"]:
        sys.exit("usage: python -m benchmarks.studies verify [study ...]")
    del sys.argv[1]
    sys.exit(verify.main())
