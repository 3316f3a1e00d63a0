#!/usr/bin/env python3
"""Makes small Llama, Qwen2 and Qwen3 folders with weights from a seed, bit for bit the same as
tests/support/random_model.{h,cc} makes them.

    make_random_model.py NAME DEST        NAME: one of SPECS

Weight i of tensor t (t counts in the order of tensor_shapes): with r = CounterRandom(seed + t, i)
(kernels/base/random.h) a matrix's or a bias's is scale * (int(r >> 56) - 128) / 128, scale a power of two, and a
norm's is (128 + (r >> 57)) / 256. All are exact in bf16, fp16 and f32, so the file's type does not
change the model. There is no tokenizer: token ids only.
"""

import json
import pathlib
import sys

import numpy as np

# name -> seed, heads, kv_heads, head_dim, hidden, intermediate, vocab, tied, dtype, shards, family
SPECS = {
    "gqa1_d64_tied": (101, 4, 4, 64, 256, 384, 512, True, "BF16", 1, "llama"),
    "gqa4_d64": (102, 8, 2, 64, 320, 448, 512, False, "F16", 1, "llama"),
    "gqa8_d128": (103, 8, 1, 128, 256, 512, 512, False, "F32", 3, "llama"),
    "gqa1_d128_odd": (104, 2, 2, 128, 192, 352, 517, False, "BF16", 2, "llama"),
    "qwen2_gqa4_d64": (105, 4, 1, 64, 256, 384, 512, True, "BF16", 1, "qwen2"),
    "qwen3_gqa2_d128": (106, 4, 2, 128, 192, 352, 512, False, "BF16", 2, "qwen3"),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LAYERS = 2
NUMPY_TYPES = {"F32": np.float32, "F16": np.float16}


def mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def counter_random(seed, count):
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        start = mix(np.array([seed], dtype=np.uint64) + golden)
        return mix(start + np.arange(count, dtype=np.uint64) * golden + np.uint64(0x632BE59BD9B4E019))


def make_config(name):
    _, heads, kv_heads, head_dim, hidden, intermediate, vocab, tied, dtype, _, family = SPECS[name]
    return {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "hidden_act": "silu",
        "num_hidden_layers": LAYERS, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": vocab, "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
    }


def tensor_shapes(config):
    """(name, shape, scale of a matrix or a bias, or None for a norm), in the order that numbers them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    # A tied matrix of scale 1 would make every token predict itself, almost surely.
    scale = 0.125 if config["tie_word_embeddings"] else 1.0
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), scale
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), None
        yield prefix + "self_attn.q_proj.weight", (q, hidden), 0.25
        yield prefix + "self_attn.k_proj.weight", (kv, hidden), 0.25
        yield prefix + "self_attn.v_proj.weight", (kv, hidden), 0.125
        yield prefix + "self_attn.o_proj.weight", (hidden, q), 0.125
        yield prefix + "post_attention_layernorm.weight", (hidden,), None
        yield prefix + "mlp.gate_proj.weight", (inner, hidden), 0.125
        yield prefix + "mlp.up_proj.weight", (inner, hidden), 0.125
        yield prefix + "mlp.down_proj.weight", (hidden, inner), 0.125
        if config["model_type"] == "qwen2":
            yield prefix + "self_attn.q_proj.bias", (q,), 0.5
            yield prefix + "self_attn.k_proj.bias", (kv,), 0.5
            yield prefix + "self_attn.v_proj.bias", (kv,), 0.5
        if config["model_type"] == "qwen3":
            yield prefix + "self_attn.q_norm.weight", (config["head_dim"],), None
            yield prefix + "self_attn.k_norm.weight", (config["head_dim"],), None
    yield "model.norm.weight", (hidden,), None
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden), 0.25


def make_weights(name):
    seed, weights = SPECS[name][0], {}
    for t, (tensor, shape, scale) in enumerate(tensor_shapes(make_config(name))):
        random = counter_random(seed + t, int(np.prod(shape)))
        if scale is None:
            values = (128 + (random >> np.uint64(57)).astype(np.float32)) / 256
        else:
            values = ((random >> np.uint64(56)).astype(np.float32) - 128) * np.float32(scale / 128)
        weights[tensor] = values.reshape(shape)
    return weights


def to_bytes(values, dtype):
    if dtype == "BF16":
        bits = values.view(np.uint32)
        assert not (bits & 0xFFFF).any()
        return (bits >> 16).astype(np.uint16).tobytes()
    assert (values.astype(NUMPY_TYPES[dtype]).astype(np.float32) == values).all()
    return values.astype(NUMPY_TYPES[dtype]).tobytes()


def write_file(path, tensors, dtype):
    header, data = {}, b""
    for name, values in tensors.items():
        raw = to_bytes(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_folder(name, dest):
    dest = pathlib.Path(dest)
    dest.mkdir(parents=True, exist_ok=True)
    weights, dtype, shards = make_weights(name), SPECS[name][8], SPECS[name][9]
    (dest / "config.json").write_text(json.dumps(make_config(name), indent=2) + "\n")
    if shards == 1:
        write_file(dest / "model.safetensors", weights, dtype)
        return
    names, weight_map = list(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {n: weights[n] for n in names[shard::shards]}
        write_file(dest / file, part, dtype)
        weight_map.update({n: file for n in part})
    (dest / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SPECS:
        sys.exit(f"usage: make_random_model.py NAME DEST; NAME is one of {', '.join(SPECS)}")
    make_folder(sys.argv[1], sys.argv[2])
