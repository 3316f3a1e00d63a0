"""What the drivers of peers share: the conversation with peers_bench, and the blocks.

peers_bench starts `python DRIVER.py [OPTION...]`; the driver starts its other end and answers on its
standard output, one line per line of its standard input:

  (at start)   ready CLIENT_PID TARGET_PID | failed REASON
  load FILE    ok | failed REASON     takes the blocks of a case
  run          SECONDS                moves them all once, burst by burst
  check        ok | failed REASON     compares the destinations of the last burst with the sources

FILE is JSON: piece (bytes), arena and pool (bytes), bursts: a list of {src, dst}: offsets of the pieces
in the target's arena and in the client's pool. The arena holds a function of the offset.
"""
import json
import os
import subprocess
import sys
import time

import numpy as np

ARENA = 1 << 30
POOL = 1 << 29


def pattern(offset, size):
    words = np.arange(offset // 8, (offset + size) // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(0x5851F42D4C957F2D)).view(np.uint8)


def make_arena():
    arena = np.empty(ARENA, dtype=np.uint8)
    step = 1 << 26
    for at in range(0, ARENA, step):
        arena[at:at + step] = pattern(at, step)
    return arena


def start_target(arguments, meeting, environment=None):
    """Starts this driver as the other end; returns it once `meeting` exists."""
    target = subprocess.Popen([sys.executable, sys.argv[0], "--target", meeting, *arguments],
                              stdin=subprocess.PIPE, stdout=sys.stderr, env=environment)
    deadline = time.monotonic() + 60
    while not os.path.exists(meeting):
        if target.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the target did not start (exit code {target.poll()})")
        time.sleep(0.05)
    return target


def announce(meeting, text):
    """The target's word to the client; then waits until the client goes."""
    with open(meeting + ".new", "w") as out:
        out.write(text)
    os.rename(meeting + ".new", meeting)
    sys.stdin.read()


def check(pool, case):
    burst = case["bursts"][-1]
    piece = case["piece"]
    for src, dst in zip(burst["src"], burst["dst"]):
        if not np.array_equal(pool[dst:dst + piece], pattern(src, piece)):
            return f"failed the block of offset {src} differs"
    return "ok"


def say(text):
    os.write(ANSWERS, (text + "\n").encode())


# What libraries print must not look like an answer.
ANSWERS = os.dup(1)
os.dup2(2, 1)


def converse(target_pid, load, run, verify):
    """load(case); run() moves all bursts; verify(case) -> answer."""
    say(f"ready {os.getpid()} {target_pid}")
    case = None
    for line in sys.stdin:
        words = line.split()
        try:
            if words[0] == "load":
                with open(words[1]) as plan:
                    case = json.load(plan)
                load(case)
                say("ok")
            elif words[0] == "run":
                start = time.perf_counter()
                run()
                say(repr(time.perf_counter() - start))
            elif words[0] == "check":
                say(verify(case))
        except Exception as error:  # the conversation goes on
            say(f"failed {type(error).__name__}: {str(error)[:200]}")


def main(client):
    try:
        client()
    except Exception as error:
        say(f"failed {type(error).__name__}: {str(error)[:200]}")
