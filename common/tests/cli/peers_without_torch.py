"""peers.py: problem lists and ratios, with a stand-in for PyTorch. Arguments: peers.py, an empty folder."""
import argparse
import importlib.util
import io
import os
import subprocess
import sys
import types
from contextlib import redirect_stderr, redirect_stdout

script, folder = sys.argv[1:3]


def module(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


module("torch", bfloat16=0, float16=0, float32=0, cuda=types.SimpleNamespace(is_available=lambda: False))
module("torch.nn")
module("torch.nn.attention", sdpa_kernel=None,
       SDPBackend=types.SimpleNamespace(MATH=1, FLASH_ATTENTION=2, CUDNN_ATTENTION=3))
module("torch.nn.functional", scaled_dot_product_attention=None)
spec = importlib.util.spec_from_file_location("peers", script)
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)

list_file = os.path.join(folder, "problems.txt")


def exit_of(*words):
    """Exit status of main() and what it said."""
    said, sys.argv = io.StringIO(), ["peers.py", "--program", os.path.join(folder, "x"), *words]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            peers.main()
    except SystemExit as e:
        return e.code, said.getvalue()
    return 0, said.getvalue()


def problems(text, *words):
    with open(list_file, "w", encoding="utf-8") as file:
        file.write(text)
    given = vars(peers.problem_options().parse_args(words))
    return peers.problems_of(argparse.Namespace(problems=list_file, seqlens="", **given))


p = problems("--batch 2 --seqlen 8192 --causal  # long\n\n# nothing\n--operation softmax --rows 8 --cols 77 --step v4\n"
             "--operation decode --seqlen-k 4096\n", "--heads", "8", "--dtype", "fp16")
assert len(p) == 3
assert peers.program_options(p[0]) == ("--operation forward --dtype fp16 --batch 2 --heads 8 --kv-heads 8 --head-dim 128 "
                                       "--seqlen-q 8192 --seqlen-k 8192 --causal").split()
assert peers.program_options(p[1]) == "--operation softmax --dtype fp16 --rows 8 --cols 77".split()
assert p[1].steps == "v4" and p[0].steps == "all"
assert "--seqlen-q 1 --seqlen-k 4096" in " ".join(peers.program_options(p[2]))

# The ratio of each round by itself: a GPU that got slower for both sides changes nothing.
runs = [{"steps": [{"name": "v1", "time": {"median_s": m}}, {"name": "v2", "time": None}]} for m in (2.0, 4.0, 6.0)]
r = peers.ratios_of(runs, {"math": [[1, 3, 9], [6, 6], [12, 12]], "flash": "not supported"})
assert r == [{"step": "v1", "peer": "math", "median": 1.5, "q1": 1.5, "q3": 1.75}], r

# Another chapter's step that refuses a problem, or has not the memory: its reason, and no ratio. Anything else
# ends the run.
def other_chapter(status, time):
    with open(os.path.join(folder, "01_other"), "w", encoding="utf-8") as file:
        file.write("#!/bin/sh\nwhile [ $1 != --json ]; do shift; done\n"
                   f"echo '{{\"steps\": [{{\"time\": {time}, \"reason\": \"out of memory: 2 TiB\"}}]}}' >$2\n"
                   f"echo options: $@ >{folder}/options\nexit {status}\n")
    os.chmod(os.path.join(folder, "01_other"), 0o755)
    args = argparse.Namespace(program=os.path.join(folder, "x"), warmup=1, repeat=2, check="off")
    try:
        return peers.time_of_other_chapter(args, p[0], "01_other:v5")
    except RuntimeError as error:
        return str(error)
    except SystemExit:
        return "exit"


assert other_chapter(0, '{"q1_s": 1, "median_s": 2, "q3_s": 3}') == [1, 2, 3]
with open(os.path.join(folder, "options"), encoding="utf-8") as file:
    assert "--gpu h200" in file.read()
assert other_chapter(4, "null") == "out of memory: 2 TiB"
assert other_chapter(3, "null") == "out of memory: 2 TiB"
assert other_chapter(1, "null") == "exit"

assert exit_of()[0] == 77
code, said = exit_of("--backends", "math,triton")
assert code == 2 and "--backends triton: must be some of math, flash, cudnn or CHAPTER:STEP" in said, said
with open(list_file, "w", encoding="utf-8") as file:
    file.write("--seqlen-q 3 --seqlen-k 7 --causal\n")
code, said = exit_of("--problems", list_file)
assert code == 2 and "--causal needs equal lengths" in said, said
# Without PyTorch: 77, and the reason.
alone = subprocess.run([sys.executable, "-I", "-S", script, "--program", "x"], capture_output=True, text=True, check=False)
assert alone.returncode == 77 and "not installed" in alone.stdout, alone
print("everything as expected")
