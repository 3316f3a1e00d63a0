"""Who may include whom (LAYOUT): kernels <- kvstore <- the daemons <- tests; daemons never include
each other."""

from tree import TOP

# Folder -> folders whose headers it may include, besides itself. Longest prefix wins. "kernels/*.h"
# stands for the headers directly in kernels.
KERNELS = ["kernels"]
BASE = ["kernels/base"]
LAYOUT = BASE + ["kernels/layout"]
SEAMS = LAYOUT + ["kernels/*.h"]
KVSTORE_WIRE = LAYOUT + ["kvstore/index", "kvstore/wire"]
CLIENT = KVSTORE_WIRE + ["kvstore/media", "kvstore/transport", "kvstore/client"]
WORKER = KERNELS + ["kvstore/index", "kvstore/transport", "kvstore/wire", "kvstore/client",
                    "kvstore/media"]
MAY_INCLUDE = {
    "kernels/base": [],
    "kernels/layout": BASE,
    "kernels": SEAMS,
    "kernels/cpu": SEAMS,
    "kernels/cuda": SEAMS,
    "kernels/collective": SEAMS,
    "kernels/select": LAYOUT,
    "kernels/model": KERNELS,
    "kvstore/index": LAYOUT,
    "kvstore/media": LAYOUT,
    "kvstore/transport": LAYOUT + ["kvstore/media"],
    "kvstore/wire": LAYOUT + ["kvstore/index"],
    "kvstore/client": CLIENT,
    "kvstore/node": LAYOUT + ["kvstore"],
    "coordinator": LAYOUT + ["kvstore/index", "kvstore/wire", "kvstore/client", "kernels/model"],
    "coordinator/core": LAYOUT + ["kvstore/index", "kvstore/wire", "kvstore/client"],
    "prefill_worker": WORKER,
    "decode_worker": WORKER,
}
TOP_FILES = {"CMakeLists.txt", "CMakePresets.json", "README.md", "LICENSE"}
DAEMONS = ("coordinator", "prefill_worker", "decode_worker")


def folder_of(path, folders):
    best = ""
    for folder in folders:
        if path.startswith(folder + "/") and len(folder) > len(best):
            best = folder
    return best


def permits(rule, include):
    if rule.endswith("/*.h"):
        stem = rule[:-len("*.h")]
        return include.startswith(stem) and "/" not in include[len(stem):]
    return include.startswith(rule + "/")


def check(tree):
    problems = []
    for path in tree.files():
        top = path.split("/")[0]
        if "/" in path and top not in TOP and not top.startswith("."):
            problems.append(f"{path}: the top level is given: {', '.join(sorted(TOP))}; move it there")
        if "/" not in path and path not in TOP_FILES and not path.startswith("."):
            problems.append(f"{path}: no other file at the top level; move it into a folder")
    for path in tree.code():
        folder = folder_of(path, MAY_INCLUDE)
        for line, name, ours in tree.includes(path):
            if not ours:
                continue
            where = f"{path}:{line}"
            if not (tree.exists(name) or name.endswith(".pb.h")):
                problems.append(f'{where}: "{name}" is no path from the top of the tree; write '
                                'the full path, and <...> for other libraries')
            elif path.startswith("tests/") or not folder:
                continue
            elif name.endswith(".pb.h"):
                continue  # fences.py
            elif name.startswith("tests/"):
                problems.append(f"{where}: the product includes a test header ({name})")
            elif not (name.startswith(folder + "/") or
                      any(permits(rule, name) for rule in MAY_INCLUDE[folder])):
                allowed = ", ".join(MAY_INCLUDE[folder]) or "nothing of ours"
                problems.append(f"{where}: {folder} may not include {name}; it may include "
                                f"{allowed} (tests/lint/layers.py, DESIGN's layout)")
    return problems
