"""What the lint checks read: the tree's files, and C++ with comments and strings blanked."""
import os
import re
import subprocess

TOP = ("kvstore", "decode_worker", "prefill_worker", "coordinator", "kernels", "deploy", "tests",
       "docs")
SKIPPED_DIRS = {".git", "build", "var", ".cache", "__pycache__"}
CODE = (".h", ".cc", ".cu", ".cuh")


class Tree:
    def __init__(self, root):
        self.root = root
        self._text = {}

    def files(self, *suffixes):
        """Paths from the root, sorted; tracked ones and new ones that git does not ignore."""
        paths = [p for p in self._all() if not suffixes or p.endswith(suffixes)]
        return sorted(paths)

    def code(self):
        return self.files(*CODE)

    def text(self, path):
        if path not in self._text:
            with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as f:
                self._text[path] = f.read()
        return self._text[path]

    def exists(self, path):
        return os.path.exists(os.path.join(self.root, path))

    def includes(self, path):
        """(line, name, ours) of every #include; ours: a path of this tree, or one that names none."""
        for number, line in enumerate(self.text(path).splitlines(), 1):
            m = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if m:
                name, quoted = m.group(2), m.group(1) == '"'
                ours = quoted and ("/" not in name or name.split("/")[0] in TOP)
                yield number, name, ours

    def allowed(self, rule):
        """Entries `rule path # reason` of allow.txt: {path: reason}. A missing reason is an error."""
        entries = {}
        path = "tests/lint/allow.txt"
        if not self.exists(path):
            return entries
        for number, line in enumerate(self.text(path).splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            m = re.fullmatch(r"(\S+)\s+(\S+)\s+#\s*(\S.*)", line)
            if not m:
                raise SystemExit(f"{path}:{number}: want `rule path # reason`, have: {line}")
            if m.group(1) == rule:
                entries[m.group(2)] = m.group(3)
        return entries

    def _all(self):
        try:
            out = subprocess.run(
                ["git", "ls-files", "-co", "--exclude-standard"], cwd=self.root,
                capture_output=True, text=True, check=True, timeout=30).stdout
            names = [p for p in out.splitlines() if self.exists(p)]
            if names:
                return names
        except (OSError, subprocess.SubprocessError):
            pass
        return list(self._walk())

    def _walk(self):
        for folder, dirs, names in os.walk(self.root):
            dirs[:] = [d for d in dirs if d not in SKIPPED_DIRS]
            for name in names:
                yield os.path.relpath(os.path.join(folder, name), self.root)


_TOKENS = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^()\s]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])+'", re.S)


def blank(text, strings=True):
    """`text` with comments (and string contents) replaced by spaces; line numbers stay."""
    def replace(m):
        token = m.group(0)
        if not strings and token[0] != "/":
            return token
        return re.sub(r"[^\n]", " ", token)
    # Digit separators (10'000) are not character literals.
    return _TOKENS.sub(replace, re.sub(r"(?<=[0-9A-Fa-f])'(?=[0-9A-Fa-f])", "_", text))
