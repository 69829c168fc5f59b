#!/usr/bin/env bash
# load_save.sh PROGRAM: what goes through --save and --load comes back bit for bit, and files that
# are not a problem are refused.
set -euo pipefail
program=$1
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

expect() { bash "$here/expect.sh" "$program" "$@"; }

round_trip() {  # NAME OPTION...
  local name=$1 file count=0
  shift
  expect 0 stdout ' pass ' -- "$@" --seed 7 --save "$work/$name.a"
  # The options that are not in the files have to be said again; shapes are taken from the files.
  local again=()
  while [[ $# -gt 0 ]]; do
    case $1 in
      --dtype | --operation | --window) again+=("$1" "$2") && shift ;;
      --causal) again+=("$1") ;;
    esac
    shift
  done
  expect 0 stdout ' pass ' -- "${again[@]}" --load "$work/$name.a" --save "$work/$name.b"
  while IFS= read -r file; do
    cmp "$work/$name.a/$file" "$work/$name.b/$file"
    count=$((count + 1))
  done < <(cd "$work/$name.a" && find . -name '*.npy')
  # Three or four inputs, and the outputs of a step at the least.
  [[ $count -ge 5 ]] || { echo "only $count files in $name"; exit 1; }
}

round_trip fp32 --dtype fp32 --seqlen-q 33 --seqlen-k 47 --head-dim 20 --causal
round_trip bf16 --dtype bf16 --batch 2 --heads 4 --kv-heads 2 --seqlen 65 --head-dim 32 --window 9,3
round_trip fp16 --dtype fp16 --seqlen-q 40 --seqlen-k 17 --causal --inputs peaked
round_trip backward --operation backward --dtype bf16 --heads 4 --kv-heads 2 --seqlen 33 --head-dim 16

good=$work/good
expect 0 stdout ' pass ' -- --seqlen 9 --head-dim 8 --step v1_global --save "$good"
refused() {  # REGEX OPTION...
  local regex=$1
  shift
  expect 2 stderr "$regex" -- "$@"
}
# What the options say against the files.
refused '--seqlen 8: .* 9' --load "$good" --seqlen 8
refused '--seqlen-k 8: .* 9' --load "$good" --seqlen-k 8
refused '--head-dim 16: .* 8' --load "$good" --head-dim 16
refused '--kv-heads 1: .* 2' --load "$good" --kv-heads 1
refused '--batch 3: .* 1' --load "$good" --batch 3
refused 'do\.npy: no such file' --load "$good" --operation backward
refused 'q\.npy: has shape \[1, 2, 9, 8\], must be \[tokens, heads, head_dim\]' \
  --load "$good" --varlen 4,5
refused '--load: not together with --varlen skewed' --load "$good" --varlen skewed
# What no option asks for.
cp -r "$good" "$work/more" && cp "$good/q.npy" "$work/more/sinks.npy"
"$program" --load "$work/more" --step v1_global 2>&1 >/dev/null |
  grep -q 'warning: .*/more: not read by forward with these options: sinks\.npy$'
# What is not there.
refused 'no such folder' --load "$work/nowhere"
refused 'not a folder' --load "$good/q.npy"
cp -r "$good" "$work/no_k" && rm "$work/no_k/k.npy"
refused 'no_k/k\.npy: no such file' --load "$work/no_k"
# Files that contradict each other.
mixed() {  # NAME OPTION...: k.npy of another problem
  expect 0 stdout ' pass ' -- --step v1_global --save "$work/other_$1" "${@:2}"
  cp -r "$good" "$work/$1" && cp "$work/other_$1/k.npy" "$work/$1/k.npy"
}
mixed length --seqlen 10 --head-dim 8
refused 'v\.npy: has shape \[1, 2, 9, 8\] and .*k\.npy has \[1, 2, 10, 8\]: they must have the same shape' --load "$work/length"
mixed width --seqlen 9 --head-dim 16
cp "$work/width/k.npy" "$work/width/v.npy"
refused 'k\.npy: has shape \[1, 2, 9, 16\] and .*q\.npy has \[1, 2, 9, 8\]: they must agree in head_dim' --load "$work/width"
mixed heads --heads 3 --seqlen 9 --head-dim 8
cp "$work/heads/k.npy" "$work/heads/v.npy"
refused '2 heads are no multiple of the 3 of k\.npy' --load "$work/heads"
# Files of another kind, cut files.
with_k() {  # FILE: a good folder with FILE as k.npy
  rm -rf "$work/kind" && cp -r "$good" "$work/kind" && cp "$1" "$work/kind/k.npy"
}
# The header says another kind in as many bytes.
for kind in "'<f4'/'<f8':float64" "'<f4'/'<f2':float16" "False, /True,  :Fortran" \
            "'<f4'/'>f4':big-endian" "'<f4'/'<i4':int32" \
            '(1, 2, 9, 8)/(18, 8)     :shape .18, 8., must be'; do
  LC_ALL=C sed "1s/${kind%%:*}/" "$good/k.npy" >"$work/other.npy"
  with_k "$work/other.npy"
  refused "k\\.npy: .*${kind#*:}" --load "$work/kind"
done
head -c 200 "$good/k.npy" >"$work/cut.npy"
with_k "$work/cut.npy"
refused 'k\.npy: ' --load "$work/kind"
: >"$work/empty.npy"
with_k "$work/empty.npy"
refused 'k\.npy: ' --load "$work/kind"
echo "everything as expected"
