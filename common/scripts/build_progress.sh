# shellcheck shell=bash
# For start.sh and grade.sh: the number of files to compile, the progress of a build, and the part
# of its output to show. Sourced.

# files_to_compile BUILD TARGET...: two numbers, for the host and for the GPU.
files_to_compile() {
  local file cpu=0 gpu=0 build=$1
  while read -r file; do
    [[ ! -e $build/$file ]] || continue
    if [[ $file == *.cu.o ]]; then gpu=$((gpu + 1)); else cpu=$((cpu + 1)); fi
  done < <(ninja -C "$build" -t commands "${@:2}" 2>/dev/null |
    awk '/ -c / { for (n = 1; n < NF; n++) if ($n == "-o") print $(n + 1) }')
  echo "$cpu $gpu"
}

# time_to_build BUILD JOBS TARGET...: an estimate in words; empty if nothing is to be compiled. A
# core needs 4 s per file and 16 s per GPU file on average; less with a compiler cache.
time_to_build() {
  local cpu gpu
  read -r cpu gpu < <(files_to_compile "$1" "${@:3}")
  [[ $((cpu + gpu)) -gt 0 ]] || return 0
  printf ': files to compile: %d, for the GPU %d; about %d min' "$cpu" "$gpu" \
    $(((4 * cpu + 16 * gpu) / $2 / 60 + 1))
}

# show_progress: reduces ninja's output to one line, "[12/80]", which is overwritten.
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

# say_progress SECONDS: the same without overwriting: one line every SECONDS.
say_progress() {
  local line last=$SECONDS
  while IFS= read -r line; do
    [[ $line =~ ^\[[0-9]+/[0-9]+\] && $((SECONDS - last)) -ge $1 ]] || continue
    last=$SECONDS
    printf 'built %s\n' "${BASH_REMATCH[0]}"
  done
}

# diagnostics: filters a build's output: keeps the messages of compilers and of our own programs,
# drops command lines and ninja's messages.
diagnostics() {
  awk '/^FAILED: / { skip = 1; next }  # the command is the next line
       skip { skip = 0; next }
       /^\[[0-9]+\/[0-9]+\] |^ninja: / { next }
       { print }'
}
