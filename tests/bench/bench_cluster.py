"""A cluster on this machine for a benchmark: started by `kvtide up`, asked by `kvtide generate`.

    with BenchCluster(args, store='arena_bytes = "1GiB"') as cluster:
        answer = cluster.ask(prompt, "--max-tokens", 1)

One prefill and one decode worker with 512 MiB of slots. Whatever fails ends the program with the benchmark's name.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

START_S, ASK_S, STOP_S = 120, 300, 60


def argument_parser():
    """With what every benchmark of a cluster takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    return parser


def fail(message):
    sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {message}")


def call(command, timeout, stdin=None):
    command = [str(part) for part in command]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        fail(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def add_rows(path, rows):
    """To the results that are there already."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    path.write_text(json.dumps({"rows": before + rows}, indent=1) + "\n")


class BenchCluster:
    """The keys are lines of the tables of cluster.toml."""

    def __init__(self, args, store, prefill="", decode="", model=""):
        self._bin, self._model_folder = args.bin, args.model.resolve()
        self._tables = {"model": model, "[store]": store,
                        "[prefill]": 'slots_bytes = "512MiB"\n' + prefill,
                        "[decode]": 'slots_bytes = "512MiB"\n' + decode}

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="kvt_bench_")
        self._run_dir = pathlib.Path(self._folder.name) / "run"
        config = pathlib.Path(self._folder.name) / "cluster.toml"
        text = f'[cluster]\nname = "bench"\nmodel_folder = "{self._model_folder}"\n'
        config.write_text(text + "".join(f"[{name}]\n{keys}\n" for name, keys in self._tables.items() if keys))
        call([self._bin / "kvtide", "up", "--config", config, "--run-dir", self._run_dir], START_S)
        return self

    def __exit__(self, *_):
        call([self._bin / "kvtide", "down", "--run-dir", self._run_dir], STOP_S)
        self._folder.cleanup()

    def ask(self, prompt, *options):
        """What `kvtide generate -o json` says."""
        return json.loads(call([self._bin / "kvtide", "generate", "--run-dir", self._run_dir, "--file", "-",
                                *options, "-o", "json"], ASK_S, prompt))
