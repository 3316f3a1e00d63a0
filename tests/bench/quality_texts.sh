#!/usr/bin/env bash
# Long real texts for calibration and for measuring quality, apart from each other:
#
#   tests/bench/quality_texts.sh [DEST]      default DEST: .cache/bench/texts; writes DEST/{calibrate,test}/*.txt
#
# From Debian: the licences of base-files, and the packages anarchism, debian-reference and
# debian-handbook, which apt-get downloads (nothing is installed). Running it again does nothing.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dest=${1:-$repo/.cache/bench/texts}
[[ -f $dest/.complete ]] && exit 0
mkdir -p "$dest/deb" "$dest/calibrate" "$dest/test"
cd "$dest/deb"
packages=(anarchism debian-reference-en debian-handbook)
for package in "${packages[@]}"; do
  compgen -G "${package}_*.deb" >/dev/null || apt-get download "$package" >&2
  mkdir -p "$package"
  dpkg -x "${package}"_*.deb "$package"
done
python3 - "$dest" <<'PY'
import glob, gzip, html.parser, os, re, sys

dest = sys.argv[1]
LIMIT = 64000  # characters: more than 8,192 tokens


class Text(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts, self.skip = [], 0

    def handle_starttag(self, tag, attrs):
        self.skip += tag in ("script", "style", "head")
        if tag in ("p", "div", "h1", "h2", "h3", "li", "br", "tr", "pre"):
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.skip -= tag in ("script", "style", "head")

    def handle_data(self, data):
        if not self.skip:
            self.parts.append(data)


def from_html(*paths):
    text = ""
    for path in paths:
        parser = Text()
        parser.feed(open(path, encoding="utf-8", errors="ignore").read())
        text += "".join(parser.parts) + "\n"
    return text


def licences(*names):
    return "\n".join(open(f"/usr/share/common-licenses/{n}", encoding="utf-8").read() for n in names)


def write(kind, name, text):
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if len(text) < 36000:
        sys.exit(f"quality_texts: {name} has {len(text)} characters only")
    with open(f"{dest}/{kind}/{name}.txt", "w", encoding="utf-8") as out:
        out.write(text[:LIMIT])


deb = f"{dest}/deb"
faq = f"{deb}/anarchism/usr/share/doc/anarchism/html"
book = f"{deb}/debian-handbook/usr/share/doc/debian-handbook/html/en-US"
reference = gzip.open(glob.glob(f"{deb}/debian-reference-en/usr/share/debian-reference/*.en.txt.gz")[0],
                      "rt", encoding="utf-8").read()
chapters = sorted(glob.glob(f"{book}/*.html"), key=os.path.getsize, reverse=True)
write("calibrate", "gpl", licences("GPL-3", "LGPL-2.1"))
write("calibrate", "reference", reference[40000:])
write("calibrate", "faq_h", from_html(f"{faq}/secH3.html"))
write("test", "handbook", from_html(*chapters[:2]))
write("test", "faq_append", from_html(f"{faq}/append31.html"))
write("test", "gfdl", licences("GFDL-1.3", "MPL-2.0", "Artistic", "Apache-2.0"))
PY
touch "$dest/.complete"
