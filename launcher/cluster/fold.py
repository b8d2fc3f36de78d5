"""Write many host names as one short expression, the reverse of `nodeset.expand`; join equal findings of many hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.base.errors import Diagnostic

_DIGITS = re.compile(r"(\d+)")


def fold(names: Sequence[str]) -> str:
    """Return `node[01-03],gpu-a` for node01, node02, node03 and gpu-a; groups stand in the order they appear.

    One number of a name is folded, the one that gives the fewest groups; a name's padding is kept.
    """
    pieces = {name: [name] if ":" in name else _DIGITS.split(name) for name in names}
    # Digits stand at odd positions, counted here from the end: -2 is the last number of a name.
    deepest = max((len(parts) for parts in pieces.values()), default=0)
    groupings = [_group(pieces, -position) for position in range(2, max(deepest, 2) + 1, 2)]
    best = min(groupings, key=len)
    return ",".join(_write(key, numbers) for key, numbers in best.items())


def fold_findings(findings: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return `findings` with those that say the same of several hosts made one; they stand where the first of them did.

    `where` of each must be the name of a host.
    """
    alike: dict[tuple[str, str | None], list[Diagnostic]] = {}
    for finding in findings:
        alike.setdefault(finding.shared or (finding.message, finding.hint), []).append(finding)
    return [
        members[0]
        if len(members) == 1
        else Diagnostic(message, fold([member.where for member in members if member.where]) or None, hint)
        for (message, hint), members in alike.items()
    ]


def _group(pieces: dict[str, list[str]], position: int) -> dict[tuple[str, str, bool], list[str]]:
    """Return (what stands before, what stands behind, is there a number) -> the numbers, in the order of the names."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, parts in pieces.items():
        if len(parts) < -position:
            groups[name, "", False] = []
            continue
        key = "".join(parts[:position]), "".join(parts[position:][1:]), True
        groups.setdefault(key, []).append(parts[position])
    return groups


def _write(key: tuple[str, str, bool], numbers: list[str]) -> str:
    if not numbers:
        return key[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text), len(text))):
        if runs and _follows(runs[-1][-1], number):
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    body = texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"
    return key[0] + body + key[1]


def _follows(first: str, second: str) -> bool:
    is_padded = first.startswith("0") or second.startswith("0")
    return int(second) == int(first) + 1 and (len(first) == len(second) or (not is_padded or first == "0"))
