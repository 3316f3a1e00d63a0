#!/usr/bin/env python3
"""Makes nfc_goldens.json with this Python's unicodedata.

    make_nfc_goldens.py

"ranges": for each, the SHA-256 of three lines for each of its code points c but surrogates, the NFC
of c, of "a" c and of c U+0301 U+0323. "strings": texts with their NFC, random but for the first few.
The Python must have the Unicode version of kernels/model/unicode_nfc_table.inc.
"""
import hashlib
import json
import pathlib
import random
import sys
import unicodedata

OUTPUT = pathlib.Path(__file__).parent / "nfc_goldens.json"


def nfc(text):
    return unicodedata.normalize("NFC", text)


def ranges():
    first = 0
    while first <= sys.maxunicode:
        last = first + (0xFFF if first < 0x30000 else 0xFFFF)
        digest = hashlib.sha256()
        for code_point in range(first, last + 1):
            if 0xD800 <= code_point < 0xE000:
                continue
            c = chr(code_point)
            for text in (c, "a" + c, c + "\u0301\u0323"):
                digest.update((nfc(text) + "\n").encode())
        yield {"first": first, "last": last, "sha256": digest.hexdigest()}
        first = last + 1


def strings():
    yield ""
    yield "plain"
    yield "\u0301"
    yield "e\u0301 and \u00e9"
    yield "q\u0307\u0323 q\u0323\u0307"  # no composite; only the order changes
    yield "a\u0328\u0301 a\u0301\u0328 \u0105\u0301"
    yield "\u1100\u1161\u11a8\u1100\u1161 \uac00\u11a8 \uac01\u11a8 \u1161\u11a8 \u1100\u1100\u1161"
    yield "\u0958 \u0915\u093c \u2126 \u212b \uf900 \U0002f800"  # never composed again
    yield "\u09c7\u09be \u09c7\u09cd\u09be \u0b47\u0b57"  # a mark between blocks one of class 0
    yield "\U000110a5\U000110ba \U0001d15e"
    yield "e" + "\u0301\u0323" * 40 + "f" + "\u0345\u0301\u0334" * 40
    generator = random.Random(15)
    points = [c for c in range(0x30000) if not 0xD800 <= c < 0xE000]
    marks = [c for c in points if unicodedata.combining(chr(c))]
    changing = [c for c in points if unicodedata.normalize("NFD", chr(c)) != chr(c)
                and not 0xAC00 <= c < 0xD7A4]
    parts = sorted({ord(p) for c in changing for p in unicodedata.normalize("NFD", chr(c))})
    pools = [marks, changing, parts, range(0x20, 0x7F), range(0xA0, 0x250), range(0x1100, 0x1200),
             range(0xAC00, 0xD7A4), range(0x591, 0x6DD), range(0x900, 0xE60)]
    for _ in range(240):
        pool = generator.sample(pools, 3)
        yield "".join(chr(generator.choice(generator.choice(pool)))
                      for _ in range(generator.randrange(1, 13)))


def main():
    content = {"unicode": unicodedata.unidata_version, "ranges": list(ranges()),
               "strings": [[text, nfc(text)] for text in strings()]}
    OUTPUT.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size} bytes, Unicode {content['unicode']}")


if __name__ == "__main__":
    main()
