// Decode with a partly filled cache: contiguous, and in pages in any order. One kernel for both,
// and its possible faults.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "attn/error.h"
#include "files/tensor_files.h"
#include "run/runner.h"
#include "tests/step_cases.h"

#define ATTN_EMULATED
#include "attn/kernel.h"

using namespace attn;
using namespace attn::tests;

namespace {

enum class Wrong { nothing, next_page, one_too_many, one_too_few, whole_cache, row_of_another };
Wrong wrong = Wrong::nothing;

// The location of row i of a sequence: page_table is null for a contiguous cache.
struct Cache {
  const int *seqused_k, *page_table;
  int room, page_size, max_pages;
  __device__ int64_t row(int b, int kv_heads, int hkv, int i) const {
    if (page_table == nullptr) return (int64_t{b} * kv_heads + hkv) * room + i;
    const int of = wrong == Wrong::row_of_another && b == 2 ? 0 : b;
    int64_t page = page_table[of * max_pages + i / page_size];
    if (wrong == Wrong::next_page && i == page_size) page ^= 1;
    return (page * page_size + i % page_size) * kv_heads + hkv;
  }
};

// O and lse of one query per block, key by key: the running maximum and sum of chapter 02.
__global__ void decode_kernel(const float* q, const float* k, const float* v, float* o, float* lse,
                              Shape shape, Cache cache) {
  const int i = static_cast<int>(blockIdx.x), h = static_cast<int>(blockIdx.y),
            b = static_cast<int>(blockIdx.z);
  const int c = static_cast<int>(threadIdx.x), hkv = h / (shape.heads / shape.kv_heads);
  int used = cache.seqused_k[b];
  if (wrong == Wrong::one_too_many) ++used;
  if (wrong == Wrong::one_too_few) --used;
  if (wrong == Wrong::whole_cache) used = cache.room;
  const int64_t query = (int64_t{b} * shape.heads + h) * shape.seqlen_q + i;
  const int last = min(used, i + used - shape.seqlen_q + shape.window_right + 1);
  float row_max = -INFINITY, row_sum = 0, acc = 0;
  for (int j = 0; j < last; ++j) {
    const int64_t row = cache.row(b, shape.kv_heads, hkv, j) * shape.head_dim;
    float s = 0;
    for (int n = 0; n < shape.head_dim; ++n)
      s += shape.softmax_scale * q[query * shape.head_dim + n] * k[row + n];
    const float new_max = fmaxf(row_max, s), rescale = expf(row_max - new_max),
                p = expf(s - new_max);
    row_sum = row_sum * rescale + p;
    acc = acc * rescale + p * v[row + c];
    row_max = new_max;
  }
  o[query * shape.head_dim + c] = row_sum > 0 ? acc / row_sum : 0;
  if (c == 0) lse[query] = row_sum > 0 ? row_max + logf(row_sum) : -INFINITY;
}

Status launch(const Arguments& args) {
  const Problem& p = args.problem;
  const auto own = [&](const char* name) {
    return p.own.contains(name) ? static_cast<int>(p.own.at(name)[0]) : 0;
  };
  Cache cache{args.in<int>("seqused_k"), args.in_or_null<int>("page_table"),
              static_cast<int>(p.seqlen_k), own("page_size"), 0};
  if (cache.page_size > 0) cache.max_pages = (cache.room + cache.page_size - 1) / cache.page_size;
  const dim3 grid(static_cast<unsigned>(p.seqlen_q), static_cast<unsigned>(p.heads),
                  static_cast<unsigned>(p.batch));
  return launch_kernel(decode_kernel, grid, dim3(static_cast<unsigned>(p.head_dim)), 0, args.stream,
                       args.in<float>("q"), args.in<float>("k"), args.in<float>("v"),
                       args.out<float>("o"), args.out<float>("lse"), shape_of(p), cache);
}

// ---- the same operation with K and V in pages --------------------------------------------------

int64_t page_size(const Problem& p) { return static_cast<int64_t>(p.own.at("page_size")[0]); }
int64_t max_pages(const Problem& p) { return (p.seqlen_k + page_size(p) - 1) / page_size(p); }
int64_t num_pages(const Problem& p) { return p.batch * max_pages(p) + 3; }  // some are unused
std::vector<int64_t> used(const Problem& p) {
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < p.batch; ++b) lengths.push_back(p.sequence(b).seqlen_k);
  return lengths;
}

// Pages in random order; entries past a sequence's end are invalid.
void shuffled(const Problem& p, HostTensor& table) {
  std::vector<int64_t> pages(static_cast<std::size_t>(num_pages(p)));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937_64(p.seed));
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t n = 0; n < max_pages(p); ++n) {
      const auto at = static_cast<std::size_t>(b * max_pages(p) + n);
      table.numbers[at] = n * page_size(p) < p.sequence(b).seqlen_k ? pages[at] : 2147480000;
    }
}
TensorSpec table_of(const Problem& p) {
  return {"page_table", {1, 1, p.batch, max_pages(p)}, DType::int32, {}, shuffled, false, 2};
}
TensorSpec in_pages(const Problem& p, const char* name, const HostTensor& table) {
  return {name,
          {num_pages(p), page_size(p), p.kv_heads, p.head_dim},
          p.dtype,
          Layout::paged(table, used(p), num_pages(p), page_size(p), p.kv_heads)};
}

