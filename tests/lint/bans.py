"""Constructs that are banned, each with what to do instead."""
import fnmatch
import pathlib
import re

from tree import blank

PROGRAMS = ["*/main.cc", "*_main.cc", "*/kvtide_*.cc", "coordinator/ctl/*", "tests/*",
            "kernels/base/check.cc"]
THREADS = ["*/main.cc", "*_main.cc", "*_daemon.cc", "*_daemon.h", "kernels/cpu/*",
           "kvstore/transport/*", "kvstore/wire/*", "*_service.cc", "*_service.h",
           "kvstore/client/call_pool.*", "coordinator/ctl/*", "*/rocksdb_*", "tests/*"]
PURE = ("kvstore/index/", "kernels/select/", "kernels/layout/", "coordinator/core/",
        "decode_worker/pool/", "decode_worker/schedule/", "kvstore/client/placement",
        "kvstore/client/sequence_blocks")

# Rule, pattern (comments and strings blanked), where it applies, where it is allowed, remedy.
CODE_BANS = [
    ("mutex", r"std::(recursive_|shared_|timed_)?mutex\b|std::condition_variable|absl::(Mutex|CondVar)\b"
     r"|pthread_mutex", ["*"], ["kernels/base/mutex.h"], "use kernels/base/mutex.h"),
    ("sleep", r"\b(sleep_for|sleep_until|SleepFor|usleep|nanosleep)\b|(?<![\w.>])sleep\s*\(",
     ["*"], ["tests/support/*", "tests/bench/*", "coordinator/ctl/*"],
     "wait for a condition with a deadline (CondVar::WaitFor, tests/support)"),
    ("print", r"std::(cout|cerr|clog)\b|(?<![\w:])(std::)?f?printf\s*\(|(?<![\w:])(std::)?puts\s*\(",
     ["*"], PROGRAMS, "a library returns a Status or calls KVT_LOG"),
    ("header", r"#\s*include\s*<(format|expected|print|generator|stacktrace)>", ["*"], [],
     "GCC 12 has no such header; use absl/strings, absl::StatusOr"),
    ("iostream", r"#\s*include\s*<iostream>", ["*"], PROGRAMS, "a library prints nothing"),
    ("thread", r"std::j?thread\b(?!::)|pthread_create|std::async\b", ["*"], THREADS,
     "threads belong to composition roots; give the class a Run() or a Tick()"),
    ("assert", r"(?<![\w.])assert\s*\(", ["*"], [], "use KVT_CHECK, which is always on"),
    ("using", r"^\s*using\s+namespace\b", ["*.h"], [], "name what you use"),
    ("detach", r"\.detach\s*\(\s*\)", ["*"], [], "every thread has an owner that joins it"),
    ("random", r"std::random_device|(?<![\w.>])s?rand\s*\(", ["*"], ["kernels/base/random.cc"],
     "use kernels/base/random.h and print the seed"),
    ("engine", r"std::(mt19937\w*|default_random_engine)", ["*"], ["tests/*"],
     "use kernels/base/random.h"),
]
PURE_BAN = (r"RealClock|absl::Now\s*\(|std::chrono::(steady|system)_clock|std::thread\b(?!::)|\bMutexLock\b"
            r"|(?<!\w)(socket|open|fopen)\s*\(|std::[io]fstream")
# Homes, and wherever this checkout lies.
CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
MACHINE_PATHS = re.compile(r"(?<![\w./-])/(root/|home/\w|" + re.escape(f"{CHECKOUT}/"[1:]) + ")")
TEXT = (".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".txt", ".md", ".toml", ".cmake", ".json", ".yml",
        ".yaml", ".proto", ".service")


def matches(path, patterns):
    return any(fnmatch.fnmatch(path, p) for p in patterns)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def check_code(tree, path):
    text = blank(tree.text(path))
    raw = tree.text(path)
    for rule, pattern, where, allowed, remedy in CODE_BANS:
        if not matches(path, where) or matches(path, allowed) or path in tree.allowed(rule):
            continue
        for m in re.finditer(pattern, text, re.M):
            yield f"{path}:{line_of(text, m.start())}: [{rule}] `{m.group(0).strip()}`: {remedy}"
    if path.startswith(PURE):
        for m in re.finditer(PURE_BAN, text):
            yield (f"{path}:{line_of(text, m.start())}: [pure] `{m.group(0)}` in a pure folder: take "
                   "time, locks and files from the caller")
    if path.endswith(".h") and "#pragma once" not in raw:
        yield f"{path}:1: [once] a header starts with its contract and #pragma once"
    if path.endswith(".h") and not raw.startswith("//"):
        yield f"{path}:1: [contract] a header starts with a comment: what it is, owner, thread-safety"


def check_text(tree, path):
    for number, line in enumerate(tree.text(path).split("\n"), 1):
        if MACHINE_PATHS.search(line) and not path.startswith("tests/lint/"):
            yield f"{path}:{number}: [path] `{line.strip()[:60]}` is a path of one machine"
        m = re.search(r"\b(TODO|FIXME|XXX|HACK)\b(\(#\d+\))?", line)
        if m and not path.startswith("tests/lint/"):
            if m.group(1) != "TODO" or not m.group(2):
                yield f"{path}:{number}: [todo] write TODO(#issue), or do it: `{line.strip()[:60]}`"
        if "\t" in line and path.endswith((".h", ".cc", ".cu")):
            yield f"{path}:{number}: [tab] use spaces"


def check(tree):
    problems = []
    for path in tree.code():
        problems.extend(check_code(tree, path))
    for path in tree.files(*TEXT):
        problems.extend(check_text(tree, path))
    return problems
