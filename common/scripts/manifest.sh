#!/usr/bin/env bash
# Ties a folder of measurements to the kernels they were made on. A figure in docs/reports is true of the kernels of
# that day; when one of them changes, somebody has to measure again or say why not.
#
#   common/scripts/manifest.sh check DIR   every file as it was measured? what has changed since?
#   common/scripts/manifest.sh keys        the key of each step's kernels, as they are
#
# verify_on_gpu.sh writes DIR/manifest.txt (attn_report evidence record); by hand it would be a lie. Where a kernel has
# changed and nobody had a GPU yet, a line below `unverified:` says so: chapter/step, two spaces, the reason. It is gone
# when every file with that step has been measured again. What a key is made of: common/report/kernel_key.h.
#
# Exit status of check: 0 all as measured, or listed with a reason; 1 something is not, a line each; 2 no manifest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
report=${ATTN_REPORT:-build/release/bin/attn_report}
if [[ ! -x $report ]]; then
  echo "manifest.sh: $report: not built; common/scripts/start.sh build" >&2
  exit 2
fi
case ${1:-}:$# in
  check:2) exec "$report" evidence check "$2" ;;
  keys:1) exec "$report" evidence keys ;;
  *) echo "manifest.sh: one of: check DIR, keys" >&2; exit 2 ;;
esac
