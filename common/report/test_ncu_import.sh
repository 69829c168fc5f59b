#!/usr/bin/env bash
# test_ncu_import.sh ATTN_REPORT FOLDER NAME
# Compares NAME.ncu.csv with two_kernels.ncu.csv by attn_report diff: exit status and output must be
# those of NAME.txt. Exports that differ in form alone give the counters of two_kernels.ncu.csv;
# what cannot be read for certain gives one line with the number of the line in the file.
set -uo pipefail
cd "$2" || exit 1
actual=$("$1" diff two_kernels.ncu.csv "$3.ncu.csv" 2>&1; echo "exit: $?")
diff -u "$3.txt" <(printf '%s\n' "$actual")
