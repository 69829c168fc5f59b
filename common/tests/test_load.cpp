/// \file
/// Files of --load and --save: both orders of heads and tokens, element types, files that
/// contradict the options, empty problems. Tested through the program of chapter 01, like a user.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "attn/error.h"
#include "files/npy.h"
#include "files/tensor_files.h"
#include "run/options.h"
#include "run/runner.h"
#include "tests/npy_files.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

using Words = std::vector<std::string>;

int run(Words words) {
  words.insert(words.begin(), {"01_naive", "--device", "emulated", "--step", "v1_global"});
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  return run_chapter(chapter(), static_cast<int>(argv.size()), argv.data());
}

// The result of parsing and loading: the error, the warning, or "".
std::string said(Words words) {
  words.insert(words.begin(), {"01_naive", "--step", "v1_global"});
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  try {
    const auto o = parse_options(chapter(), static_cast<int>(argv.size()), argv.data());
    load_inputs(o->load, o->problem, *o->operation);
    return o->warning;
  } catch (const InputError& e) {
    return e.what();
  }
}

void write_ones(const std::string& folder, const char* name, const std::vector<int64_t>& shape) {
  std::filesystem::create_directories(folder);
  int64_t count = 1;
  for (const int64_t side : shape) count *= side;
  const std::vector<float> ones(static_cast<std::size_t>(count), 1.0f);
  write_npy(std::filesystem::path(folder) / (std::string(name) + ".npy"), shape, ones.data());
}
void write_qkv(const std::string& folder, const std::vector<int64_t>& q,
               const std::vector<int64_t>& k) {
  write_ones(folder, "q", q), write_ones(folder, "k", k), write_ones(folder, "v", k);
}
bool has(const std::string& text, const std::string& part) {
  INFO(text);
  return text.find(part) != std::string::npos;
}

