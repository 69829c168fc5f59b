// The main() of every chapter program.
#include "run/runner.h"

int main(int argc, char** argv) { return attn::run_chapter(attn::chapter(), argc, argv); }
