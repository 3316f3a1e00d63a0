"""What a request of the offloaded class pulls before its first step, and what its steps miss.

A cluster on this machine (coordinator, two stores, one prefill worker, one decode worker) with the calibration.
A prompt of real text is asked with --fidelity sparse; the share is that of the KV bytes of its tokens, digests
included. The same prompt again exactly: what the resident class pulls, and how fast its steps are.
Adds its rows to the JSON file if that is there already.
usage: admission_bench.py --bin DIR --model FOLDER --calibration FILE --text FILE --json FILE
                          [--tokens N] [--budget N] [--output N]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument("--bin", type=pathlib.Path, required=True)
parser.add_argument("--model", type=pathlib.Path, required=True)
parser.add_argument("--calibration", type=pathlib.Path, required=True)
parser.add_argument("--text", type=pathlib.Path, required=True)
parser.add_argument("--json", type=pathlib.Path, required=True)
parser.add_argument("--tokens", type=int, default=7500, help="of the prompt, about")
parser.add_argument("--budget", type=int, default=1024)
parser.add_argument("--output", type=int, default=64)
args = parser.parse_args()


def call(command, timeout, stdin=None):
    done = subprocess.run([str(c) for c in command], input=stdin, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        sys.exit(f"admission_bench: {' '.join(str(c) for c in command)}: exit {done.returncode}\n"
                 f"{done.stderr}{done.stdout}")
    return done.stdout


with tempfile.TemporaryDirectory(prefix="kvt_bench_") as folder:
    run_dir = pathlib.Path(folder) / "run"
    config = pathlib.Path(folder) / "cluster.toml"
    config.write_text(f"""[cluster]
name = "admission-bench"
model_folder = "{args.model.resolve()}"
[model]
calibration = "{args.calibration.resolve()}"
[[store]]
count = 2
arena_bytes = "1GiB"
[[prefill]]
slots_bytes = "512MiB"
selection_tokens = {args.budget}
[[decode]]
slots_bytes = "512MiB"
sparse_budget = {args.budget}
""")
    kvtide = args.bin / "kvtide"

    def ask(prompt, fidelity, output):
        return json.loads(call([kvtide, "generate", "--run-dir", run_dir, "--file", "-", "--max-tokens", output,
                                "--ignore-eos", "--fidelity", fidelity, "-o", "json"], 300, prompt))

    call([kvtide, "up", "--config", config, "--run-dir", run_dir], 120)
    try:
        # Characters for a token, from a first piece.
        text = args.text.read_text(encoding="utf-8")
        piece = text[:8000]
        rate = len(piece) / ask(piece, "exact", 1)["prompt_tokens"]
        prompt = text[:int(args.tokens * rate)]
        sparse = ask(prompt, "sparse", args.output)
        exact = ask(prompt, "exact", args.output)
    finally:
        call([kvtide, "down", "--run-dir", run_dir], 60)

decode = sparse["decode"]
if not decode["offloaded"]:
    sys.exit("admission_bench: the request was served resident")
share = 100 * decode["admission_bytes"] / decode["sequence_bytes"]
steps = max(1, decode["sparse_steps"])
print(f"prompt of {sparse['prompt_tokens']} tokens, budget {args.budget}, {steps} steps")
print(f"  admission   {decode['admission_bytes'] / 2**20:8.1f} MiB, {share:.1f} % of "
      f"{decode['sequence_bytes'] / 2**20:.1f} MiB; digests {decode['digest_bytes'] / 2**20:.1f} MiB")
print(f"  misses      {100 * decode['hot_misses'] / max(1, decode['selected_blocks']):8.1f} % of the selected blocks")
print(f"  step        {sparse['tpot_ms']:8.1f} ms; resident {exact['tpot_ms']:.1f} ms")
rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
rows += [{"name": "admission_bytes_pct", "value": share, "unit": "%"},
         {"name": "admission_prompt_tokens", "value": sparse["prompt_tokens"], "unit": ""},
         {"name": "served_miss_pct", "value": 100 * decode["hot_misses"] / max(1, decode["selected_blocks"]), "unit": "%"},
         {"name": "sync_recall_tpot_vs_resident", "value": sparse["tpot_ms"] / exact["tpot_ms"], "unit": "ratio of times"}]
args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
