#!/usr/bin/env python3
"""Writes unicode_nfc_table.inc, the tables of unicode_nfc.cc, from this Python's Unicode data.

    unicode_nfc_table.py

Three tables, each sorted by code point: the combining classes as ranges, the canonical
decompositions into two code points with a mark for those that composition does not make again,
and those into one. Hangul syllables are not in them: they are computed. Run it again to take a
newer Unicode; tests/support/goldens/make_nfc_goldens.py then makes new goldens.
"""
import pathlib
import sys
import unicodedata

OUTPUT = pathlib.Path(__file__).parent / "unicode_nfc_table.inc"
COLUMNS = 98


def rows(name, kind, entries):
    yield f"constexpr {kind} {name}[] = {{"
    line = "   "
    for entry in entries:
        text = " {" + ", ".join(entry) + "},"
        if len(line) + len(text) > COLUMNS:
            yield line
            line = "   "
        line += text
    yield line
    yield "};"


def main():
    classes, pairs, singles = [], [], []
    for code_point in range(sys.maxunicode + 1):
        character = chr(code_point)
        combining = unicodedata.combining(character)
        if combining:
            if classes and classes[-1][1:] == [code_point - 1, combining]:
                classes[-1][1] = code_point
            else:
                classes.append([code_point, code_point, combining])
        mapping = unicodedata.decomposition(character)
        if not mapping or mapping.startswith("<"):
            continue
        parts = mapping.split()
        if len(parts) == 1:
            singles.append((f"0x{code_point:X}", f"0x{parts[0]}"))
        else:
            composes = unicodedata.normalize("NFC", character) == character
            pairs.append((f"0x{code_point:X}", f"0x{parts[0]}", f"0x{parts[1]}",
                          "1" if composes else "0"))
    end = 1 + max(classes[-1][1], int(pairs[-1][0], 16), int(singles[-1][0], 16))
    lines = [
        f"// Made by unicode_nfc_table.py from Unicode {unicodedata.unidata_version}; do not edit.",
        f'constexpr char kUnicodeVersion[] = "{unicodedata.unidata_version}";',
        "// Nothing at or beyond it is in the tables.",
        f"constexpr uint32_t kTableEnd = 0x{end:X};",
        "// {first, last, combining class}",
        *rows("kClassRanges", "ClassRange",
              [(f"0x{a:X}", f"0x{b:X}", str(c)) for a, b, c in classes]),
        "// {code point, its two parts, whether they compose to it again}",
        *rows("kPairs", "Pair", pairs),
        "// {code point, what stands for it}",
        *rows("kSingles", "Single", singles),
    ]
    OUTPUT.write_text("\n".join(lines) + "\n")
    print(f"{OUTPUT.name}: {len(classes)} ranges, {len(pairs)} pairs, {len(singles)} singles")


if __name__ == "__main__":
    main()
