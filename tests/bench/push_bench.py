"""What streaming a prompt's KV into the tier costs its prefill.

Interleaved in one run: the prefill time of a prompt in a cluster on this machine (coordinator, two
stores, one prefill worker, one decode worker; figures.compute: first chunk enqueued to first token,
pushes of every layer included) and of the same prompt in kvtide-run (same model code, threads and
chunk, no tier). Each round has a prompt of its own, so nothing is reused. Stores share the
processors with the worker here: on a cluster their share of the cost lies on other machines.
usage: push_bench.py --bin DIR --model FOLDER --json FILE [--rounds N] [--words N] [--text FILE]
"""
import json
import pathlib
import statistics

from bench_cluster import ASK_S, BenchCluster, argument_parser, call, fail

parser = argument_parser()
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--words", type=int, default=2600)
parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("/usr/share/common-licenses/GPL-3"))
args = parser.parse_args()
CHUNK = 256
words = args.text.read_text().split()

with BenchCluster(args, store='count = 2\narena_bytes = "1GiB"', prefill=f"chunk_tokens = {CHUNK}") as cluster:
    rows = []
    for i in range(args.rounds + 1):
        prompt = f"Round {i}. " + " ".join(words[i * 50:i * 50 + args.words])
        served = cluster.ask(prompt, "--max-tokens", 1)
        alone = json.loads(call([args.bin / "kvtide-run", args.model, "--file", "-", "--max-tokens", 1,
                                 "--chunk", CHUNK, "-o", "json"], ASK_S, prompt))
        if served["tokens"] != alone["tokens"]:
            fail(f"round {i}: the cluster says {served['tokens']}, one process {alone['tokens']}")
        if served["prefill"]["reused_tokens"]:
            fail("a prompt was reused")
        if i > 0:  # the first warms up
            rows.append((served["prefill"]["compute_ms"], alone["ttft_s"] * 1e3, served["prefill"]["pushed_bytes"]))

ratios = sorted(with_push / without for with_push, without, _ in rows)
with_push = statistics.median(r[0] for r in rows)
without = statistics.median(r[1] for r in rows)
print(f"prompt of {args.words} words, {args.rounds} rounds, interleaved, chunks of {CHUNK}")
print(f"  with pushes    {with_push:8.1f} ms (median), {rows[0][2] / 2**20:.1f} MiB pushed")
print(f"  without        {without:8.1f} ms")
print(f"  ratio          {statistics.median(ratios):8.3f}    (least {ratios[0]:.3f}, most {ratios[-1]:.3f})")
args.json.write_text(json.dumps({"rows": [
    {"name": "prefill_with_pushes_vs_without", "value": statistics.median(ratios), "unit": "ratio of times"},
    {"name": "prefill_with_pushes_ms", "value": with_push, "unit": "ms"},
    {"name": "prefill_without_ms", "value": without, "unit": "ms"}]}))
