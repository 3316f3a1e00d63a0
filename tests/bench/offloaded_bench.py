"""Several offloaded requests at once on one decode worker against one alone: tokens a second, and what a step pulls.

A cluster on this machine (coordinator, two stores, one prefill worker, one decode worker) with the calibration.
Prompts of 4,400 to 5,800 tokens of real text, no two with a common beginning; all are asked once before, so that
their KV and digests are in the stores. Then the first 1, 2, 4 and 8 of them at once. Figures are those of the decode worker's
metrics over the time in which all of them step. Pulls a step count what the whole batch asks for: at most one a layer.
usage: offloaded_bench.py --bin DIR --model FOLDER --calibration FILE --text FILE... --json FILE
                          [--batch N...] [--budget N] [--output N] [--rounds N]
"""
import concurrent.futures
import pathlib
import socket
import threading
import time
import urllib.request

from bench_cluster import BenchCluster, add_rows, argument_parser, fail

PROMPT_TOKENS = [5000, 5200, 4800, 5400, 4600, 5600, 4400, 5800]  # the first few are of one mean
POLL_S = 0.05
WINDOW_STEPS_MIN = 20
COUNTED = ["tokens", "offloaded_steps", "step_pulls", "step_bursts", "step_bytes", "hot_misses", "selected_blocks"]

parser = argument_parser()
parser.add_argument("--calibration", type=pathlib.Path, required=True)
parser.add_argument("--text", type=pathlib.Path, required=True, nargs="+")
parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
parser.add_argument("--budget", type=int, default=1024)
parser.add_argument("--output", type=int, default=256)
parser.add_argument("--rounds", type=int, default=2)
args = parser.parse_args()
if not all(1 <= n <= len(PROMPT_TOKENS) for n in args.batch):
    fail(f"--batch: 1 to {len(PROMPT_TOKENS)}")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Metrics:
    """Samples of the decode worker, as long as it lives."""

    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._samples, self._stop = [], threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _poll(self):
        while not self._stop.wait(POLL_S):
            with urllib.request.urlopen(self._url, timeout=10) as reply:
                lines = reply.read().decode().splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvtide_decode_") and "{" not in line)
            sample = {name: float(values[f"kvtide_decode_{name}_total"]) for name in COUNTED}
            sample["running"] = float(values["kvtide_decode_running_sequences"])
            sample["time"] = time.monotonic()
            self._samples.append(sample)

    def window(self, running):
        """What was counted between the first and the last sample with so many sequences in the batch."""
        inside = [s for s in self._samples if s["running"] == running]
        if len(inside) < 2:
            fail(f"{running} requests never stepped together; --output is too small for this machine")
        counted = {name: inside[-1][name] - inside[0][name] for name in COUNTED + ["time"]}
        if counted["offloaded_steps"] < WINDOW_STEPS_MIN:
            fail(f"{counted['offloaded_steps']:.0f} steps of {running} together; --output is too small")
        return counted


text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in args.text)
port = free_port()
totals = {n: dict.fromkeys(COUNTED + ["time"], 0.0) for n in args.batch}
with BenchCluster(args, store='count = 2\narena_bytes = "1GiB"',
                  model=f'calibration = "{args.calibration.resolve()}"',
                  prefill=f"selection_tokens = {args.budget}",
                  decode=f'sparse_budget = {args.budget}\nnode = {{ metrics_listen = "127.0.0.1:{port}" }}') as cluster:
    def ask(prompt, output):
        return cluster.ask(prompt, "--max-tokens", output, "--ignore-eos", "--fidelity", "sparse")

    piece = text[:8000]
    rate = len(piece) / ask(piece, 1)["prompt_tokens"]
    prompts = []
    for i, tokens in enumerate(PROMPT_TOKENS[:max(args.batch)]):
        begin = i * len(text) // len(PROMPT_TOKENS)
        count = int(tokens * rate)
        prompts.append((text + text)[begin:begin + count])
        if len(prompts[-1]) < count:
            fail("--text: too short")
    for prompt in prompts:
        ask(prompt, 1)
    for turn in range(args.rounds):
        for n in args.batch if turn % 2 == 0 else reversed(args.batch):
            with Metrics(port) as metrics, concurrent.futures.ThreadPoolExecutor(n) as pool:
                answers = list(pool.map(lambda prompt: ask(prompt, args.output), prompts[:n]))
            if not all(answer["decode"]["offloaded"] for answer in answers):
                fail("a request was served resident")
            for name, value in metrics.window(n).items():
                totals[n][name] += value

rows = []
print(f"budget {args.budget}; prompts of {min(PROMPT_TOKENS)} to {max(PROMPT_TOKENS)} tokens, about")
print("requests   steps  ms/step  tokens/s   of one  pulls/step  bursts/step   MB/step  kB/token  misses %")
base = None
for n in args.batch:
    t = totals[n]
    steps = t["offloaded_steps"]
    rate = t["tokens"] / t["time"]
    base = base or rate
    print(f"{n:8d} {steps:7.0f} {1000 * t['time'] / steps:8.1f} {rate:9.1f} {rate / base:8.2f} "
          f"{t['step_pulls'] / steps:11.1f} {t['step_bursts'] / steps:12.1f} {t['step_bytes'] / steps / 1e6:9.2f} "
          f"{t['step_bytes'] / t['tokens'] / 1e3:9.0f} {100 * t['hot_misses'] / t['selected_blocks']:9.1f}")
    rows += [{"name": f"offloaded_tokens_per_s_{n}", "value": rate, "unit": "1/s"},
             {"name": f"offloaded_step_pulls_{n}", "value": t["step_pulls"] / steps, "unit": "1/step"},
             {"name": f"offloaded_step_bursts_{n}", "value": t["step_bursts"] / steps, "unit": "1/step"},
             {"name": f"offloaded_step_bytes_{n}", "value": t["step_bytes"] / steps, "unit": "bytes"}]
add_rows(args.json, rows)
