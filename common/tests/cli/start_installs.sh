#!/usr/bin/env bash
# start_installs.sh START: what start.sh asks of apt-get and cmake, on machines that are played by
# stand-ins for dpkg-query, sudo, id, nvidia-smi and the tools, which write down how they were called.
# shellcheck disable=SC2016  # the bodies of stand-ins are expanded when they run
set -euo pipefail
unset ATTN_CMAKE_ARGS ATTN_JOBS ATTN_NO_INSTALL  # of the caller's shell: .ci/run sets the first
start=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/a tree/common/scripts" "$work/system"
cp "$start" "$(dirname "$start")/build_progress.sh" "$work/a tree/common/scripts/"

# The real commands that start.sh itself needs, and nothing else of this machine.
for tool in bash env cat mkdir dirname basename grep tail wc awk sed rm nproc getconf tee; do
  ln -s "$(command -v "$tool")" "$work/system/$tool"
done

stand_in() {  # MACHINE TOOL BODY
  printf '#!/usr/bin/env bash\nprintf "%%s\\n" "%s $*" >>"$CALLS"\n%s\n' "$2" "$3" >"$work/$1/$2"
  chmod +x "$work/$1/$2"
}
machine() {  # NAME USER_ID INSTALLED...: Debian
  local name=$1 user=$2
  shift 2
  mkdir -p "$work/$name"
  stand_in "$name" id "echo $user"
  stand_in "$name" dpkg-query "printf '%s installed\n' $*; exit 1"
  stand_in "$name" apt-get "exit 0"
  stand_in "$name" cmake "exit 0"
  for tool in g++ ninja git; do stand_in "$name" "$tool" "exit 0"; done
}
run() {  # NAME [ARGUMENT...]: sets status, output, calls
  status=0
  export CALLS=$work/$1.calls
  rm -rf "$CALLS" "$work/a tree/build"
  : >"$CALLS"
  local arguments=("${@:2}")
  output=$(PATH=$work/$1:$work/system "$work/a tree/common/scripts/start.sh" \
    "${arguments[@]:-build}" 2>&1 </dev/null) || status=$?
  calls=$(<"$CALLS")
}
fail() {
  printf 'FAILED: %s\n--- exit %s\n%s\n--- calls\n%s\n' "$1" "$status" "$output" "$calls"
  exit 1
}
has() { [[ $2 == *"$1"* ]] || fail "no '$1'"; }
has_not() { [[ $2 != *"$1"* ]] || fail "'$1'"; }
count() { grep -c -- "$1" <<<"$calls" || true; }

all=(g++ cmake ninja-build git libeigen3-dev catch2 libbenchmark-dev libcli11-dev nlohmann-json3-dev
     libfmt-dev libboost-context-dev libmd4c-dev libmd4c-html0-dev)

# Nothing is missing but what is nice to have: apt-get is left alone.
machine complete 0 "${all[@]}"
run complete
[[ $status -eq 0 ]] || fail "exit status"
has_not apt-get "$calls"
has "cmake --preset release" "$calls"
has "cmake --build --preset release" "$calls"

# Root: one update, one install, of what is missing alone, and no question.
machine root 0 "${all[@]:0:9}"
run root
[[ $status -eq 0 ]] || fail "exit status"
[[ $(count '^apt-get .*update') -eq 1 && $(count '^apt-get .*install') -eq 1 ]] || fail "one of each"
has "install -y --no-install-recommends libfmt-dev libboost-context-dev libmd4c-dev libmd4c-html0-dev ccache python3-numpy" "$calls"
has_not "libeigen3-dev" "$(grep '^apt-get' <<<"$calls")"

# Tools that did not come from packages are as good; one that did not come at all is installed.
machine pip 0 "${all[@]:4}"
rm "$work/pip/git"
run pip
[[ $status -eq 0 ]] || fail "exit status"
has "install -y --no-install-recommends git ccache python3-numpy" "$calls"

# Not root, sudo that needs no password.
machine sudoer 1000 "${all[@]:0:10}"
stand_in sudoer sudo '[[ $1 != -n ]] || shift; "$@"'
run sudoer
[[ $status -eq 0 ]] || fail "exit status"
has "sudo env DEBIAN_FRONTEND=noninteractive apt-get" "$calls"
has "install -y --no-install-recommends libboost-context-dev" "$calls"

