#!/usr/bin/env bash
# Reports for every kernel in a program: registers, bytes of stack (which include spilled
# registers), SASS instructions, and among them MMAs and copies into uniform registers.
#
#   common/scripts/compiler_report.sh build/release/bin/06_flash_v3_hopper
#
# Needs cuobjdump and cu++filt of the CUDA Toolkit, but no GPU. Exit status: 0; 2 if a tool or the
# program is missing.
set -euo pipefail
export PATH=$PATH:/usr/local/cuda/bin
program=${1:-}
[[ -f $program ]] || { echo "compiler_report.sh: '$program': no such program" >&2; exit 2; }
for tool in cuobjdump cu++filt; do
  command -v "$tool" >/dev/null || { echo "compiler_report.sh: $tool: not found (CUDA Toolkit)" >&2; exit 2; }
done
echo "registers  stack  instructions  MMA  R2UR  kernel"
{
  cuobjdump --dump-resource-usage "$program" 2>/dev/null
  cuobjdump -sass "$program"
} | awk '
  /^ *Function [^ ]+:$/ { name = $2; sub(/:$/, "", name) }          # of resource usage
  /REG:[0-9]+/ { match($0, /REG:[0-9]+/); registers[name] = substr($0, RSTART + 4, RLENGTH - 4)
                 match($0, /STACK:[0-9]+/); stack[name] = substr($0, RSTART + 6, RLENGTH - 6) }
  /Function : / { name = $3 }                                       # of machine code
  /^ +\/\*[0-9a-f]+\*\/ +[^\/]/ { ++instructions[name] }
  /[ .](HGMMA|HMMA)\./ { ++products[name] }
  / R2UR[ .]/ { ++uniform[name] }
  END { for (name in instructions) printf "%9s  %5s  %12d  %3d  %4d  %s\n", registers[name], stack[name], instructions[name],
          products[name], uniform[name], name }' | cu++filt | sed -E 's/\((int|bool|unsigned)\)//g; s/\(.*$//; s/ void / /; s/gpu:://g' | sort -k6
