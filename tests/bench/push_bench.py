"""What streaming a prompt's KV into the tier costs its prefill.

Interleaved in one run: the prefill time of a prompt in a cluster on this machine (coordinator, two
stores, one prefill worker, one decode worker; figures.compute: first chunk enqueued to first token,
pushes of every layer included) and of the same prompt in kvtide-run (same model code, threads and
chunk, no tier). Each round has a prompt of its own, so nothing is reused. Stores share the
processors with the worker here: on a cluster their share of the cost lies on other machines.
usage: push_bench.py --bin DIR --model FOLDER --json FILE [--rounds N] [--words N] [--text FILE]
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument("--bin", type=pathlib.Path, required=True)
parser.add_argument("--model", type=pathlib.Path, required=True)
parser.add_argument("--json", type=pathlib.Path, required=True)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--words", type=int, default=2600)
parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("/usr/share/common-licenses/GPL-3"))
args = parser.parse_args()
CHUNK = 256
words = args.text.read_text().split()


def call(command, timeout, stdin=None):
    done = subprocess.run([str(c) for c in command], input=stdin, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        sys.exit(f"push_bench: {' '.join(str(c) for c in command)}: exit {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


with tempfile.TemporaryDirectory(prefix="kvt_bench_") as folder:
    run_dir = pathlib.Path(folder) / "run"
    config = pathlib.Path(folder) / "cluster.toml"
    config.write_text(f"""[cluster]
name = "push-bench"
model_folder = "{args.model.resolve()}"
[[store]]
count = 2
arena_bytes = "1GiB"
[[prefill]]
slots_bytes = "512MiB"
chunk_tokens = {CHUNK}
[[decode]]
slots_bytes = "512MiB"
""")
    kvtide = args.bin / "kvtide"
    call([kvtide, "up", "--config", config, "--run-dir", run_dir], 120)
    try:
        rows = []
        for i in range(args.rounds + 1):
            prompt = f"Round {i}. " + " ".join(words[i * 50:i * 50 + args.words])
            cluster = json.loads(call([kvtide, "generate", "--run-dir", run_dir, "--file", "-", "--max-tokens", "1",
                                       "-o", "json"], 300, prompt))
            alone = json.loads(call([args.bin / "kvtide-run", args.model, "--file", "-", "--max-tokens", "1",
                                     "--chunk", CHUNK, "-o", "json"], 300, prompt))
            if cluster["tokens"] != alone["tokens"]:
                sys.exit(f"push_bench: round {i}: the cluster says {cluster['tokens']}, one process {alone['tokens']}")
            if cluster["prefill"]["reused_tokens"]:
                sys.exit("push_bench: a prompt was reused")
            if i > 0:  # the first warms up
                rows.append((cluster["prefill"]["compute_ms"], alone["ttft_s"] * 1e3, cluster["prefill"]["pushed_bytes"]))
    finally:
        call([kvtide, "down", "--run-dir", run_dir], 60)

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
