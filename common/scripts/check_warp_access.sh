#!/usr/bin/env bash
# Compares the predictions of common/emulator/warp_access.h with hardware counters: runs
# warp_access_probe under ncu and prints a table. Exit status: 0 all agree, 1 some do not, 77 no
# ncu, no GPU or no permission to read its counters.
#
#   common/scripts/check_warp_access.sh [FOLDER]
#
# FOLDER contains warp_access_probe (default: build/release/bin). NCU=/path/to/ncu selects an ncu.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
probe=${1:-$root/build/release/bin}/warp_access_probe
if [[ ! -x $probe ]]; then
  echo "$probe: not there; build the target warp_access_probe (it needs nvcc)" >&2
  exit 77
fi
ncu=${NCU:-$(command -v ncu || true)}
for candidate in /usr/local/cuda/bin/ncu /opt/nvidia/nsight-compute/*/ncu; do
  if [[ -z $ncu && -x $candidate ]]; then ncu=$candidate; fi
done
if [[ -z $ncu ]]; then
  echo "no ncu: it is part of the CUDA Toolkit (Nsight Compute)" >&2
  exit 77
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$probe" > "$out/predicted.tsv"  # exits with 77 where there is no GPU

# Sums over the GPU; one warp ran. ldmatrix is counted in the shared memory totals.
shared_ld=l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum
shared_all=l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
conflicts=l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum
sectors=l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum
requests=l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum
if ! "$ncu" --clock-control none --csv --page raw \
    --metrics "$shared_ld,$shared_all,$conflicts,$sectors,$requests" \
    --log-file "$out/ncu.csv" "$probe" > "$out/stdout.txt" 2> "$out/stderr.txt"; then
  cat "$out/ncu.csv" "$out/stderr.txt" >&2 || true
  if grep -qs -e ERR_NVGPUCTRPERM "$out/ncu.csv" "$out/stderr.txt"; then
    echo "ncu may not read the counters of this GPU" >&2
    exit 77
  fi
  exit 1
fi

python3 - "$out/predicted.tsv" "$out/ncu.csv" \
    "$shared_ld" "$shared_all" "$conflicts" "$sectors" "$requests" <<'PYTHON'
import csv
import sys

predicted_file, csv_file, shared_ld, shared_all, conflicts, sectors, requests = sys.argv[1:]
metric_of = {"shared": shared_ld, "ldmatrix": shared_all, "global": sectors}
with open(predicted_file) as f:
    kernels = [line.rstrip("\n").split("\t") for line in f]

# ncu's messages (==PROF== ...) come first, then a row of names, a row of units, and a row per
# kernel.
with open(csv_file) as f:
    lines = f.read().splitlines()
start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
if start is None:
    sys.exit("ncu wrote no table:\n" + "\n".join(lines[:20]))
rows = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
measured = [row for row in rows if row["ID"].strip().isdigit()]
if len(measured) != len(kernels):
    sys.exit(f"ncu saw {len(measured)} kernels, the probe launched {len(kernels)}")
measured.sort(key=lambda row: int(row["ID"].replace(",", "")))


def count(row, metric):
    if metric not in row:
        sys.exit(f"ncu did not report {metric}")
    text = row[metric].replace(",", "").strip()
    return float(text) if text else 0.0


baseline = measured[0]
wrong = 0
print(f"{'pattern':<44} {'counter':<11} {'predicted':>9} {'measured':>9}  "
      f"{'conflicts':>9} {'requests':>8}")
for (_, kind, predicted, name), row in zip(kernels, measured):
    if kind == "baseline":
        print(f"{name:<44} subtracted: " + ", ".join(
            f"{count(row, m):g}" for m in (shared_ld, shared_all, conflicts, sectors, requests)))
        continue
    net = {m: count(row, m) - count(baseline, m)
           for m in (metric_of[kind], conflicts, requests)}
    value = net[metric_of[kind]]
    agree = value == float(predicted)
    wrong += not agree
    unit = "sectors" if kind == "global" else "wavefronts"
    print(f"{name:<44} {unit:<11} {predicted:>9} {value:>9g}  {net[conflicts]:>9g} "
          f"{net[requests]:>8g}{'' if agree else '   DIFFERS'}")
print(f"{len(kernels) - 1 - wrong} of {len(kernels) - 1} patterns as predicted")
sys.exit(1 if wrong else 0)
PYTHON