struct Folder {
  std::string path;
  explicit Folder(const char* name) : path(name) { std::filesystem::remove_all(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string operator/(const char* name) const { return path + "/" + name; }
};

}  // namespace

TEST_CASE("FlashAttention's layout is read and written", "[load]") {
  const Folder bhnd("layout_bhnd"), bnhd("layout_bnhd"), again("layout_again");
  const Words shape{"--batch",    "2", "--heads",    "6", "--kv-heads", "2",
                    "--seqlen-q", "5", "--seqlen-k", "9", "--head-dim", "8"};
  const auto with = [&](Words words) {
    words.insert(words.begin(), shape.begin(), shape.end());
    return words;
  };
  REQUIRE(run(with({"--save", bhnd.path})) == 0);
  REQUIRE(run(with({"--save", bnhd.path, "--layout", "bnhd"})) == 0);
  REQUIRE(run({"--load", bnhd.path, "--layout", "bnhd", "--save", again.path}) == 0);
  for (const char* name : {"q", "k", "v", "v1_global/o"}) {
    const NpyArray a = read_npy(bhnd / (std::string(name) + ".npy").c_str());
    const NpyArray b = read_npy(bnhd / (std::string(name) + ".npy").c_str());
    REQUIRE(b.shape == std::vector<int64_t>{a.shape[0], a.shape[2], a.shape[1], a.shape[3]});
    int64_t wrong = 0;
    const auto at = [](const NpyArray& x, int64_t i, int64_t j, int64_t n, int64_t c) {
      return x
          .data[static_cast<std::size_t>(((i * x.shape[1] + j) * x.shape[2] + n) * x.shape[3] + c)];
    };
    for (int64_t i = 0; i < a.shape[0]; ++i)
      for (int64_t h = 0; h < a.shape[1]; ++h)
        for (int64_t n = 0; n < a.shape[2]; ++n)
          for (int64_t c = 0; c < a.shape[3]; ++c) wrong += at(a, i, h, n, c) != at(b, i, n, h, c);
    CHECK(wrong == 0);
    if (std::string(name) != "v1_global/o") continue;  // O, recomputed from loaded inputs
    CHECK(read_npy(again / "v1_global/o.npy").data == b.data);
  }
  // lse is [batch, heads, seqlen_q] in both, like FlashAttention's softmax_lse.
  CHECK(read_npy(bnhd / "v1_global/lse.npy").data == read_npy(bhnd / "v1_global/lse.npy").data);
  // Gradients, too.
  const Folder grads("layout_grads");
  const Words backward{"--step",   "b1_global", "--batch",    "1", "--heads", "3",
                       "--seqlen", "5",         "--head-dim", "8", "--save"};
  Words words = backward;
  words.push_back(bhnd / "backward");
  REQUIRE(run(words) == 0);
  words.back() = grads.path;
  words.insert(words.end(), {"--layout", "bnhd"});
  REQUIRE(run(words) == 0);
  for (const char* name : {"do", "b1_global/dq", "b1_global/dk", "b1_global/dv"}) {
    const NpyArray a = read_npy(bhnd / (std::string("backward/") + name + ".npy").c_str());
    const NpyArray b = read_npy(grads / (std::string(name) + ".npy").c_str());
    INFO(name);
    REQUIRE(b.shape == std::vector<int64_t>{1, 5, 3, 8});
    int64_t wrong = 0;
    for (std::size_t h = 0; h < 3; ++h)
      for (std::size_t n = 0; n < 5; ++n)
        for (std::size_t c = 0; c < 8; ++c)
          wrong += a.data[(h * 5 + n) * 8 + c] != b.data[(n * 3 + h) * 8 + c];
    CHECK(wrong == 0);
  }
  CHECK(said({"--layout", "bnhd"}) == "--layout: needs --load or --save");
  CHECK(has(said({"--layout", "bhdn", "--load", bhnd.path}), "must be one of bhnd, bnhd"));
}

TEST_CASE("files that can be read in both orders are warned of", "[load]") {
  const Folder f("both_orders");
  write_qkv(f.path, {1, 97, 8, 16}, {1, 97, 8, 16});  // 97 queries of 8 heads, or the reverse
  CHECK(has(said({"--load", f.path}), "warning: both_orders/q.npy: [1, 97, 8, 16] is read as"));
  CHECK(has(said({"--load", f.path}), "97 heads and 8 queries"));
  CHECK(said({"--load", f.path, "--layout", "bhnd"}) == "");
  CHECK(said({"--load", f.path, "--layout", "bnhd"}) == "");
  // Grouped heads: only one of the two is possible.
  write_qkv(f.path, {1, 97, 8, 16}, {1, 90, 2, 16});
  CHECK(has(said({"--load", f.path}), "say --layout bnhd"));
  CHECK(said({"--load", f.path, "--layout", "bnhd"}) == "");
  // One query, or fewer heads than queries: the usual reading.
  write_qkv(f.path, {1, 32, 1, 16}, {1, 8, 40, 16});
  CHECK(said({"--load", f.path}) == "");
  write_qkv(f.path, {1, 4, 64, 16}, {1, 4, 64, 16});
  CHECK(said({"--load", f.path}) == "");
}

TEST_CASE("an error about a shape names the file, not an option that was not given", "[load]") {
  const Folder f("wrong_shapes");
  write_qkv(f.path, {1, 3, 8, 16}, {1, 2, 8, 16});
  CHECK(has(said({"--load", f.path}), "3 heads are no multiple of the 2 of k.npy"));
  CHECK(has(said({"--load", f.path, "--layout", "bhnd"}),
            "wrong_shapes/q.npy: 3 heads and wrong_shapes/k.npy: 2: the query heads must be"));
  write_qkv(f.path, {1, 2, 8, 16}, {1, 2, 8, 32});
  CHECK(has(said({"--load", f.path}),
            "wrong_shapes/k.npy: has shape [1, 2, 8, 32] and "
            "wrong_shapes/q.npy has [1, 2, 8, 16]"));
  write_qkv(f.path, {2, 8, 16}, {1, 2, 8, 16});
  CHECK(has(said({"--load", f.path}), "wrong_shapes/q.npy: has shape [2, 8, 16], must be [batch"));
  write_qkv(f.path, {1, 2, 8, 16}, {1, 2, 8, 16});
  write_ones(f.path, "v", {1, 2, 7, 16});
  CHECK(has(said({"--load", f.path}), "wrong_shapes/v.npy: has shape [1, 2, 7, 16]"));
  CHECK(has(said({"--load", f / "q.npy"}), "not a folder"));
  CHECK(has(said({"--load", "nowhere"}), "no such folder"));
}

TEST_CASE("float16 files are taken where the kernel computes in fp16", "[load]") {
  const Folder f("halves");
  write_qkv(f.path, {1, 1, 4, 8}, {1, 1, 4, 8});
  const std::vector<std::uint16_t> halves(32, 0x3C00);  // 1
  write_npy_bytes(f / "q.npy", {1, 1, 4, 8}, "<f2", halves.data());
  CHECK(said({"--load", f.path, "--dtype", "fp16"}) == "");
  CHECK(run({"--load", f.path, "--dtype", "fp16"}) == 0);
  CHECK(has(said({"--load", f.path, "--dtype", "bf16"}),
            "float16: convert with .astype(np.float32), or compute in fp16"));
}

TEST_CASE("a file that contradicts the options is refused, not ignored", "[load]") {
  const Folder f("contradictions");
  write_ones(f.path, "q", {7, 1, 8}), write_ones(f.path, "k", {7, 1, 8});
  write_ones(f.path, "v", {7, 1, 8});
  const auto lengths = [&](std::vector<int32_t> begins) {
    write_npy_bytes(f / "cu_seqlens_q.npy", {std::ssize(begins)}, "<i4", begins.data());
  };
  Problem p;
  p.heads = p.kv_heads = 1, p.head_dim = 8, p.varlen_q = {3, 4};
  p.inputs = InputKind::files;
  p.finish();
  const auto why = [&]() -> std::string {
    try {
      load_inputs(f.path, p, forward());
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  CHECK(why() == "");
  CHECK(said({"--load", f.path, "--varlen", "3,4", "--heads", "1"}).find("SIG") ==
        std::string::npos);  // without --varlen-k
  lengths({0, 3, 7});
  CHECK(why() == "");
  lengths({0, 4, 7});
  CHECK(why() == "contradictions/cu_seqlens_q.npy: differs from what the options say");
}

TEST_CASE("a batch or a length of 0 is an empty result", "[load]") {
  const Folder f("empty");
  for (const Words& zero :
       {Words{"--batch", "0"}, {"--seqlen-q", "0"}, {"--seqlen-k", "0"}, {"--seqlen", "0"}}) {
    INFO(zero[0]);
    Words words{"--head-dim", "8", "--heads", "2", "--save", f.path};
    if (zero[0] != "--seqlen") words.insert(words.end(), {"--seqlen-q", "3", "--seqlen-k", "3"});
    words.insert(words.end(), zero.begin(), zero.end());
    CHECK(run(words) == 0);
    const NpyArray o = read_npy(f / "v1_global/o.npy"), lse = read_npy(f / "v1_global/lse.npy");
    const bool rows = zero[0] == "--seqlen-k";
    CHECK(o.shape == std::vector<int64_t>{zero[0] == "--batch" ? 0 : 1, 2,
                                          zero[0] == "--seqlen-q" || zero[0] == "--seqlen" ? 0 : 3,
                                          8});
    CHECK(lse.data.size() == (rows ? 6u : 0u));
    CHECK(std::ranges::all_of(o.data, [](float x) { return x == 0; }));
    CHECK(std::ranges::all_of(lse.data, [](float x) { return x == -INFINITY; }));
    CHECK(run({"--load", f.path}) == 0);  // now the files are inputs again
  }
  CHECK(run({"--seqlen-q", "0", "--head-dim", "7000"}) == run({"--head-dim", "7000"}));
  CHECK(run({"--batch", "-1"}) == 2);
}
