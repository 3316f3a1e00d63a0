#!/usr/bin/env python3
"""lint.py CHECK...: checks the tree's structure; each problem says what to do. CHECK: layers, fences,
sizes, bans, documented, field_cases, operations, or all."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bans  # noqa: E402
import documented  # noqa: E402
import fences  # noqa: E402
import field_cases  # noqa: E402
import layers  # noqa: E402
import operations  # noqa: E402
import sizes  # noqa: E402
from tree import Tree  # noqa: E402

CHECKS = {"layers": layers, "fences": fences, "sizes": sizes, "bans": bans,
          "documented": documented, "field_cases": field_cases, "operations": operations}


def main(names):
    if not names or any(n not in CHECKS and n != "all" for n in names):
        print(__doc__, file=sys.stderr)
        return 2
    if "all" in names:
        names = list(CHECKS)
    tree = Tree(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    problems = [p for name in names for p in CHECKS[name].check(tree)]
    for problem in problems:
        print(problem)
    print(f"lint {' '.join(names)}: {len(tree.code())} sources, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
