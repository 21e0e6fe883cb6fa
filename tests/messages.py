"""What the message of an error has to mention, whatever its wording."""

from __future__ import annotations

import re

_PART = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|[^\s()\[\]]+")


def mentions(parts: str) -> str:
    """Pattern of a text that holds every part, in any order, none of them inside of a longer word or number.

    Parts are separated by spaces: keys, numbers, names, choices. A bracket, such as a shape, is one part.

    >>> bool(re.search(mentions("lr -1"), "algo.lr must be positive; got -1.0."))
    True
    >>> bool(re.search(mentions("lr 1"), "algo.lr must be positive; got 10."))
    False
    """
    return "(?s)" + "".join(f"(?=.*{_whole(part)})" for part in _PART.findall(parts))


def _whole(part: str) -> str:
    before = r"(?<!\w)(?<!\d\.)" if part[0].isalnum() else ""
    after = r"(?:\.0)?(?!\w|\.\d)" if part[-1].isdigit() else r"(?!\w)" if part[-1].isalnum() else ""
    return before + re.escape(part) + after
