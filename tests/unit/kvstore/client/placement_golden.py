#!/usr/bin/env python3
"""Recomputes the owners pinned in placement_test.cc, independently of placement.cc."""
import math

M = (1 << 64) - 1


def mix(z):
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9 & M
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb & M
    return z ^ (z >> 31)


def draw(seed, counter):
    return mix((mix((seed + 0x9e3779b97f4a7c15) & M) + counter * 0x9e3779b97f4a7c15 +
                0x632be59bd9b4e019) & M)


def name_hash(name):
    h = 0xcbf29ce484222325
    for c in name.encode():
        h = (h ^ c) * 0x100000001b3 & M
    return mix(h)


def owner(key, names):
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    seed = low ^ mix(high)
    scores = [1 / -math.log(((draw(seed, name_hash(n)) >> 11) + 0.5) * 2.0**-53) for n in names]
    return scores.index(max(scores))


print("".join(str(owner(bytes([i] * 16), ["store-0", "store-1", "store-2"])) for i in range(16)))
