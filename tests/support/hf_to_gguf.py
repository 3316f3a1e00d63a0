#!/usr/bin/env python3
"""Converts a Hugging Face Llama, Qwen2 or Qwen3 folder (bf16, fp16 or f32 safetensors) to GGUF for llama.cpp.

    hf_to_gguf.py FOLDER OUT.gguf [--type f32|bf16]

The weights are the same numbers: bf16 is exact in f32. Rows of a Llama's q and k are permuted from Hugging
Face's order (halves rotate together) to llama.cpp's (neighbours do). With --type bf16 matrices stay
bf16 and vectors are f32, as llama.cpp wants them. A folder without tokenizer.json gets a
vocabulary of placeholders, so that llama.cpp loads it; only token ids make sense then.
Needs gguf, numpy (and nothing that reads bf16: safetensors are read here).
"""

import argparse
import json
import pathlib
import sys

import gguf
import numpy as np

BLOCK_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def read_safetensors(path):
    """name -> f32 array."""
    blob = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int(blob[:8].view(np.uint64)[0])
    header = json.loads(blob[8:8 + header_bytes].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        raw = np.array(blob[begin:end])
        if entry["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]])
        tensors[name] = values.astype(np.float32).reshape(entry["shape"])
    return tensors


def read_weights(folder):
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors = {}
    for file in files:
        tensors.update(read_safetensors(folder / file))
    return tensors


def gguf_name(name):
    if name in TOP_TENSORS:
        return TOP_TENSORS[name]
    stem, kind = name.rsplit(".", 1)
    parts = stem.split(".", 3)
    return f"blk.{parts[2]}.{BLOCK_TENSORS[parts[3]]}.{kind}"


def permute(weights, heads):
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def to_bf16(values):
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def add_tokenizer(writer, folder, config):
    path = folder / "tokenizer.json"
    writer.add_tokenizer_model("gpt2")
    if path.exists():
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocab = {i: token for token, i in tokenizer["model"]["vocab"].items()}
        special = {}
        for added in tokenizer["added_tokens"]:
            vocab[added["id"]] = added["content"]
            special[added["id"]] = added["special"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        writer.add_tokenizer_pre("smollm")
    else:
        vocab, special, merges = {0: "!"}, {}, ["! !"]
        writer.add_tokenizer_pre("gpt-2")
    size = config["vocab_size"]
    types = gguf.TokenType
    writer.add_token_list([vocab.get(i, f"<unused_{i}>") for i in range(size)])
    writer.add_token_types([
        types.UNUSED if i not in vocab else
        types.NORMAL if i not in special else
        types.CONTROL if special[i] else types.USER_DEFINED for i in range(size)])
    writer.add_token_merges(merges)
    eos = config.get("eos_token_id") or 0
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def convert(folder, out, kind):
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(out), config["model_type"])
    writer.add_name(folder.name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    bf16 = kind == "bf16"
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if bf16 else gguf.LlamaFileType.ALL_F32)
    add_tokenizer(writer, folder, config)
    for name, values in sorted(read_weights(folder).items()):
        if config["model_type"] != "llama":
            pass  # llama.cpp rotates halves there, too
        elif name.endswith("q_proj.weight"):
            values = permute(values, heads)
        elif name.endswith("k_proj.weight"):
            values = permute(values, kv_heads)
        if bf16 and values.ndim == 2:
            writer.add_tensor(gguf_name(name), to_bf16(values).view(np.uint8),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--type", choices=["f32", "bf16"], default="f32")
    options = parser.parse_args()
    try:
        convert(options.folder, options.out, options.type)
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"hf_to_gguf: {options.folder}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