const Operation& paged_decode() {
  static const Operation operation = [] {
    Operation op = decode();
    op.name = "paged_decode";
    op.inputs = [](const Problem& p) {
      HostTensor table = zeros(table_of(p));
      shuffled(p, table);
      std::vector<TensorSpec> specs = attention_inputs(p);
      for (TensorSpec& spec : specs)
        if (spec.name == "k" || spec.name == "v") spec = in_pages(p, spec.name.c_str(), table);
      specs.push_back(seqused_of(p));
      specs.push_back(table.spec);
      return specs;
    };
    op.place = [](const Problem& p, HostTensors& in) {
      for (const char* name : {"k", "v"}) in.at(name).spec = in_pages(p, name, in.at("page_table"));
    };
    op.own = {{.name = "page_size",
               .lacking = "pages",
               .help = "tokens a page (16)",
               .kind = Feature::Kind::number,
               .least = 1,
               .most = 4096,
               .whole = true,
               .otherwise = 16,
               .everywhere = true}};
    return op;
  }();
  return operation;
}

Step step_of(const Operation& op) {
  return {.name = "v1_query_a_block",
          .operation = &op,
          .idea = "",
          .support = "",
          .refuses = [](const Problem&) { return std::nullopt; },
          .workspaces = [](const Problem&) { return std::vector<Workspace>(); },
          .cost = [](const Problem&) { return Cost{{.name = "attention"}}; },
          .launch = {nullptr, launch},
          .takes = {"seqused"}};
}

Problem decode_problem(std::vector<int64_t> lengths, int64_t room, int64_t queries = 1) {
  Problem p = problem(queries, room, 8, DType::fp32);
  p.batch = static_cast<int64_t>(lengths.size()), p.heads = 6, p.kv_heads = 2;
  p.seqused_k = std::move(lengths);
  p.own["page_size"] = {5};
  p.finish();
  return p;
}

std::string found(const Operation& op, const Problem& p, Wrong what) {
  wrong = what;
  const std::string why = run_step(step_of(op), p, Backend::emulated);
  wrong = Wrong::nothing;
  return why;
}

}  // namespace

TEST_CASE("a cache in pages gives what a contiguous one gives", "[decode]") {
  for (const InputKind inputs : {InputKind::random, InputKind::needle, InputKind::peaked})
    for (const int64_t page : {1, 4, 5, 16, 64})
      for (const int64_t queries : {1, 3}) {
        Problem p = decode_problem({17, 0, 1, 40, 16, 33}, 40, queries);
        p.own["page_size"] = {static_cast<double>(page)};
        p.inputs = inputs, p.causal = queries > 1, p.seed = static_cast<uint64_t>(page);
        INFO(p.text());
        CHECK(found(decode(), p, Wrong::nothing) == "");
        CHECK(found(paged_decode(), p, Wrong::nothing) == "");
        // The reference for a paged copy of the same tokens is bitwise equal to the contiguous one.
        const HostTensors flat = draw(decode(), p).tensors;
        HostTensors paged = draw(paged_decode(), p).tensors;
        paged.at("q").data = flat.at("q").data;
        for (const char* name : {"k", "v"})
          for (int64_t b = 0; b < p.batch; ++b)
            for (int64_t h = 0; h < p.kv_heads; ++h)
              for (int64_t i = 0; i < p.sequence(b).seqlen_k; ++i)
                std::copy_n(flat.at(name).row(b, h, i), p.head_dim,
                            const_cast<float*>(paged.at(name).row(b, h, i)));
        const auto a = decode().reference(p, flat, {}), b = paged_decode().reference(p, paged, {});
        CHECK((a[0].reference == b[0].reference && a[1].reference == b[1].reference));
      }
}

TEST_CASE("a step that reads other rows of a cache than its own is found", "[decode]") {
  const Problem p =
      decode_problem({17, 3, 7, 41, 16}, 44);  // the next key lies in a valid page
  for (const Wrong what : {Wrong::one_too_many, Wrong::one_too_few, Wrong::whole_cache}) {
    CHECK(found(decode(), p, what) != "");
    if (what != Wrong::whole_cache)
      CHECK(found(paged_decode(), p, what) != "");  // its table has no such pages
  }
  CHECK(found(paged_decode(), p, Wrong::next_page) != "");
  CHECK(found(paged_decode(), p, Wrong::row_of_another) != "");
}

