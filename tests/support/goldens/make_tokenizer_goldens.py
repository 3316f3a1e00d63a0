#!/usr/bin/env python3
"""Makes the tokenizer goldens with the tokenizers library, and checks llama.cpp against them.

    make_tokenizer_goldens.py MODEL_FOLDER [VOCAB.gguf]

MODEL_FOLDER is what deploy/fetch_model.sh makes. Writes beside this script:
  tokenizer_goldens.json            texts with the ids of the model's tokenizer.json
  small_{llama3,gpt2,qwen}/tokenizer.json, small_{llama3,gpt2,qwen}.json
                                    three tokenizers of 700 tokens, trained here, with goldens
With VOCAB.gguf (the GGUF the folder was made from) llama.cpp must give the same ids; the texts
marked "llamacpp": false are those where the two libraries differ (see DIFFERS).
Run with the python of tests/support/llamacpp_venv.sh.
"""

import json
import pathlib
import random
import sys
import unicodedata

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
GPL = pathlib.Path("/usr/share/common-licenses/GPL-3").read_text(encoding="utf-8")

# llama.cpp keeps bytes without a token apart while merging, the library drops them first.
DIFFERS = {"bytes without a token"}

CODE = '''#include <vector>\ntemplate <typename T>\nclass Queue {\n public:\n\tvoid Push(T&& value) { items_.push_back(std::move(value)); }\n\n  // 0x1F & ~mask | (a << 3) != b->c[12]\n private:\n  std::vector<T> items_;\n};\n\ndef f(x, *args, **kw):\n    """Doc."""\n    return {k: v**2 for k, v in kw.items() if k != '_'}  # don't\n\r\n\r\n'''


def random_text(seed, pick, count):
    generator = random.Random(seed)
    return "".join(chr(pick(generator)) for _ in range(count))


def assigned(generator):
    """An assigned code point that is no surrogate, of Unicode up to 13 (known to all libraries)."""
    while True:
        code_point = generator.choice([generator.randrange(0x20, 0x300), generator.randrange(0x300, 0x3000),
                                       generator.randrange(0x3000, 0xD800), generator.randrange(0xE000, 0x1FA70)])
        if unicodedata.category(chr(code_point)) not in ("Cn", "Cs", "Co"):
            return code_point


def texts():
    yield "empty", ""
    yield "one letter", "a"
    yield "english", ("The quick brown fox jumps over the lazy dog. It's what we've always said, isn't it? "
                      "They'll go; I'd rather not! \"Quoted\" — and (bracketed) words… O'Neil'S DON'T")
    yield "gpl start", GPL[:3000]
    yield "gpl middle", GPL[15000:19000]
    yield "code", CODE
    yield "digits", "1 12 123 1234567890 3.14159 1e-5 0x7f 2024-11-29T16:52 1,000,000 x2y3 ½ ² Ⅷ ٣٤٥ १२३ 一二"
    yield "emoji", "🙂👍🏽 👨‍👩‍👧‍👦🇩🇪 ❤️x🙂🙂  🙂"
    yield "cjk", "今日は、東京タワーへ行きました。我喜欢吃苹果，你呢？한국어 문장도 있어요. ㈱①"
    yield "arabic and hebrew", "مرحبا بالعالم، كيف حالك؟ ١٢٣ שלום עולם! ‏abc"
    yield "combining marks", "é ñ ö Å Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤a̷͙l g̈ नमस्ते ไทย ภาษา ệ"
    yield "cyrillic and greek", "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία."
    yield "spaces", " a  b   c    d\t\te \t f\n\n\ng \n \n h\r\n\r\ni   "
    yield "only spaces", "        "
    yield "line breaks", "\n\n\n\n"
    yield "leading line break", "\n\nfoo\n"
    yield "tabs and spaces", "\t \t \t x \t"
    yield "spaces of unicode", "a\u00a0b\u2003c\u3000d\u180ee\u200bf\u2028g\u2029h\u0085i\u000bj\u000ck \u1680 l"
    yield "punctuation", "!!! ??? ... ---- ==== #### /* */ <> <| |> <|im <|im_start| >|<|>"
    yield "long word", "supercalifragilisticexpialidocious" * 20
    yield "long run", "a" * 1000 + "=" * 300 + "-" * 257
    yield "special tokens", ("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"
                             "<|im_end|>x<|endoftext|><repo_name>a/b<file_sep>c<empty_output>\n<|im_start|>assistant\n")
    yield "special token inside a word", "foo<|im_end|>bar <|im_end|> 1<|im_end|>2"
    yield "markup that is no token", "<html><|im_start <filename><filenam></filename>"
    yield "bytes without a token", "a\x04b!\x04! \x13\x14 x\x1dy \U00040000 z"
    yield "control characters", "\x00\x01\x02\x03\x05\x07\x08\x0e\x1b[0m\x7f"
    yield "byte order mark", "\ufeffabc \ufeff"
    yield "random ascii", random_text(1, lambda g: g.randrange(0x20, 0x7F), 2000)
    yield "random latin", random_text(2, lambda g: g.choice([g.randrange(0x61, 0x7B), 0x20, g.randrange(0xA1, 0x180)]), 1500)
    yield "random code points", random_text(3, assigned, 1500)
    yield "random spaces and words", random_text(4, lambda g: ord(g.choice(" \t\n\r a1'.")), 1500)


def with_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def cases(tokenizer, all_texts, longest=4000):
    out = []
    for name, text in all_texts:
        text = text[:longest]
        tokenizer.encode_special_tokens = True
        as_text = with_ids(tokenizer, text)
        tokenizer.encode_special_tokens = False
        ids = with_ids(tokenizer, text)
        case = {"name": name, "text": text, "ids": ids}
        if as_text != ids:
            case["ids_as_text"] = as_text
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != text:
            case["decoded"] = decoded
        out.append(case)
    return out


