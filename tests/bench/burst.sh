# Bursts over UCX/TCP and shared memory beside their ceilings (sourced by run.sh). BASE against TARGET is
# measured once more on a link held to 4 Gbit/s, in a network namespace of its own (needs root).
bench_run() {
  local json=$1
  shift
  "$bin/burst_bench" --json "$json" "$@"
  local limited
  limited=$(mktemp)
  if unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 4gbit burst 4mb latency 100ms && exec "$@"' \
    limited "$bin/burst_bench" --only base --rounds 7 --json "$limited"; then
    python3 - "$json" "$limited" <<'PY'
import json, sys
rows = json.load(open(sys.argv[1]))
for row in json.load(open(sys.argv[2]))["rows"]:
    rows["rows"].append(dict(row, name=row["name"] + "_4gbit"))
json.dump(rows, open(sys.argv[1], "w"))
PY
  else
    echo "burst: no link held to a rate (unshare -n and tc need root): no base_pull_time_share_4gbit" >&2
  fi
  rm -f "$limited"
}
