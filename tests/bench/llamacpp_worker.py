#!/usr/bin/env python3
"""llama.cpp as the other side of model_bench: reads one command a line, answers one line of seconds.

    llamacpp_worker.py MODEL.gguf THREADS

prefill N             one prompt of N tokens, logits of the last: seconds
decode B CONTEXT N    B sequences of CONTEXT tokens, then N steps of one token each: seconds a step
Through the C API (no sampling chain, no text): the time is llama_decode and an argmax.
"""
import ctypes
import sys
import time

import llama_cpp
import numpy as np


class Worker:
    def __init__(self, path, threads):
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"llamacpp_worker: cannot load {path}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 8192
        params.n_batch = 4096
        params.n_ubatch = 512
        params.n_seq_max = 8
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(4096, 0, 1)

    @staticmethod
    @llama_cpp.llama_log_callback
    def quiet(level, text, user):
        pass

    def run(self, rows):
        """rows: (token, position, sequence, wants logits)."""
        for i, (token, position, sequence, logits) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = logits
        self.batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            sys.exit("llamacpp_worker: llama_decode failed")

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def best(self, row):
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())

    def prefill(self, n):
        self.clear()
        rows = [(100 + i * 7 % 20000, i, 0, i == n - 1) for i in range(n)]
        start = time.perf_counter()
        self.run(rows)
        self.best(-1)
        return time.perf_counter() - start

    def decode(self, batch, context, steps):
        self.clear()
        for s in range(batch):
            self.run([(100 + (i + s) * 7 % 20000, i, s, i == context - 1) for i in range(context)])
        tokens = [100 + s for s in range(batch)]
        seconds = []
        for step in range(steps):
            start = time.perf_counter()
            self.run([(tokens[s], context + step, s, True) for s in range(batch)])
            tokens = [self.best(s) for s in range(batch)]
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))


def main():
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "prefill":
            print(worker.prefill(int(words[1])), flush=True)
        elif words[0] == "decode":
            print(worker.decode(*map(int, words[1:4])), flush=True)
        else:
            sys.exit(f"llamacpp_worker: unknown command {line!r}")


if __name__ == "__main__":
    main()
