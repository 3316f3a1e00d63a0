"""A Llama, Qwen2 or Qwen3 forward pass in numpy, f64, as plainly as it can be written: the arithmetic that the
goldens stand for, independent of llama.cpp and of kvtide's kernels."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, theta):
    """x [positions, heads, head_dim]: element i rotates with i + head_dim / 2."""
    positions, _, dim = x.shape
    angles = np.outer(np.arange(positions), theta ** (-np.arange(0, dim, 2) / dim))[:, None, :]
    low, high = x[..., :dim // 2], x[..., dim // 2:]
    return np.concatenate([low * np.cos(angles) - high * np.sin(angles),
                           high * np.cos(angles) + low * np.sin(angles)], axis=-1)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(x):
    x = np.asarray(x, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def attention(q, k, v, group):
    """q [n, heads, d], k and v [n, kv_heads, d]; causal. -> [n, heads * d]"""
    n, heads, dim = q.shape
    out = np.empty((n, heads, dim))
    hidden_ones = np.triu(np.full((n, n), -np.inf), 1)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(dim) + hidden_ones
        out[:, head] = softmax(scores) @ v[:, head // group]
    return out.reshape(n, heads * dim)


def logits(weights, config, ids):
    """weights: name -> array, as hf_to_gguf.read_weights gives them. -> f64 [len(ids), vocab]"""
    w = {name: np.asarray(values, dtype=np.float64) for name, values in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps, n = config["head_dim"], config["rms_norm_eps"], len(ids)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        def weight(name):
            return w[f"model.layers.{layer}.{name}.weight"]
        h = rms_norm(x, weight("input_layernorm"), eps)
        def project(name):
            bias = w.get(f"model.layers.{layer}.self_attn.{name}.bias", 0)  # Qwen2
            return h @ weight(f"self_attn.{name}").T + bias
        q = project("q_proj").reshape(n, heads, dim)
        k = project("k_proj").reshape(n, kv_heads, dim)
        v = project("v_proj").reshape(n, kv_heads, dim)
        if config["model_type"] == "qwen3":
            q = rms_norm(q, weight("self_attn.q_norm"), eps)
            k = rms_norm(k, weight("self_attn.k_norm"), eps)
        q, k = rope(q, config["rope_theta"]), rope(k, config["rope_theta"])
        x = x + attention(q, k, v, heads // kv_heads) @ weight("self_attn.o_proj").T
        h = rms_norm(x, weight("post_attention_layernorm"), eps)
        gate = h @ weight("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    x = rms_norm(x, w["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return x @ w[head].T
