"""Metrics that the alerts (deploy/alerts.yml) and docs/OPERATIONS.md name stand in docs/METRICS.md, and the
sanitizers' suppressions name vendor libraries only."""
import re

METRICS = "docs/METRICS.md"
READERS = ("deploy/alerts.yml", "docs/OPERATIONS.md")
METRIC = re.compile(r"\bkvtide_[a-z0-9_]+\b")
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
VENDORS = re.compile(r"(leak|called_from_lib|race|mutex|deadlock):lib(ucs|uct|ucp|ucm|grpc|grpc\+\+|"
                     r"protobuf|rocksdb|prometheus-cpp-\w+|spdlog|dnnl|gomp)\.so\S*|"
                     # libc's own callers of libucs's handlers, and Abseil's functions.
                     r"mutex:(__run_prefork_handlers|_dl_call_fini)|race:absl::\S+")


def check(tree):
    problems = []
    text = tree.text(METRICS) if tree.exists(METRICS) else ""
    rows = dict(re.findall(r"^\|\s*`(kvtide_[a-z0-9_]+)`\s*\|\s*(\w+)", text, re.M))
    for path in READERS:
        if not tree.exists(path):
            continue
        for number, line in enumerate(tree.text(path).splitlines(), 1):
            for name in METRIC.findall(line):
                stem = HISTOGRAM.sub("", name)
                if name not in rows and rows.get(stem) != "histogram":
                    problems.append(f"{path}:{number}: there is no metric {name} in {METRICS}")
    for path in tree.files(".supp"):
        for number, line in enumerate(tree.text(path).splitlines(), 1):
            if line.strip() and not line.startswith("#") and not VENDORS.fullmatch(line.strip()):
                problems.append(f"{path}:{number}: `{line.strip()}`: a suppression names a vendor's "
                                "library (kind:libNAME.so); repair what is ours")
    return problems