# sudo needs a password without a terminal; the tools are installed: prints advice and continues.
machine student 1000 "${all[@]:0:10}"
stand_in student sudo 'exit 1'
run student
[[ $status -eq 0 ]] || fail "exit status"
has "apt-get update && apt-get install -y libboost-context-dev" "$output"
has_not "apt-get " "$(grep -v '^sudo' <<<"$calls")"
has "cmake --preset release" "$calls"

# No sudo, no ninja: the advice, and the end.
machine bare 1000
rm "$work/bare/ninja"
run bare
[[ $status -eq 1 ]] || fail "exit status"
has "not found: ninja" "$output"
has "apt-get update && apt-get install -y ninja-build libeigen3-dev" "$output"
has_not "cmake --" "$calls"

# apt-get fails: its status, and what it said.
machine broken 0
stand_in broken apt-get 'echo "E: no such mirror"; exit 100'
run broken
[[ $status -eq 100 ]] || fail "exit status"
has "E: no such mirror" "$output"
has "ATTN_NO_INSTALL=1" "$output"
has_not "cmake --" "$calls"

# Another system: the names, and on it goes.
machine fedora 1000
rm "$work/fedora/dpkg-query" "$work/fedora/apt-get"
run fedora
[[ $status -eq 0 ]] || fail "exit status"
has "libeigen3-dev" "$output"
has "cmake --preset release" "$calls"

# A build that fails: its status, its first error, where the rest is.
machine failing 0 "${all[@]}"
stand_in failing cmake '[[ $1 != --build ]] || { echo "FAILED: x.o"; echo "x.cpp:1: error"; exit 3; }'
run failing
[[ $status -eq 3 ]] || fail "exit status"
has "x.cpp:1: error" "$output"
has "build.log" "$output"

# A GPU: code for it alone; what there is to compile, without what has been.
machine gpu 0 "${all[@]}"
stand_in gpu nvcc 'echo compute_89; echo compute_90'
stand_in gpu nvidia-smi 'printf "9.0\n9.0\n8.9\n"'
stand_in gpu ninja 'for n in 1 2 3 4; do echo "/usr/bin/c++ -O2 -o x/$n.cpp.o -c $n.cpp"; done
echo "nvcc -c k.cu -o x/k.cu.o"; echo "c++ x/1.cpp.o -o bin/x"'
run gpu
[[ $status -eq 0 ]] || fail "exit status"
has "cmake --preset release -DCMAKE_CUDA_ARCHITECTURES=90-real;89-real" "$calls"
has "files to compile: 4, for the GPU 1; about 1 min" "$output"

# One that this nvcc does not know: the project's own choice.
stand_in gpu nvidia-smi 'echo 12.0'
run gpu
has_not "ARCHITECTURES" "$calls"

# What the user says of CUDA counts.
stand_in gpu nvidia-smi 'echo 9.0'
export ATTN_CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=80-real
run gpu
has "cmake --preset release -DCMAKE_CUDA_ARCHITECTURES=80-real" "$calls"
has_not "90-real" "$calls"
unset ATTN_CMAKE_ARGS

# No GPU: no code for one, and how to get it.
if [[ ! -e /dev/nvidiactl ]]; then
  stand_in gpu nvidia-smi 'exit 9'
  run gpu
  has "cmake --preset release -DATTN_CUDA=OFF" "$calls"
  has "left out: code for a GPU" "$output"
fi

# One exercise: its targets alone, and where to write.
mkdir -p "$work/a tree/01_naive/exercises"
touch "$work/a tree/01_naive/exercises/"{a.md,a.stub.inc,d.md}
run complete build --exercise ex01a --exercise=ex01d
[[ $status -eq 0 ]] || fail "exit status"
has "--target ex01a_student judge_01_naive quiz_01_naive" "$calls"
has "edit 01_naive/exercises/student/ex01d.txt, then: common/scripts/start.sh exercise ex01d" \
  "$output"

# What all need, and nothing is configured.
run root install
[[ $status -eq 0 ]] || fail "exit status"
has "libfmt-dev libboost-context-dev libmd4c-dev libmd4c-html0-dev doxygen libjs-mathjax ccache" "$calls"
has_not "cmake --" "$calls"
echo "everything as expected"
