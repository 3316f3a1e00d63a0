#!/usr/bin/env python3
"""Each rule fires on a tree that breaks it and is silent on one that does not."""
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bans  # noqa: E402
import documented  # noqa: E402
import fences  # noqa: E402
import field_cases  # noqa: E402
import layers  # noqa: E402
import operations  # noqa: E402
import sizes  # noqa: E402
from tree import Tree, blank  # noqa: E402

HEADER = "// A contract.\n#pragma once\n"


class LintTest(unittest.TestCase):
    def problems(self, check, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                full = os.path.join(root, path)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w", encoding="utf-8") as f:
                    f.write(text)
            return check.check(Tree(root))

    def fires(self, check, files, word):
        found = self.problems(check, files)
        self.assertTrue(any(word in p for p in found), f"want `{word}` in {found}")

    def silent(self, check, files):
        self.assertEqual(self.problems(check, files), [])

    def test_layers(self):
        base = {"kernels/base/a.h": HEADER, "kvstore/wire/w.h": HEADER,
                "decode_worker/d.h": HEADER, "kernels/device.h": HEADER}
        ok = dict(base, **{"kvstore/client/c.cc": '#include "kvstore/wire/w.h"\n'
                           '#include "kernels/base/a.h"\n'})
        self.silent(layers, ok)
        self.fires(layers, dict(base, **{"kernels/base/b.cc": '#include "kvstore/wire/w.h"\n'}),
                   "may not include")
        self.fires(layers, dict(base, **{"coordinator/c.cc": '#include "decode_worker/d.h"\n'}),
                   "may not include")
        self.fires(layers, dict(base, **{"kvstore/index/c.cc": '#include "kernels/device.h"\n'}),
                   "may not include")
        self.fires(layers, dict(base, **{"kernels/base/b.cc": '#include "a.h"\n'}), "full path")
        self.fires(layers, dict(base, **{"util/b.cc": "\n"}), "top level")

    def test_fences(self):
        self.silent(fences, {"kvstore/transport/ucx_worker.cc": "#include <ucp/api/ucp.h>\n",
                             "kvstore/client/a.h": HEADER + "#include <vector>\n"})
        self.fires(fences, {"kvstore/client/a.cc": "#include <ucp/api/ucp.h>\n"}, "UCX")
        self.fires(fences, {"decode_worker/a.cc": '#include "kvstore/wire/store.pb.h"\n'}, "gRPC")
        self.fires(fences, {"kernels/model/a.h": "#include <nlohmann/json.hpp>\n"}, "JSON")
        self.fires(fences, {"kernels/model/a.cc": "#include <boost/asio.hpp>\n"}, "without a fence")

    def test_field_cases(self):
        rows = {f"F{n}": "none yet: later" for n in range(1, 22)}
        rows["F1"] = "`Store.F1_Late_IsRefused`"
        code = {"tests/a_test.cc": "TEST_P(Store, F1_Late_IsRefused) {\n}\n"}

        def table():
            return {"docs/TESTING.md": "".join(f"| {k} | {v} |\n" for k, v in rows.items())}
        self.silent(field_cases, dict(code, **table()))
        self.fires(field_cases, table(), "there is no test Store.F1_Late_IsRefused")
        rows["F3"] = "some words"
        self.fires(field_cases, dict(code, **table()), "F3 names no test")
        del rows["F4"]
        self.fires(field_cases, dict(code, **table()), "no row for F4")

    def test_operations(self):
        metrics = {"docs/METRICS.md": "| `kvtide_store_pins` | gauge | | x |\n"
                                      "| `kvtide_decode_step_seconds` | histogram | | x |\n"}
        good = "expr: kvtide_store_pins > 3 and kvtide_decode_step_seconds_bucket > 0\n"
        self.silent(operations, dict(metrics, **{"deploy/alerts.yml": good}))
        self.fires(operations, dict(metrics, **{"deploy/alerts.yml": "kvtide_store_pinz\n"}),
                   "no metric kvtide_store_pinz")
        self.fires(operations, dict(metrics, **{"docs/OPERATIONS.md": "kvtide_store_pins_sum\n"}),
                   "kvtide_store_pins_sum")
        self.silent(operations, {"tests/a.supp": "# why\nleak:libucs.so\n"})
        self.fires(operations, {"tests/a.supp": "race:kvt::StoreNode\n"}, "vendor")

    def test_sizes(self):
        body = "int F() {\n" + "  x();\n" * 80 + "}\n"
        self.fires(sizes, {"kernels/a.cc": body}, "in `int F()")
        broken = "int Function(int first,\n             int second) {\n" + "  x();\n" * 80 + "}\n"
        self.fires(sizes, {"kernels/a.cc": broken}, "in `int Function")
        self.fires(sizes, {"kernels/a.h": HEADER + "\n" * 250}, "at most 250")
        self.fires(sizes, {"kernels/a.cc": "\n" * 601}, "at most 600")
        self.silent(sizes, {"kernels/a.cc": "\n" * 601,
                            "tests/lint/allow.txt": "lines kernels/a.cc # one table\n"})
        self.fires(sizes, {"kernels/a.cc": "\n",
                           "tests/lint/allow.txt": "lines kernels/a.cc # one table\n"}, "remove it")

    def test_bans(self):
        cases = {"std::mutex m;": "[mutex]", "absl::SleepFor(d);": "[sleep]",
                 "std::cout << 1;": "[print]", "#include <format>": "[header]",
                 "std::thread t(f);": "[thread]", "assert(x);": "[assert]",
                 "// TODO: later": "[todo]", 'auto p = "/root/x";': "[path]",
                 f'auto q = "{bans.CHECKOUT}/x";': "[path]",
                 "std::mt19937 r;": "[engine]",
                 "std::random_device d;": "[random]", "t.detach();": "[detach]"}
        for line, rule in cases.items():
            self.fires(bans, {"kvstore/index/a.cc": line + "\n"}, rule)
        self.fires(bans, {"kvstore/index/a.cc": "auto t = RealClock::Get().Now();\n"}, "[pure]")
        self.fires(bans, {"kvstore/index/a.h": "int x;\n"}, "[once]")
        self.silent(bans, {"kvstore/index/a.cc":
                           "// std::mutex here\nauto n = std::thread::hardware_concurrency();\n"
                           'const char* s = "printf(";\n// TODO(#12): later\n'})
        self.silent(bans, {"kvstore/node/a.cc": "std::thread t;\n",
                           "tests/lint/allow.txt": "thread kvstore/node/a.cc # its root\n"})

    def test_documented(self):
        code = 'void F(OptionsTable table) { table.Get("port", &p, 0, 9); }\n'
        self.fires(documented, {"kvstore/node/a.cc": code}, "`port` has no row")
        self.silent(documented, {"kvstore/node/a.cc": code, "docs/CONFIG.md": "| `port` | int |\n"})
        self.fires(documented, {"docs/CONFIG.md": "| `port` | int |\n"}, "read nowhere")
        metric = 'r.NewCounter("kvtide_store_hits_total", "Hits.");\n'
        self.fires(documented, {"kvstore/node/a.cc": metric}, "has no row")
        self.silent(documented, {"kvstore/node/a.cc": metric,
                                 "docs/METRICS.md": "| `kvtide_store_hits_total` | counter |\n"})
        self.fires(documented, {"kvstore/node/a.cc": 'r.NewCounter("hits", "H");\n'}, "_total")

    def test_blank_keeps_lines_and_digit_separators(self):
        text = "int a = 10'000; // x\nchar c = 'y';\n/* a\nb */ int d;\n"
        self.assertEqual(blank(text).count("\n"), text.count("\n"))
        self.assertNotIn("x", blank(text))
        self.assertIn("int d", blank(text))


if __name__ == "__main__":
    unittest.main()
