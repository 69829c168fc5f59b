#!/usr/bin/env bash
# members.sh ROOT: every list of ATTN_MEMBERS is complete (members.awk), and one that is not is found.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
cd "$1"
mapfile -t files < <(grep -rl --include='*.cu' --include='*.h' 'ATTN_MEMBERS(' 0[1-8]_*/ common/kernels)
awk -f "$here/members.awk" "${files[@]}" | tee /dev/stderr |
  grep -qx "$(grep -h 'ATTN_MEMBERS(' "${files[@]}" | wc -l) structs"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/x.cu" <<'END'
template <class Config>
struct SharedStorage {
  static constexpr int kRows = 3;  // no member
  alignas(16) float sQ[2][kRows * 4], max = 0;
  int braced{3}, called = std::max(3, 4), nested[kA[2]], bits : 3;
  Tile<(kRows > 8)> tile;  // not read, and so it fails
  std::array<float, 4> sums[3];
  __device__ float* row(int r) { return sQ[r]; }
  ATTN_MEMBERS(SharedStorage, sQ,
               sums, row)
};
END
said=$(awk -f "$here/members.awk" "$work/x.cu") && { echo "not found"; exit 1; }
diff - <(sed "s,$work/,,; s/:[0-9]*:/:/" <<<"$said" | sort) <<'END'
1 structs
x.cu: ATTN_MEMBERS leaves out bits
x.cu: ATTN_MEMBERS leaves out braced
x.cu: ATTN_MEMBERS leaves out called
x.cu: ATTN_MEMBERS leaves out max
x.cu: ATTN_MEMBERS leaves out nested
x.cu: ATTN_MEMBERS leaves out what_it_cannot_read
x.cu: ATTN_MEMBERS names row, which is no member
END
