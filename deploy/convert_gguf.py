#!/usr/bin/env python3
"""Converts a Llama GGUF with a byte-level BPE tokenizer to a Hugging Face folder in bf16.

    convert_gguf.py MODEL.gguf DEST

Quantised tensors are dequantised to f32 and rounded to bf16 (nearest, ties to even). GGUF's llama
architecture rotates neighbouring rows (2i, 2i+1) of each head; Hugging Face rotates halves
(i, i + head_dim/2): the rows of q_proj and k_proj are put back in that order. Only the `smollm`
pre-tokenizer is known: every digit alone, then the GPT-2 expression.
"""

import json
import pathlib
import sys

import gguf
import numpy as np
import safetensors
import tokenizers

BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def fail(message):
    sys.exit(f"convert_gguf: {message}")


def field(reader, name):
    entry = reader.fields.get(name)
    if entry is None:
        fail(f"{sys.argv[1]}: no field {name}")
    return entry.contents()


def to_bf16(values):
    """f32 array -> the upper 16 bits of each value, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if not np.isfinite(values).all():
        fail("a tensor holds values that are not finite")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def hf_name(name):
    if name in TOP_TENSORS:
        return TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_TENSORS and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{BLOCK_TENSORS[parts[2]]}.weight"
    fail(f"tensor {name}: not one of the Llama architecture")


def undo_rope_permutation(weights, heads):
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_weights(reader, config, path):
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = np.asarray(values, dtype=np.float32).reshape([int(n) for n in tensor.shape[::-1]])
        if tensor.name.endswith("attn_q.weight"):
            values = undo_rope_permutation(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = undo_rope_permutation(values, config["num_key_value_heads"])
        tensors[hf_name(tensor.name)] = to_bf16(values)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    entries = {
        name: safetensors.TensorSpec(dtype="bfloat16", shape=bits.shape,
                                     data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in tensors.items()
    }
    safetensors.serialize_file(entries, str(path), {"format": "pt"})
    path.chmod(0o644)  # the library makes it private
    return sum(bits.size for bits in tensors.values())


def make_config(reader):
    if field(reader, "general.architecture") != "llama":
        fail(f"architecture {field(reader, 'general.architecture')}: only llama is known")
    heads = int(field(reader, "llama.attention.head_count"))
    hidden = int(field(reader, "llama.embedding_length"))
    head_dim = int(field(reader, "llama.rope.dimension_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field(reader, "tokenizer.ggml.eos_token_id")),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(field(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(field(reader, "llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(field(reader, "llama.block_count")),
        "num_key_value_heads": int(field(reader, "llama.attention.head_count_kv")),
        "pad_token_id": int(field(reader, "tokenizer.ggml.padding_token_id")),
        "pretraining_tp": 1,
        # Stored as f32: the shortest decimal that gives the same f32 is what was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(field(reader, "llama.attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": float(field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(field(reader, "llama.vocab_size")),
    }


def make_tokenizer(reader):
    for name, known in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if field(reader, name) != known:
            fail(f"{name} is {field(reader, name)}: only {known} is known")
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    added = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": types[i] == CONTROL}
        for i in range(len(tokens)) if types[i] in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": dict(byte_level, add_prefix_space=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in field(reader, "tokenizer.ggml.merges")]},
    }


def make_tokenizer_config(reader, tokenizer):
    tokens = field(reader, "tokenizer.ggml.tokens")
    special = [a for a in tokenizer["added_tokens"] if a["special"]]
    bos, eos, unknown, pad = (tokens[field(reader, f"tokenizer.ggml.{name}_token_id")]
                              for name in ("bos", "eos", "unknown", "padding"))
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(a["id"]): {key: a[key] for key in a if key != "id"} for a in tokenizer["added_tokens"]},
        "additional_special_tokens": [a["content"] for a in special if a["content"] in (bos, eos)],
        "bos_token": bos,
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": int(field(reader, "llama.context_length")),
        "pad_token": pad,
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": unknown,
        "vocab_size": len(tokens),
    }


def check_folder(dest, config):
    """Reads back what was written: the tokenizer as its library loads it, the tensors' names."""
    tokenizer = tokenizers.Tokenizer.from_file(str(dest / "tokenizer.json"))
    text = "It's 2024:\n\n  naïve café, 東京 🙂 don't\t\t x<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        fail("the tokenizer written does not give a text back")
    if ids[-1] != config["eos_token_id"]:
        fail("the tokenizer written does not know the end token")
    with safetensors.safe_open(str(dest / "model.safetensors"), framework="numpy") as weights:
        expected = 9 * config["num_hidden_layers"] + 2 + (not config["tie_word_embeddings"])
        if len(weights.keys()) != expected:
            fail(f"{len(weights.keys())} tensors written, expected {expected}")


def main():
    if len(sys.argv) != 3:
        fail("usage: convert_gguf.py MODEL.gguf DEST")
    dest = pathlib.Path(sys.argv[2])
    dest.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(sys.argv[1])
    config = make_config(reader)
    tokenizer = make_tokenizer(reader)
    parameters = write_weights(reader, config, dest / "model.safetensors")
    generation = {"_from_model_config": True, "bos_token_id": config["bos_token_id"],
                  "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    for name, content in (("config.json", config), ("generation_config.json", generation),
                          ("tokenizer.json", tokenizer),
                          ("tokenizer_config.json", make_tokenizer_config(reader, tokenizer))):
        (dest / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n",
                                 encoding="utf-8")
    check_folder(dest, config)
    print(f"convert_gguf: {parameters / 1e6:.1f} M parameters in bf16 to {dest}")


if __name__ == "__main__":
    main()