def broken_decodes(tokenizer, size):
    """Ids that do not form valid UTF-8, with what the library makes of them."""
    generator = random.Random(5)
    out = []
    for _ in range(40):
        ids = [generator.randrange(size) for _ in range(12)]
        out.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False)})
    byte_ids = [i for i in range(size) if len(tokenizer.id_to_token(i) or "") == 1]
    for _ in range(40):
        ids = [generator.choice(byte_ids) for _ in range(24)]
        out.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False)})
    return out


def check_llamacpp(gguf_path, goldens):
    import llama_cpp
    model = llama_cpp.Llama(gguf_path, vocab_only=True, verbose=False)
    differing = []
    for case in goldens:
        for key, special in (("ids", True), ("ids_as_text", False)):
            if key not in case or not case["text"]:
                continue
            theirs = model.tokenize(case["text"].encode(), add_bos=False, special=special)
            if theirs != case[key]:
                differing.append(case["name"])
                case["llamacpp"] = False
    print(f"llama.cpp agrees on {len(goldens) - len(set(differing))} of {len(goldens)} texts; "
          f"differs: {sorted(set(differing))}")
    if not set(differing) <= DIFFERS:
        sys.exit(f"make_tokenizer_goldens: llama.cpp differs where it should not: {set(differing) - DIFFERS}")


def composed(texts_of):
    """More texts, for a tokenizer with NFC: in parts, in wholes, and marks beside added tokens."""
    for name, text in texts_of:
        parts = unicodedata.normalize("NFD", text)
        if parts != text:
            yield name + ", decomposed", parts
    yield "hangul", "\u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\uae00 \uac00\u11a8 \u1161\u11a8"
    yield "marks in any order", "q\u0307\u0323 q\u0323\u0307 a\u0301\u0328 e\u0302\u0301 e\u0301\u0302"
    yield "never composed", "\u212b \u2126 \u0958 \uf900 \u0344"
    yield "mark after a token", "<|im_end|>\u0301e\u0301<think>\u0323\u0301<|im_start|>\u11a8"
    yield "normalized token", "<re\u0301> <r\u00e9> <re>\u0301 <r\u00e9>\u0301<r\u00e9 <re\u0301"
    yield "raw token", "<ne\u0301> <n\u00e9> x<ne\u0301>\u0301"
    yield "raw before normalized", "<left><|im_end|> <left><|im_end|<right> a<right>b"


def train_qwen():
    """In the shape of Qwen2's and Qwen3's own tokenizer.json: added tokens after the vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
               r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False,
                                                    use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False,
                                           use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=680, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    accents = "l'\u00e9t\u00e9 caf\u00e9 na\u00efve \ud55c\uae00 \u1ec7 \u00f1and\u00fa " * 40
    tokenizer.train_from_iterator([GPL[:20000], CODE, accents], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    plain = dict(normalized=False, special=False)
    tokenizer.add_tokens([tokenizers.AddedToken(text, **plain) for text in
                          ("<tool_call>", "</tool_call>", "<think>", "</think>", "<ne\u0301>", "<right>")])
    # No Qwen has these: one that is looked for in the normalised text, and one that a raw one cuts.
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=True, special=False)
                          for text in ("<re\u0301>", "<left>", "|<")])
    return tokenizer


def train(kind):
    if kind == "qwen":
        return train_qwen()
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    if kind == "llama3":
        pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                   r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|begin|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([GPL[:20000], CODE], trainer)
    content = json.loads(tokenizer.to_str())
    if kind == "llama3":
        # A word that is a token but that no merge makes: only ignore_merges finds it.
        content["model"]["vocab"]["Quick"] = len(content["model"]["vocab"])
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens(["<tool>", "<tool>x"])  # added, not special; one begins with the other
    if kind == "llama3":
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])])
    return tokenizer


def save(kind, tokenizer):
    """Writes small_KIND/tokenizer.json; the tokenizer that it gives."""
    folder = HERE / f"small_{kind}"
    folder.mkdir(exist_ok=True)
    content = json.loads(tokenizer.to_str())
    if kind == "gpt2":
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    return tokenizers.Tokenizer.from_str(text)


def write(path, content):
    path.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(f"{path.name}: {path.stat().st_size} bytes")


def write_small(kind):
    small = save(kind, train(kind))
    more = {"qwen": composed(texts())}.get(kind, ())
    goldens = cases(small, [*texts(), *more], longest=600)
    for text in ("Quick brown", "<tool>x<tool>y<tool", "<|begin|>a"):
        goldens.append({"name": text, "text": text, "ids": with_ids(small, text)})
        small.encode_special_tokens = True
        goldens[-1]["ids_as_text"] = with_ids(small, text)
        small.encode_special_tokens = False
    write(HERE / f"small_{kind}.json",
          {"cases": goldens, "decodes": broken_decodes(small, small.get_vocab_size())})


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: make_tokenizer_goldens.py MODEL_FOLDER [VOCAB.gguf]")
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
    goldens = cases(tokenizer, texts())
    if len(sys.argv) == 3:
        check_llamacpp(sys.argv[2], goldens)
    write(HERE / "tokenizer_goldens.json",
          {"cases": goldens, "decodes": broken_decodes(tokenizer, tokenizer.get_vocab_size())})
    for kind in ("llama3", "gpt2", "qwen"):
        write_small(kind)


if __name__ == "__main__":
    main()
