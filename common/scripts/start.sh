#!/usr/bin/env bash
# From a fresh clone to results: installs what is missing, configures, builds, runs. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: common/scripts/start.sh [run] [CHAPTER...] [OPTION...]   build, run every chapter, one table
       common/scripts/start.sh test [CTEST OPTION...]           build, run all tests
       common/scripts/start.sh build                            build all, run nothing
       common/scripts/start.sh build --exercise ex01a           build what that exercise needs
       common/scripts/start.sh exercise ex01a [hint|diff]       build your file and judge it; a hint
       common/scripts/start.sh docs                             build the documentation site
       common/scripts/start.sh install                          install what all of these need
       common/scripts/start.sh --help

Each first installs what is missing (Debian, Ubuntu) and configures the preset `release` in
build/release. Kernels run on the GPU, timed, if there is one, and on the emulator otherwise; no GPU
and no nvcc are needed. GPU code is compiled for the GPU of this machine; without one, only if
ATTN_CMAKE_ARGS mentions CUDA.

run    CHAPTERs are folders such as 01_naive (default: all). OPTIONs go to each chapter program, as
       in `start.sh run 01_naive --seqlen 512 --causal`. Results: build/release/results/*.json
exercise  prints the compiler's messages about your file and the verdict; exit status 1 if it fails
test   CTEST OPTIONs go to ctest, as in `start.sh test -R 01_naive`.

environment
  ATTN_CMAKE_ARGS   more arguments for cmake, as ATTN_CMAKE_ARGS="-DATTN_CUDA=ON" or
                    "-DCMAKE_CUDA_ARCHITECTURES=80-real"; a change configures the build again
  ATTN_JOBS         compilers and tests at once (default: as many as cores and memory allow)
  ATTN_NO_INSTALL   1: install nothing, only list what is missing

Exit status: that of what failed. The log of the build is build/release/build.log.
TEXT
}

# Missing ones are installed; without them CMake fetches the libraries, but not the tools.
packages=(g++ cmake ninja-build git libeigen3-dev catch2 libbenchmark-dev libcli11-dev
          nlohmann-json3-dev libfmt-dev libboost-context-dev libmd4c-dev libmd4c-html0-dev)
docs_packages=(doxygen libjs-mathjax)
# Optional: installed together with missing ones, or by an explicit `install`.
# ATTN_MORE_PACKAGES: those that only tests of the Python package need.
extra_packages=(ccache python3-numpy)
read -ra more <<<"${ATTN_MORE_PACKAGES:-}"
extra_packages+=("${more[@]}")
tools=(g++ cmake ninja git)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
# shellcheck source=common/scripts/build_progress.sh
source "$root/common/scripts/build_progress.sh"
build=$root/build/release
results=$build/results
log=$build/build.log
advice=""  # advice on missing packages; repeated if a later step fails because of them

say() { printf '== %s\n' "$*"; }
die() {
  printf 'start.sh: %s\n' "$1" >&2
  exit "${2:-1}"
}

# ---- missing packages ------------------------------------------------------------------------

have() { command -v "$1" >/dev/null 2>&1; }

missing_tools() {
  local tool missing=()
  for tool in "${tools[@]}"; do have "$tool" || missing+=("$tool"); done
  printf '%s' "${missing[*]}"
}

# missing_packages PACKAGE...: the libraries that dpkg does not list as installed; tools may have
# another source.
missing_packages() {
  local installed package
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
  for package in "$@"; do
    case $package in
      g++ | cmake | git | ccache | doxygen) have "$package" && continue ;;
      ninja-build) have ninja && continue ;;
    esac
    grep -qxF -- "$package installed" <<<"$installed" || printf '%s\n' "$package"
  done
}

go_on_without() {
  local missing
  missing=$(missing_tools)
  [[ -z $missing ]] || die "not found: $missing. $advice"
  say "going on: the tools are installed, and cmake fetches the libraries that it does not find"
}

install_missing() {  # PACKAGE...
  if ! have apt-get || ! have dpkg-query; then
    advice="Install what these packages of Debian hold: $*"
    say "not Debian or Ubuntu, so nothing is installed. $advice"
    go_on_without
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [[ ${#missing[@]} -gt 0 ]] || return 0
  if [[ " $* " != *" ${extra_packages[0]} "* ]]; then
    mapfile -t -O "${#missing[@]}" missing < <(missing_packages "${extra_packages[@]}")
  fi

  local as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    as_root=(sudo)
    # sudo may ask for a password, but only if a terminal is attached.
    if ! have sudo || { [[ ! -t 0 ]] && ! sudo -n true 2>/dev/null; }; then as_root=(none); fi
  fi
  if [[ ${ATTN_NO_INSTALL:-0} == 1 || ${as_root[*]} == none ]]; then
    advice="Install them as root: apt-get update && apt-get install -y ${missing[*]}"
    say "missing packages. $advice"
    go_on_without
    return
  fi
  say "install ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  # Old package lists may suffice, so a failed update alone is no reason to stop.
  "${apt[@]}" update </dev/null >>"$log" 2>&1 || say "apt-get update failed (log: $log)"
  advice="To go on without them: ATTN_NO_INSTALL=1 $0"
  run_logged apt-get "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null
  advice=""
}

# ---- the GPU of this machine -----------------------------------------------------------------

# cuda_arguments: one argument for cmake, unless the user's own mention CUDA: the architectures of
# the GPUs that the driver reports, as 90-real;89-real; or no GPU code. Nothing if nvcc is missing
# or older than a GPU, or if there is a device and no tool to query it.
cuda_arguments() {
  have nvcc || return 0
  [[ ${ATTN_CMAKE_ARGS:-} != *CUDA* ]] || return 0
  local capability architectures="" known
  known=$(nvcc --list-gpu-arch 2>/dev/null || true)
  while read -r capability; do
    [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] || continue
    capability=${capability/./}
    [[ $known == *compute_$capability* ]] || return 0
    capability+=-real
    [[ ";$architectures;" == *";$capability;"* ]] || architectures+=${architectures:+;}$capability
  done < <(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true)
  if [[ -n $architectures ]]; then
    printf '%s' "-DCMAKE_CUDA_ARCHITECTURES=$architectures"
  elif [[ ! -e /dev/nvidiactl ]]; then
    printf '%s' "-DATTN_CUDA=OFF"
  fi
}

# ---- configure, build ------------------------------------------------------------------------

# run_logged NAME COMMAND...: writes its output to the log; prints the relevant part if it fails.
run_logged() {
  local name=$1 first status=0
  shift
  first=$(($(wc -l <"$log") + 1))
  if [[ -t 1 ]]; then
    "$@" 2>&1 | tee -a "$log" | show_progress || status=$?
  else
    "$@" >>"$log" 2>&1 || status=$?
  fi
  [[ $status -eq 0 ]] && return
  # The first error matters: parallel jobs can push it far from the end.
  tail -n "+$first" "$log" | awk '
    /^FAILED:|CMake Error|^E: / && !found { found = NR }
    { line[NR] = $0 }
    END {
      from = found ? found : NR - 39
      for (n = from < 1 ? 1 : from; n <= NR && n < from + 40; ++n) print line[n]
    }' >&2
  printf 'start.sh: %s failed with status %d; all of its output: %s\n' "$name" "$status" "$log" >&2
  [[ -z $advice ]] || printf '%s\n' "$advice" >&2
  exit "$status"
}

# A compiler here takes up to 1.5 GB.
count_jobs() {
  local cores memory_kb="" limit jobs
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  [[ -r /proc/meminfo ]] && memory_kb=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || true)
  if [[ $limit =~ ^[0-9]{1,15}$ ]] && ((limit / 1024 < ${memory_kb:-999999999})); then
    memory_kb=$((limit / 1024))
  fi
  jobs=$((${memory_kb:-999999999} / 1500000))
  ((jobs > cores)) && jobs=$cores
  ((jobs < 1)) && jobs=1
  printf '%d' "$jobs"
}

prepare() {  # PACKAGE...
  mkdir -p "$build"
  : >"$log"
  install_missing "$@"
  # The installer of the CUDA Toolkit does not change PATH.
  if ! have nvcc && [[ -x /usr/local/cuda/bin/nvcc ]]; then PATH=$PATH:/usr/local/cuda/bin; fi
  jobs=${ATTN_JOBS:-$(count_jobs)}
  [[ $jobs =~ ^[1-9][0-9]*$ ]] || die "ATTN_JOBS=$jobs: must be an integer from 1" 2

  local arguments=() remembered=$build/cmake_args own
  own=$(cuda_arguments)
  read -r -a arguments <<<"${ATTN_CMAKE_ARGS:-}"
  [[ -z $own ]] || arguments+=("$own")
  # With few cores several steps of a chapter are one compile unit, so their headers are parsed
  # once.
  [[ $own == *ARCHITECTURES* || $jobs -gt 4 || ${ATTN_CMAKE_ARGS:-} =~ CUDA|ATTN_TOGETHER ]] ||
    arguments+=(-DATTN_TOGETHER=4)
  if [[ -f $remembered && $(<"$remembered") != "${arguments[*]}" ]]; then
    rm -f "$build/CMakeCache.txt"
  fi
  # CMake refuses the cache of a folder that was moved, or mounted elsewhere in a container.
  local home
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt" 2>/dev/null || true)
  if [[ -n $home && $home != "$root" ]]; then
    say "built before as $home: begin again"
    rm -rf "$build/CMakeCache.txt" "$build/CMakeFiles" "$build/_deps"
  fi
  printf '%s\n' "${arguments[*]}" >"$remembered"
  say "configure"
  cd -- "$root"
  run_logged "the configuration" cmake --preset release "${arguments[@]}"
  local cuda
  cuda=$(grep -E '^-- CUDA[ :]' "$log" | tail -n 1 || true)
  [[ -z $cuda ]] || say "${cuda#-- }"
  [[ $own != *=OFF ]] ||
    say "left out: code for a GPU, of which there is none (ATTN_CMAKE_ARGS=-DATTN_CUDA=ON builds it)"
}

build_targets() {  # TARGET...
  say "build $*$(time_to_build "$build" "$jobs" "$@") ($jobs at once; log: $log)"
  run_logged "the build" cmake --build --preset release --parallel "$jobs" --target "$@"
}

# ---- run -------------------------------------------------------------------------------------

run_chapters() {
  local chapters=() options=() asked=() word
  while [[ $# -gt 0 && $1 != -* ]]; do
    [[ -f $root/${1%/}/chapter.cpp ]] || die "no chapter $1: $(cd "$root" && echo [0-9][0-9]_*)" 2
    chapters+=("${1%/}")
    shift
  done
  if [[ ${#chapters[@]} -eq 0 ]]; then
    for word in "$root"/[0-9][0-9]_*/chapter.cpp; do
      word=$(dirname "$word")
      chapters+=("$(basename "$word")")
    done
  fi
  while [[ $# -gt 0 ]]; do
    case $1 in
      -h | --help) usage && exit 0 ;;
      --json | --json=* | --list | --profile | --profile=*)
        die "$1: not an option of start.sh; run the program: build/release/bin/${chapters[0]}" 2 ;;
      --step=all) ;;
      --operation=* | --step=*) asked+=("${1#*=}") ;;
      --operation | --step) [[ ${2:-all} == all ]] || asked+=("$2") ;;
    esac
    options+=("$1")
    shift
  done

  prepare "${packages[@]}"
  # A table needs no tests, exercises and benchmarks.
  build_targets "${chapters[@]}" attn_report
  say "left out: tests and benchmarks (start.sh build), exercises (start.sh build --exercise ex01a)"
  rm -rf "$results"
  mkdir -p "$results"
  local chapter steps operations operation name status failed=0 passed=0 files=()
  for chapter in "${chapters[@]}"; do
    local program=$build/bin/$chapter
    [[ -x $program ]] || die "$program was not built: $chapter/CMakeLists.txt is missing"
    # Its steps, "  NAME  OPERATION  IDEA".
    steps=$("$program" --list | awk '/^  [^ ]/ { print $1, $2 }')
    mapfile -t operations < <(awk '!seen[$2]++ { print $2 }' <<<"$steps")
    # A step or an operation in OPTIONs replaces the list. A chapter that lacks it is skipped,
    # unless it is the only one: then its program prints what it has.
    for word in "${asked[@]}"; do
      operations=("")
      if [[ ${#chapters[@]} -gt 1 ]] && ! grep -qwF -- "${word%%,*}" <<<"$steps"; then
        say "$chapter has no ${word%%,*}"
        continue 2
      fi
    done
    for operation in "${operations[@]}"; do
      name=$chapter${operation:+_$operation}
      say "run $chapter${operation:+ $operation}"
      status=0
      "$program" ${operation:+--operation "$operation"} --time --json "$results/$name.json" \
        "${options[@]}" >"$results/$name.txt" 2>&1 || status=$?
      # An invalid option is invalid for every chapter, and reported in one line.
      if [[ $status -eq 2 && ${#files[@]} -eq 0 ]]; then
        tail -n 1 "$results/$name.txt" >&2
        exit 2
      fi
      [[ ! -s $results/$name.json ]] || files+=("$results/$name.json")
      case $status in
        0) passed=1 ;;
        3) ;;  # chapters may refuse a problem: the table gives each step's reason
        *)
          cat "$results/$name.txt"
          say "$name failed with status $status"
          [[ $failed -ne 0 ]] || failed=$status
          ;;
      esac
    done
  done
  [[ ${#files[@]} -eq 0 ]] || "$build/bin/attn_report" summary "${files[@]}"
  # Nothing failed, but no chapter supported the problem either.
  if [[ $failed -eq 0 && $passed -eq 0 ]]; then failed=3; fi
  exit "$failed"
}

# ---- exercises -------------------------------------------------------------------------------

# find_exercise ex01a: sets `chapter`, and the files `student` and `page`; `targets` are the
# student's program and its judge, or the quiz.
find_exercise() {
  local exercise=$1
  [[ $exercise =~ ^ex([0-9][0-9])([a-z])$ ]] ||
    die "--exercise $exercise: must be a name such as ex01a" 2
  page=$(echo "$root/${BASH_REMATCH[1]}"_*/exercises/"${BASH_REMATCH[2]}".md)
  [[ -f $page ]] || die "no exercise $exercise: there is no ${page#"$root/"}" 2
  chapter=$(basename "${page%/exercises/*}")
  student=${page%/*}/student/$exercise
  if [[ -f ${page%.md}.stub.inc ]]; then
    targets=("${exercise}_student" "judge_$chapter")
    student+=.inc
  else
    targets=("quiz_$chapter")
    student+=.txt
  fi
}

# build_exercises [--exercise ex01a]...: builds the targets of each exercise; without one, of all.
build_exercises() {
  local exercise word chapter student page targets=() all=() next=()
  while [[ $# -gt 0 ]]; do
    case $1 in
      --exercise) [[ $# -ge 2 ]] || die "--exercise: needs a name, such as ex01a" 2 ;;
      --exercise=*) set -- --exercise "${1#*=}" "${@:2}" ;;
      *) die "build takes no $1" 2 ;;
    esac
    exercise=$2
    shift 2
    find_exercise "$exercise"
    all+=("${targets[@]}")
    next+=("edit ${student#"$root/"}, then: common/scripts/start.sh exercise $exercise")
  done
  prepare "${packages[@]}"
  [[ ${#all[@]} -gt 0 ]] || all=(all)
  build_targets "${all[@]}"
  for word in "${next[@]}"; do say "$word"; done
}

# judge_exercise ex01a [hint|diff]: builds the student's file and prints only the compiler's
# messages or the verdict. Exits with 1 if it is wrong.
judge_exercise() {
  [[ $# -ge 1 ]] || die "exercise: needs a name, such as ex01a" 2
  local exercise=$1 chapter student page targets=() status=0
  find_exercise "$exercise"
  [[ ${2:-hint} =~ ^(hint|diff)$ && $# -le 2 ]] ||
    die "exercise $exercise ${!#}: must be hint or diff, or nothing" 2
  prepare "${packages[@]}" >/dev/null
  if [[ $# -eq 2 ]]; then
    cmake --build --preset release --target "$exercise-$2" 2>&1 | diagnostics
    return
  fi
  local missing
  missing=$(time_to_build "$build" "$jobs" "${targets[@]}")
  [[ -z $missing ]] || say "build ${targets[*]}$missing"
  cmake --build --preset release --parallel "$jobs" --target "${targets[@]}" >"$log" 2>&1 ||
    status=$?
  if [[ $status -ne 0 ]]; then
    diagnostics <"$log" >&2
    exit 1
  fi
  if [[ ${targets[0]} == quiz_* ]]; then
    local seal=$build/$chapter/exercises/$exercise/sealed.txt
    local question=(--task "${page%.md}.task" --seal "$seal")
    [[ ! -f ${page%.md}.key ]] || question=(--key "${page%.md}.key")
    "$build/bin/quiz_$chapter" --answers "$student" "${question[@]}" || status=$?
  else
    "$build/bin/judge_$chapter" "$exercise" --speed || status=$?
  fi
  exit "$status"
}

# ---- the command -----------------------------------------------------------------------------

command=run
if [[ $# -gt 0 ]]; then
  case $1 in
    run | test | build | exercise | docs | install) command=$1 && shift ;;
    -h | --help | help) usage && exit 0 ;;
    -*) ;;  # options of `run`
    [0-9][0-9]_*) ;;  # its chapters
    *) die "$1: unknown command, must be run, test, build, exercise, docs, install or --help" 2 ;;
  esac
fi

case $command in
  run) run_chapters "$@" ;;
  test)
    prepare "${packages[@]}"
    build_targets all
    say "test ($jobs at once)"
    progress=()
    [[ ! -t 1 ]] || progress=(--progress)  # one line that is overwritten
    ctest --preset release --parallel "$jobs" "${progress[@]}" \
      --output-junit "$build/test-results.xml" "$@"
    ;;
  build) build_exercises "$@" ;;
  exercise) judge_exercise "$@" ;;
  install)
    [[ $# -eq 0 ]] || die "install takes no $1" 2
    mkdir -p "$build"
    : >"$log"
    install_missing "${packages[@]}" "${docs_packages[@]}" "${extra_packages[@]}"
    ;;
  docs)
    [[ $# -eq 0 ]] || die "docs takes no $1" 2
    prepare "${packages[@]}" "${docs_packages[@]}"
    build_targets docs
    say "docs: $build/docs/html/index.html"
    ;;
esac
