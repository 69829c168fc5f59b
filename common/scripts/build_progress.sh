# shellcheck shell=bash
# For start.sh and grade.sh: what is still to be built, how far a build is, and what of its output
# is for people. Sourced.

# files_to_compile BUILD TARGET...: two numbers, of the host and of the GPU.
files_to_compile() {
  local file cpu=0 gpu=0 build=$1
  while read -r file; do
    [[ ! -e $build/$file ]] || continue
    if [[ $file == *.cu.o ]]; then gpu=$((gpu + 1)); else cpu=$((cpu + 1)); fi
  done < <(ninja -C "$build" -t commands "${@:2}" 2>/dev/null |
    awk '/ -c / { for (n = 1; n < NF; n++) if ($n == "-o") print $(n + 1) }')
  echo "$cpu $gpu"
}

# time_to_build BUILD JOBS TARGET...: in words; nothing if nothing is to be compiled. A core needs 5
# s for a file and 16 s for one of the GPU, the mean over all; less with a compiler cache.
time_to_build() {
  local cpu gpu
  read -r cpu gpu < <(files_to_compile "$1" "${@:3}")
  [[ $((cpu + gpu)) -gt 0 ]] || return 0
  printf ': files to compile: %d, for the GPU %d; about %d min' "$cpu" "$gpu" \
    $(((5 * cpu + 16 * gpu) / $2 / 60 + 1))
}

# show_progress: of what ninja prints, "[12/80]" in one line that is written over.
show_progress() {
  local line count="" width=0
  while IFS= read -r line; do
    [[ $line =~ ^\[[0-9]+/[0-9]+\] ]] || continue
    count=${BASH_REMATCH[0]}
    printf '\r%s' "$count"
    width=${#count}
  done
  if [[ $width -gt 0 ]]; then printf '\r%*s\r' "$width" ""; fi
}

# say_progress SECONDS: the same where lines are not written over: one every so often.
say_progress() {
  local line last=$SECONDS
  while IFS= read -r line; do
    [[ $line =~ ^\[[0-9]+/[0-9]+\] && $((SECONDS - last)) -ge $1 ]] || continue
    last=$SECONDS
    printf 'built %s\n' "${BASH_REMATCH[0]}"
  done
}

# diagnostics: of the output of a build what compilers and our own programs say: not the command
# lines, nor what ninja says of them.
diagnostics() {
  awk '/^FAILED: / { skip = 1; next }  # the command is the next line
       skip { skip = 0; next }
       /^\[[0-9]+\/[0-9]+\] |^ninja: / { next }
       { print }'
}
