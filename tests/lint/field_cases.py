"""Every field case F1..F21 has a row in docs/TESTING.md; the tests named there exist, and a case without
one says so ("none yet: ...")."""
import re

TABLE = "docs/TESTING.md"
CASES = [f"F{n}" for n in range(1, 22)]
# TEST(Suite, Name), TEST_P, TEST_F, TYPED_TEST.
TEST = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.M)
ROW = re.compile(r"^\|\s*(F\d+)\s*\|(.*)\|\s*$", re.M)
NAMED = re.compile(r"`(\w+)\.(\w+)`")


def tests_in_code(tree):
    found = {}
    for path in tree.code():
        if path.startswith("tests/"):
            for m in TEST.finditer(tree.text(path)):
                found[(m.group(1), m.group(2))] = path
    return found


def check(tree):
    problems = []
    tests = tests_in_code(tree)
    text = tree.text(TABLE) if tree.exists(TABLE) else ""
    rows = dict(ROW.findall(text))
    for case in CASES:
        if case not in rows:
            problems.append(f"{TABLE}: no row for {case} (| {case} | `Suite.Test`, ... |)")
            continue
        named = NAMED.findall(rows[case])
        if not named and "none yet:" not in rows[case]:
            problems.append(f"{TABLE}: {case} names no test as `Suite.Test`, nor says \"none yet: why\"")
        for suite, name in named:
            if (suite, name) not in tests:
                problems.append(f"{TABLE}: {case}: there is no test {suite}.{name}")
    return problems
