# Mooncake, NIXL and Redis beside ours on the same blocks (sourced by run.sh). Their programs go into
# build/peers; what cannot be had is named and left out.
peers_python=$repo/build/peers/venv/bin/python
peers_install() {
  local folder=$repo/build/peers
  mkdir -p "$folder"
  if [[ ! -f $folder/venv.done ]]; then
    python3 -m venv "$folder/venv" &&
      "$folder/venv/bin/pip" install -q -r "$here/peers/requirements.txt" >&2 &&
      "$folder/venv/bin/pip" install -q --no-deps nixl-cu13==1.5.1 >&2 &&
      touch "$folder/venv.done" || echo "peers: PyPI's packages could not be installed" >&2
  fi
  redis=$(command -v redis-server || true)
  if [[ -z $redis && ! -x $folder/redis/usr/bin/redis-server ]]; then
    # Debian's program without installing it: no service is started.
    (mkdir -p "$folder/redis" && cd "$folder/redis" &&
      apt-get -qq download redis-server redis-tools liblzf1 libjemalloc2 2>/dev/null &&
      for package in ./*.deb; do dpkg -x "$package" .; done) ||
      echo "peers: Debian's redis-server could not be downloaded" >&2
  fi
  if [[ -z $redis && -x $folder/redis/usr/bin/redis-server ]]; then
    cat >"$folder/redis-server" <<SH
#!/bin/sh
LD_LIBRARY_PATH=$folder/redis/usr/lib/$(uname -m)-linux-gnu exec $folder/redis/usr/bin/redis-server "\$@"
SH
    chmod +x "$folder/redis-server"
    redis=$folder/redis-server
  fi
}
bench_run() {
  local json=$1
  shift
  peers_install
  KVT_REDIS_SERVER=$redis "$bin/peers_bench" --json "$json" --python "$peers_python" \
    --drivers "$here/peers" "$@"
}
