#!/usr/bin/env python3
"""Makes the goldens that kvtide's transformer is compared with (tests/kernels/model_golden_test.cc).

    make_model_goldens.py MODEL_FOLDER PROSE.txt
    make_model_goldens.py --random             the random folders' only

MODEL_FOLDER is what deploy/fetch_model.sh makes; PROSE.txt is any English text of 2,048 tokens or
more (the committed goldens: chapter 4.1 of The Rust Programming Language). Run with the python of
tests/support/llamacpp_venv.sh; takes about two minutes. Writes beside this script:
  smollm2_goldens.bin   llama.cpp on an F32 GGUF of the same bf16 weights, KV cache in F32, no flash
                        attention: an implementation of its own. reference.py, in f64, must agree on
                        the short prompts (mean KL <= 1e-8).
  random_goldens.bin    reference.py on the folders of make_random_model.py; llama.cpp must agree.

Format, little-endian, no padding (read by tests/support/model_goldens.h):
  "KVTGOLD1"  u32 prompts
  prompt:     u32 name bytes, name | u32 tokens, i32 ids[tokens]
              u32 tops   { u32 position | u16 ids[8]   | f32 log_probabilities[8] }
              u32 dists  { u32 position | u32 n | u16 ids[n] | f32 log_probabilities[n] | f32 log_rest }
A top is the 8 likeliest tokens after the prompt's first position + 1 tokens. A dist is the n (at most
512) likeliest and the probability of all the others together. The KL divergence over those n + 1
bins is a lower bound of the whole one (merging bins never adds), and all of it but what lies within
the rest, whose mass the script prints.
"""

import json
import pathlib
import struct
import sys
import tempfile

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import hf_to_gguf  # noqa: E402
import make_random_model  # noqa: E402
import reference  # noqa: E402

GPL = pathlib.Path("/usr/share/common-licenses/GPL-3")
DIST_TOKENS = 512
LONG_TOKENS, PROSE_TOKENS, LONG_DISTS = 4000, 2048, 128
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SHORT = {
    "chat": f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nWhat is the capital of France?"
            "<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris.",
    "story": "Once upon a time, in a village by the sea, there lived a clockmaker who could not sleep.",
    "code": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "numbers": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    "foreign": "L'été dernier, 東京で会いました。 Привет!",
    "one token": "The",
}


class LlamaCpp:
    """Logits of whole prompts, f32 weights, f32 KV, no flash attention."""

    def __init__(self, path, context):
        import llama_cpp
        self.model = llama_cpp.Llama(str(path), n_ctx=context, n_batch=512, n_ubatch=512, n_threads=2,
                                     n_threads_batch=2, logits_all=True, flash_attn=False, type_k=0,
                                     type_v=0, verbose=False)

    def logits(self, ids):
        self.model.reset()
        self.model.eval(list(ids))
        return np.array(self.model.scores[:len(ids)], dtype=np.float32)


def kl(reference_log, other_log):
    return float(np.mean(np.sum(np.exp(reference_log) * (reference_log - other_log), axis=-1)))


def pack(name, ids, logits, dist_positions, rests):
    """One prompt of the format, from f32 or f64 logits [len(ids), vocab]."""
    out = [struct.pack("<I", len(name)), name.encode(), struct.pack("<I", len(ids)),
           np.asarray(ids, dtype="<i4").tobytes(), struct.pack("<I", len(ids))]
    dists = []
    wanted = set(dist_positions)
    for position in range(len(ids)):
        log = reference.log_softmax(logits[position])
        top = np.argsort(-log, kind="stable")[:min(DIST_TOKENS, len(log))]
        out.append(struct.pack("<I", position) + top[:8].astype("<u2").tobytes() +
                   log[top[:8]].astype("<f4").tobytes())
        if position in wanted:
            rest = np.delete(np.exp(log), top).sum()
            rests.append(rest)
            dists.append(struct.pack("<II", position, len(top)) + top.astype("<u2").tobytes() +
                         log[top].astype("<f4").tobytes() +
                         struct.pack("<f", np.log(rest) if rest > 0 else -1e30))
    return b"".join(out) + struct.pack("<I", len(dists)) + b"".join(dists)


def write(path, prompts, rests):
    path.write_bytes(b"KVTGOLD1" + struct.pack("<I", len(prompts)) + b"".join(prompts))
    print(f"{path.name}: {len(prompts)} prompts, {path.stat().st_size} bytes; mass beyond the dists: "
          f"mean {np.mean(rests):.2e}, largest {np.max(rests):.2e}")


def agree(name, reference_logits, other, kl_max):
    a, b = reference.log_softmax(reference_logits), reference.log_softmax(other)
    divergence, largest = kl(a, b), np.max(np.abs(a - b))
    print(f"  {name}: KL of llama.cpp and f64 {divergence:.1e}, largest difference {largest:.1e}")
    if not divergence <= kl_max:
        sys.exit(f"make_model_goldens: {name}: llama.cpp and reference.py differ")


def smollm2(folder, prose, scratch):
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    hf_to_gguf.convert(folder, scratch / "model.gguf", "f32")
    model = LlamaCpp(scratch / "model.gguf", 4096)
    weights = hf_to_gguf.read_weights(folder)
    prompts, rests = [], []
    for name, text in SHORT.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        logits = model.logits(ids)
        agree(name, reference.logits(weights, config, ids), logits, 1e-8)
        prompts.append(pack(name, ids, logits, range(len(ids)), rests))
    for name, path, count in (("gpl", GPL, LONG_TOKENS), ("prose", prose, PROSE_TOKENS)):
        ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids[:count]
        if len(ids) < count:
            sys.exit(f"make_model_goldens: {path}: {len(ids)} tokens, {count} needed")
        positions = [count * (i + 1) // LONG_DISTS - 1 for i in range(LONG_DISTS)]
        prompts.append(pack(name, ids, model.logits(ids), positions, rests))
    write(HERE / "smollm2_goldens.bin", prompts, rests)


def random_models(scratch):
    prompts, rests = [], []
    for name in make_random_model.SPECS:
        folder = scratch / name
        make_random_model.make_folder(name, folder)
        config = json.loads((folder / "config.json").read_text())
        hf_to_gguf.convert(folder, scratch / f"{name}.gguf", "f32")
        model = LlamaCpp(scratch / f"{name}.gguf", 512)
        weights = hf_to_gguf.read_weights(folder)
        for count in (37, 330):
            draws = make_random_model.counter_random(1000 + count, count)
            ids = [int(draw) for draw in draws % np.uint64(config["vocab_size"])]
            logits = reference.logits(weights, config, ids)
            agree(f"{name} {count}", logits, model.logits(ids), 1e-8)
            prompts.append(pack(name, ids, logits, range(0, count, 11), rests))
    write(HERE / "random_goldens.bin", prompts, rests)


def main():
    only_random = sys.argv[1:] == ["--random"]
    if len(sys.argv) != 3 and not only_random:
        sys.exit("usage: make_model_goldens.py MODEL_FOLDER PROSE.txt | --random")
    with tempfile.TemporaryDirectory() as scratch:
        random_models(pathlib.Path(scratch))
        if only_random:
            return
        smollm2(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(scratch))


if __name__ == "__main__":
    main()
