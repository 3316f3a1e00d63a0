"""Third-party libraries stay behind their fences, and out of headers that cross them (LAYOUT)."""
import fnmatch
import re

# Library, pattern of its headers, where its headers may be included.
FENCES = [
    ("CUDA", r"^(cuda|cublas|curand|cooperative_groups|cub/|thrust/|nv)", ["kernels/cuda/*"]),
    ("NCCL", r"^nccl", ["kernels/collective/nccl_*"]),
    ("oneDNN", r"^(dnnl|oneapi/)", ["kernels/cpu/*"]),
    ("OpenMP", r"^omp\.h", ["kernels/cpu/*", "tests/bench/*"]),
    ("UCX", r"^(ucp|ucs|uct|ucm)/", ["kvstore/transport/ucx_*", "tests/bench/*"]),
    ("RocksDB", r"^rocksdb/", ["*/rocksdb_*"]),
    ("gRPC and protobuf", r"^(grpc|google/protobuf)|\.pb\.h$",
     ["kvstore/wire/*", "*_service.h", "*_service.cc", "tests/fuzz/*", "tests/unit/kvstore/wire/*"]),
    ("spdlog", r"^spdlog/", ["kernels/base/log.cc"]),
    ("toml++", r"^toml", ["kernels/base/options.cc"]),
    ("prometheus-cpp", r"^prometheus/", ["kernels/base/metrics.cc"]),
    ("HTTP", r"^(httplib|boost/beast)", ["coordinator/gateway/*"]),
    ("PCRE2", r"^pcre2", ["kernels/model/*.cc"]),
    ("xxHash", r"^xxh", ["kernels/layout/*.cc", "tests/unit/*"]),
    ("OpenSSL", r"^openssl/", ["kvstore/index/*.cc", "kvstore/wire/*.cc", "coordinator/*.cc",
                               "kvstore/node/*.cc", "kernels/model/*.cc", "tests/*"]),
    ("JSON", r"^nlohmann/", ["*.cc", "kernels/model/json_file.h"]),
    ("CLI11", r"^CLI/", ["coordinator/ctl/*", "*main.cc", "kernels/model/kvtide_*.cc",
                         "tests/bench/*"]),
    ("GoogleTest", r"^(gtest|gmock)/", ["tests/*"]),
    ("Google Benchmark", r"^benchmark/", ["tests/bench/*"]),
]
# Headers may name Abseil, the standard library and the system's; anything with a fence only inside
# its own folder.
OWN_HEADERS = {"kernels/cpu/*", "kernels/cuda/*", "kernels/collective/nccl_*",
               "kvstore/transport/ucx_*", "kvstore/wire/*", "*/rocksdb_*", "*_service.h",
               "coordinator/gateway/*", "coordinator/ctl/*", "kernels/model/json_file.h", "tests/*"}
KNOWN_FREE = re.compile(
    r"^(absl/|sys/|linux/|netinet/|arpa/|asm/|cxxabi|[a-z_0-9]+$|[a-z_0-9]+\.h$|experimental/)")


def matches(path, patterns):
    return any(fnmatch.fnmatch(path, p) for p in patterns)


def check(tree):
    problems = []
    for path in tree.code():
        for line, name, ours in tree.includes(path):
            for library, pattern, allowed in FENCES:
                if not re.search(pattern, name) or (ours and not name.endswith(".pb.h")):
                    continue
                if not matches(path, allowed):
                    problems.append(f"{path}:{line}: {library} ({name}) belongs in "
                                    f"{' or '.join(allowed)}; use the interface in front of it")
                elif path.endswith(".h") and not matches(path, OWN_HEADERS):
                    problems.append(f"{path}:{line}: {library} ({name}) in a header; keep its types "
                                    "in the .cc file")
                break
            else:
                if not ours and not KNOWN_FREE.search(name):
                    problems.append(f"{path}:{line}: <{name}> is of a library without a fence; add "
                                    "one in tests/lint/fences.py with the folders that may use it")
        if path.endswith((".cu", ".cuh")) and not path.startswith(("kernels/cuda/", "tests/")):
            problems.append(f"{path}: CUDA sources live in kernels/cuda")
    return problems
