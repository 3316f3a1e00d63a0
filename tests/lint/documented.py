"""Every configuration key stands in docs/CONFIG.md and every metric in docs/METRICS.md, and the
other way round."""
import re

from tree import blank

CONFIG = "docs/CONFIG.md"
METRICS = "docs/METRICS.md"
# Calls on an OptionsTable: file.Table("store"), table.Get("port", ...).
KEY = re.compile(r'(?:\.|->)(?:Get|GetBytes|Require|Table|Tables)\s*\(\s*"([a-z0-9_]+)"')
METRIC = re.compile(r'\bNew(Counter|Gauge|Histogram)\s*\(\s*"([^"]+)"')
METRIC_NAME = re.compile(r"kvtide_[a-z0-9]+(_[a-z0-9]+)+")
# First cell of a table's row: | `key` | ..., or a heading: ## `[tier]`.
DOCUMENTED = re.compile(r"^\|\s*`([a-z0-9_]+)`|^#+.*`\[+([a-z0-9_.]+)\]+`", re.M)


def product(tree):
    return [p for p in tree.code() if not p.startswith("tests/")]


def keys_in_code(tree):
    found = {}
    for path in product(tree):
        if path.startswith("kernels/base/options"):
            continue
        text = blank(tree.text(path), strings=False)
        if "OptionsTable" not in text and "OptionsFile" not in text:
            continue
        for m in KEY.finditer(text):
            found.setdefault(m.group(1), f"{path}:{text.count(chr(10), 0, m.start()) + 1}")
    return found


def metrics_in_code(tree):
    found = {}
    for path in product(tree):
        text = blank(tree.text(path), strings=False)
        for m in METRIC.finditer(text):
            found[m.group(2)] = (m.group(1), f"{path}:{text.count(chr(10), 0, m.start()) + 1}")
    return found


def check(tree):
    problems = []
    keys = keys_in_code(tree)
    metrics = metrics_in_code(tree)
    config = tree.text(CONFIG) if tree.exists(CONFIG) else ""
    documented = set()
    rows = set()
    for m in DOCUMENTED.finditer(config):
        documented.update((m.group(1) or m.group(2)).split("."))
        rows.update([m.group(1)] if m.group(1) else [])
    for key, where in sorted(keys.items()):
        if key not in documented:
            problems.append(f"{where}: configuration key `{key}` has no row in {CONFIG} "
                            f"(| `{key}` | type | default | meaning |)")
    for key in sorted(rows - set(keys)):
        problems.append(f"{CONFIG}: `{key}` is read nowhere: remove it")
    text = tree.text(METRICS) if tree.exists(METRICS) else ""
    rows = set(re.findall(r"^\|\s*`(kvtide_[a-z0-9_]+)`", text, re.M))
    for name, (kind, where) in sorted(metrics.items()):
        if not METRIC_NAME.fullmatch(name):
            problems.append(f"{where}: metric `{name}`: want kvtide_<module>_<noun>_<unit>[_total]")
        if (kind == "Counter") != name.endswith("_total"):
            problems.append(f"{where}: `{name}`: counters, and only they, end in _total")
        if name not in rows:
            problems.append(f"{where}: metric `{name}` has no row in {METRICS} "
                            f"(| `{name}` | type | labels | meaning |)")
    for name in sorted(rows - set(metrics)):
        problems.append(f"{METRICS}: `{name}` is made nowhere: remove it")
    return problems