TEST_CASE("what a cache holds behind its end, and in pages of nobody, is NaN", "[decode]") {
  const Problem p = decode_problem({3, 0, 5}, 7);
  for (const Operation* op : {&decode(), &paged_decode()}) {
    const HostTensors in = draw(*op, p).tensors;
    int64_t numbers = 0;
    for (const float x : in.at("k").data) numbers += !std::isnan(x);
    CHECK(numbers == (3 + 5) * p.kv_heads * p.head_dim);
    for (int64_t i = 0; i < 5; ++i) CHECK_FALSE(std::isnan(in.at("v").row(2, 1, i)[0]));
  }
}

TEST_CASE("decode is rated by the keys and values in use", "[decode]") {
  const Problem p = decode_problem({3, 0, 5}, 700);
  const double q = 3 * 6 * 8 * 4, lse = 3 * 6 * 4;
  CHECK(decode().compulsory_bytes(p) == 2 * 8 * 2 * 8 * 4 + 2 * q + lse);
  CHECK(decode().flop(p) == 4 * 8 * 6 * (3 + 5));
  CHECK(refusal(step_of(decode()), p) == std::nullopt);
  Step without = step_of(decode());
  without.takes.clear();
  CHECK(refusal(without, p) == "--seqused: this step has no partly filled cache");
}

TEST_CASE("decode goes through the chapter program", "[decode]") {
  const Chapter chapter{"09_decode", "the test's", {step_of(decode()), step_of(paged_decode())}};
  const auto run = [&](std::vector<const char*> options) {
    options.insert(options.begin(), {"09_decode", "--device", "emulated", "--dtype", "fp32",
                                     "--batch", "3", "--head-dim", "16", "--json", "decode.json"});
    const int status = run_chapter(chapter, static_cast<int>(options.size()), options.data());
    return std::pair(status, status == 0 ? nlohmann::json::parse(std::ifstream("decode.json"))
                                         : nlohmann::json());
  };
  const auto [status, j] =
      run({"--heads", "6", "--kv-heads", "2", "--seqlen-k", "50", "--seqused", "0,17,50"});
  REQUIRE(status == 0);
  CHECK(
      (j["problem"]["seqlen_q"] == 1 && j["problem"]["seqused_k"] == std::vector<int>{0, 17, 50}));
  CHECK(j["steps"][0]["useful_read_s"].get<double>() ==
        Approx(j["steps"][0]["compulsory_bytes"].get<double>() / 4.8e12));
  CHECK(j["steps"][0]["useful_bytes_per_s"].is_null());
  // Default pages of 16, and the option's value.
  CHECK(run({"--operation", "paged_decode", "--seqlen", "50"})
            .second["problem"]["own"]["page_size"][0] == 16);
  CHECK(run({"--operation", "paged_decode", "--seqlen", "50", "--page-size", "7"}).first == 0);
  CHECK(run({"--page-size", "7"}).first == 2);  // an option of the other operation
  CHECK(run({"--seqlen-q", "4", "--seqlen-k", "50", "--seqused", "2,17,50", "--causal", "--inputs",
             "needle"})
            .first == 0);
  // Lengths from a file.
  CHECK(run({"--seqlen-k", "50", "--seqused", "0,17,50", "--save", "decode_files"}).first == 0);
  CHECK(run({"--load", "decode_files"}).second["problem"]["seqused_k"] ==
        std::vector<int>{0, 17, 50});
  CHECK(run({"--load", "decode_files", "--seqused", "1,2,3"}).first == 2);
  std::filesystem::remove_all("decode_files");
}

TEST_CASE("a page table is loaded, and one outside the pool is refused by its entry", "[decode]") {
  const std::string folder = "paged_files";
  std::filesystem::remove_all(folder);
  const Problem p = decode_problem({17, 0, 7}, 20);
  HostTensors in = draw(paged_decode(), p).tensors;
  // A different page order from the one that would be drawn.
  HostTensor& table = in.at("page_table");
  for (int64_t& page : table.numbers)
    if (page < num_pages(p)) page = num_pages(p) - 1 - page;
  std::vector<float> reversed;
  const std::size_t page_elements = in.at("k").data.size() / static_cast<std::size_t>(num_pages(p));
  for (const char* name : {"k", "v"}) {
    std::vector<float>& data = in.at(name).data;
    reversed.clear();
    for (auto end = data.end(); end != data.begin();
         end -= static_cast<std::ptrdiff_t>(page_elements))
      reversed.insert(reversed.end(), end - static_cast<std::ptrdiff_t>(page_elements), end);
    data = reversed;
  }
  const auto expected = paged_decode().reference(p, draw(paged_decode(), p).tensors, {});
  save_tensors(folder, in);
  const Inputs loaded = load_inputs(folder, p, paged_decode());
  CHECK(loaded.tensors.at("page_table").numbers == table.numbers);
  CHECK(paged_decode().reference(p, loaded.tensors, {})[0].reference == expected[0].reference);
  table.numbers[1] = num_pages(p);
  save_tensors(folder, {{"page_table", table}});
  std::string why;
  try {
    load_inputs(folder, p, paged_decode());
  } catch (const InputError& e) {
    why = e.what();
  }
  CHECK(why == "page_table: entry [0, 1] is page 15, must be from 0 to 14");
  std::filesystem::remove_all(folder);
}
