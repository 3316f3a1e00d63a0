"""What a request of the offloaded class pulls before its first step, and what its steps miss.

A cluster on this machine (coordinator, two stores, one prefill worker, one decode worker) with the calibration.
A prompt of real text is asked with --fidelity sparse; the share is that of the KV bytes of its tokens, digests
included. The same prompt again exactly: what the resident class pulls, and how fast its steps are.
Adds its rows to the JSON file if that is there already.
usage: admission_bench.py --bin DIR --model FOLDER --calibration FILE --text FILE --json FILE
                          [--tokens N] [--budget N] [--output N] [--decode KEYS]
"""
import pathlib

from bench_cluster import BenchCluster, add_rows, argument_parser, fail

parser = argument_parser()
parser.add_argument("--calibration", type=pathlib.Path, required=True)
parser.add_argument("--text", type=pathlib.Path, required=True)
parser.add_argument("--tokens", type=int, default=7500, help="of the prompt, about")
parser.add_argument("--budget", type=int, default=1024)
parser.add_argument("--output", type=int, default=64)
parser.add_argument("--decode", default="", help="another key of [decode]: attend_resident = true")
args = parser.parse_args()


with BenchCluster(args, store='count = 2\narena_bytes = "1GiB"',
                  model=f'calibration = "{args.calibration.resolve()}"',
                  prefill=f"selection_tokens = {args.budget}", decode=f"sparse_budget = {args.budget}\n{args.decode}") as cluster:
    def ask(prompt, fidelity, output):
        return cluster.ask(prompt, "--max-tokens", output, "--ignore-eos", "--fidelity", fidelity)

    # Characters for a token, from a first piece.
    text = args.text.read_text(encoding="utf-8")
    piece = text[:8000]
    rate = len(piece) / ask(piece, "exact", 1)["prompt_tokens"]
    prompt = text[:int(args.tokens * rate)]
    sparse = ask(prompt, "sparse", args.output)
    exact = ask(prompt, "exact", args.output)

decode = sparse["decode"]
if not decode["offloaded"]:
    fail("the request was served resident")
share = 100 * decode["admission_bytes"] / decode["sequence_bytes"]
steps = max(1, decode["sparse_steps"])
print(f"prompt of {sparse['prompt_tokens']} tokens, budget {args.budget}, {steps} steps")
print(f"  admission   {decode['admission_bytes'] / 2**20:8.1f} MiB, {share:.1f} % of "
      f"{decode['sequence_bytes'] / 2**20:.1f} MiB; digests {decode['digest_bytes'] / 2**20:.1f} MiB")
print(f"  misses      {100 * decode['hot_misses'] / max(1, decode['selected_blocks']):8.1f} % of the selected blocks")
print(f"  step        {sparse['tpot_ms']:8.1f} ms; resident {exact['tpot_ms']:.1f} ms")
add_rows(args.json, [{"name": "admission_bytes_pct", "value": share, "unit": "%"},
                     {"name": "admission_prompt_tokens", "value": sparse["prompt_tokens"], "unit": ""},
                     {"name": "served_miss_pct", "value": 100 * decode["hot_misses"] / max(1, decode["selected_blocks"]), "unit": "%"},
                     {"name": "sync_recall_tpot_vs_resident", "value": sparse["tpot_ms"] / exact["tpot_ms"], "unit": "ratio of times"}])
