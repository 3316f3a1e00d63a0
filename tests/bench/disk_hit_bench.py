"""Time to first token of a prompt whose KV lies on a store's disk, against computing it again.

A cluster on this machine: one store whose arena holds a few prompts and spills to a folder, one prefill
worker, one decode worker. Each prompt of a series is asked once (nothing is stored: its time is that of
computing), and by the time the series is over the first ones have left memory. Those are asked again, in
the same order: what the figures say came from disk counts, and every token must be the same. The planner is
off, so that everything stored is fetched; --planner shows what it decides instead.
Adds its rows to the JSON file if that is there already.
usage: disk_hit_bench.py --bin DIR --model FOLDER --json FILE --folder DIR [--rounds N] [--words N] [--planner]
"""
import pathlib
import shutil
import statistics

from bench_cluster import BenchCluster, add_rows, argument_parser, fail

parser = argument_parser()
parser.add_argument("--folder", type=pathlib.Path, required=True)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--fill", type=int, default=4, help="prompts behind those, that push them out of memory")
parser.add_argument("--words", type=int, default=500)
parser.add_argument("--arena", default="96MiB")
parser.add_argument("--planner", action="store_true")
parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("/usr/share/common-licenses/GPL-3"))
args = parser.parse_args()
words = args.text.read_text().split()

shutil.rmtree(args.folder, ignore_errors=True)
args.folder.mkdir(parents=True)
with BenchCluster(args, store=f"""arena_bytes = "{args.arena}"
spill_folder = "{args.folder.resolve()}/store"
spill_bytes = "4GiB"
spill_one_time = true
spill_watermark_high = 60
spill_watermark_low = 40""", prefill=f"fetch_planner = {'true' if args.planner else 'false'}") as cluster:
    def ask(prompt):
        return cluster.ask(prompt, "--max-tokens", 1)

    prompts = [f"Prompt {i}. " + " ".join(words[i * 40:i * 40 + args.words])
               for i in range(args.rounds + args.fill + 1)]
    first = [ask(prompt) for prompt in prompts]
    if any(r["prefill"]["reused_tokens"] for r in first):
        fail("a prompt was reused the first time")
    again = [ask(prompt) for prompt in prompts[1:args.rounds + 1]]  # the first warmed up
shutil.rmtree(args.folder, ignore_errors=True)

computed = first[1:args.rounds + 1]
for i, (a, b) in enumerate(zip(computed, again)):
    if a["tokens"] != b["tokens"]:
        fail(f"prompt {i}: {a['tokens']} computed, {b['tokens']} from disk")
    if not args.planner and not b["prefill"]["disk_blocks"]:
        fail(f"prompt {i} was not on disk: a smaller --arena or more --fill")
tokens = statistics.mean(r["prompt_tokens"] for r in again)
disk_ms = statistics.median(r["ttft_ms"] for r in again)
computed_ms = statistics.median(r["ttft_ms"] for r in computed)
ratios = sorted(b["ttft_ms"] / a["ttft_ms"] for a, b in zip(computed, again))
read = statistics.mean(r["prefill"]["disk_bytes"] for r in again)
print(f"{args.rounds} prompts of about {tokens:.0f} tokens, planner {'on' if args.planner else 'off'}")
print(f"  computed        {computed_ms:8.1f} ms to the first token (median)")
print(f"  prefix on disk  {disk_ms:8.1f} ms, {read / 2**20:.1f} MiB from disk on average")
print(f"  ratio           {statistics.median(ratios):8.3f}    (least {ratios[0]:.3f}, most {ratios[-1]:.3f})")
declined = [r["prefill"]["declined"] for r in again if r["prefill"]["declined"]]
if declined:
    print(f"  declined        {len(declined)} of {args.rounds}: {declined[0]}")
add_rows(args.json, [{"name": "disk_hit_vs_recompute", "value": statistics.median(ratios), "unit": "ratio of times"},
                     {"name": "disk_hit_ttft_ms", "value": disk_ms, "unit": "ms"},
                     {"name": "recompute_ttft_ms", "value": computed_ms, "unit": "ms"}])
