"""Ceilings (STYLE): a file 600 lines, a header 250, a function 70, a line 100 columns. Entries in
allow.txt name the exceptions; they only ever go away."""
import re

from tree import blank

FILE_LINES_MAX = 600
HEADER_LINES_MAX = 250
FUNCTION_LINES_MAX = 70
TEST_LINES_MAX = 100  # a test tells one story from top to bottom
COLUMNS_MAX = 120  # clang-format's 100, with room for long strings and URLs
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".proto")


def functions(text):
    """(first line, lines, signature) of bodies that start at column 0 (`kvt`'s style)."""
    lines = blank(text).split("\n")
    start = None
    for number, line in enumerate(lines, 1):
        if start is None:
            opens = line.rstrip().endswith("{") and line[:1] not in (" ", "}", "#", "\t", "")
            if opens and not re.match(r"(namespace|class|struct|enum|extern|union|TEST)\b", line):
                start = number
            elif re.match(r" {4,}\S.*\) (const |override |noexcept )*\{$", line):
                # A signature that is broken over lines: find where it began.
                begin = number
                while begin > 1 and lines[begin - 1][:1] in (" ", ""):
                    begin -= 1
                head = lines[begin - 1]
                if re.match(r"[A-Za-z_].*\($|[A-Za-z_].*\(.*,$", head.rstrip()):
                    start = begin
        elif line.startswith("}"):
            yield start, number - start + 1, lines[start - 1].strip()[:60]
            start = None


def check(tree):
    problems = []
    allowed = {rule: tree.allowed(rule) for rule in ("lines", "function", "columns")}
    used = set()

    def over(rule, path, message):
        used.add((rule, path))
        if path not in allowed[rule]:
            problems.append(message)

    for path in tree.files(*SOURCES):
        text = tree.text(path)
        count = text.count("\n")
        # *_impl.h are bodies that several sources compile, not interfaces.
        header = path.endswith(".h") and not path.endswith("_impl.h")
        ceiling = HEADER_LINES_MAX if header else FILE_LINES_MAX
        if count > ceiling:
            over("lines", path, f"{path}: {count} lines, at most {ceiling}: split it by noun")
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMNS_MAX and path.endswith((".h", ".cc", ".cu")):
                over("columns", path, f"{path}:{number}: {len(line)} columns, at most "
                     f"{COLUMNS_MAX}: run clang-format")
                break
        if path.endswith((".cc", ".cu")):
            limit = TEST_LINES_MAX if path.startswith("tests/") else FUNCTION_LINES_MAX
            for start, length, name in functions(text):
                if length > limit:
                    over("function", path, f"{path}:{start}: {length} lines in `{name}`, at most "
                         f"{limit}: let the parent decide and leaves compute")
    for rule, entries in allowed.items():
        for path in entries:
            if (rule, path) not in used:
                problems.append(f"tests/lint/allow.txt: `{rule} {path}` is no longer needed: remove it")
    return problems
