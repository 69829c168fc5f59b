// Cache files that --load accepts, and those that it refuses by name.
#include <array>
#include <filesystem>

#include "07_paged/host/paged.h"
#include "07_paged/kernels/splits.h"
#include "attn/error.h"
#include "files/npy.h"
#include "files/tensor_files.h"
#include "run/options.h"
#include "run/runner.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

namespace {
// Pages of 5 tokens, four per row of the page table.
Problem two_sequences() {
  Problem p = paged(1, 20, 64, 5, DType::bf16);
  p.batch = 2, p.seqused_k = {17, 7};
  p.finish();
  return p;
}
}  // namespace

TEST_CASE("a page outside the pool is refused with its entry", "[emulated]") {
  const std::string folder = "paged_files";
  std::filesystem::remove_all(folder);
  const Problem p = two_sequences();
  HostTensors in = draw(paged_decode(), p).tensors;
  save_tensors(folder, in);
  Problem loaded;
  paged_decode().sizes_of_files(folder, loaded);
  loaded.inputs = InputKind::files;
  loaded.finish();
  CHECK((loaded.batch == 2 && loaded.seqlen_k == 20 && loaded.head_dim == 64));
  CHECK(loaded.own ==
        std::map<std::string, std::vector<double>>{{"num_pages", {9}}, {"page_size", {5}}});
  CHECK(load_inputs(folder, loaded, paged_decode()).tensors.at("page_table").numbers ==
        in.at("page_table").numbers);
  // Two sequences may share a page; a page outside the pool is an error.
  in.at("page_table").numbers[4] = in.at("page_table").numbers[0];
  save_tensors(folder, in);
  CHECK_NOTHROW(load_inputs(folder, loaded, paged_decode()));
  for (const int64_t wrong : {9, -1}) {
    in.at("page_table").numbers[5] = wrong;
    save_tensors(folder, in);
    CHECK_THROWS_WITH(
        load_inputs(folder, loaded, paged_decode()),
        fmt::format("page_table: entry [1, 1] is page {}, must be from 0 to 8", wrong));
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("invalid cache files are refused by name", "[emulated]") {
  const std::string folder = "no_cache";
  std::filesystem::remove_all(folder);
  const Problem p = two_sequences();
  const HostTensors in = draw(paged_decode(), p).tensors;
  using Shape4 = std::array<int64_t, 4>;
  const auto why = [&](const std::string& name, const Shape4& shape,
                       const char* own = nullptr) -> std::string {
    HostTensors changed = in;
    HostTensor& t = changed.at(name);
    std::ranges::copy(shape, t.spec.shape);
    t.spec.layout = {};
    const auto size = static_cast<std::size_t>(t.spec.elements());
    (is_index(t.spec.dtype) ? t.numbers.resize(size) : t.data.resize(size));
    save_tensors(folder, changed);
    Problem loaded;
    if (own != nullptr) loaded.own[own] = {256};
    try {
      paged_decode().sizes_of_files(folder, loaded);
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  Shape4 pool, table;
  std::ranges::copy(in.at("k").spec.shape, pool.begin());
  std::ranges::copy(in.at("page_table").spec.shape, table.begin());
  CHECK(why("k", pool) == "");
  CHECK(why("k", pool, "shared_prefix").find("--shared-prefix: not together with --load") == 0);
  for (std::size_t side = 0; side < 4; ++side) {
    Shape4 shape = pool;
    shape[side] = 0;
    CHECK(why("k", shape).find("no_cache/k_pages.npy: has shape [") == 0);
  }
  for (std::size_t side = 2; side < 4; ++side) {
    Shape4 shape = table;
    shape[side] = 0;
    CHECK(why("page_table", shape).find("no_cache/page_table.npy: has shape [") == 0);
  }
  CHECK(why("k", {1, 4097, 1, 64}).find("has pages of 4097 tokens, must be at most 4096") !=
        std::string::npos);
  std::filesystem::remove_all(folder);
}

TEST_CASE("two tokens for the same slot are refused", "[emulated]") {
  Problem p = paged(3, 20, 64, 5, DType::bf16);
  p.batch = 2, p.heads = p.kv_heads = 1, p.seqused_k = {17, 7};
  p.finish();
  HostTensors in = draw(paged_append(), p).tensors;
  CHECK_NOTHROW(paged_append().place(p, in));
  // Positions 14 to 16 of one sequence, 4 to 6 of the other: the fourth page and the second.
  std::vector<int64_t>& table = in.at("page_table").numbers;
  table[4 + 1] = table[3];
  CHECK_THROWS_WITH(paged_append().place(p, in),
                    fmt::format("page_table: sequences 0 and 1 both append to token 0 of page {}: "
                                "a page that grows must belong to one sequence",
                                table[3]));
  // a page shared by both, which write to other pages
  table[4 + 0] = table[3], table[4 + 1] = table[2];
  CHECK_NOTHROW(paged_append().place(p, in));
}

TEST_CASE("errors name the file and the entry", "[emulated]") {
  const std::string folder = "paged_files";
  const auto options = [&](std::vector<const char*> more) {
    more.insert(more.begin(), {"07_paged", "--device", "emulated", "--step", "v1_block_table"});
    return more;
  };
  const auto save = [&](const char* lengths) {
    const auto o = options(
        {"--batch", "2", "--seqused", lengths, "--seqlen-k", "48", "--save", folder.c_str()});
    REQUIRE(run_chapter(chapter(), static_cast<int>(o.size()), o.data()) == 0);
  };
  const auto why = [&]() -> std::string {
    const auto load = options({"--load", folder.c_str()});
    try {
      const auto o = parse_options(chapter(), static_cast<int>(load.size()), load.data());
      load_inputs(folder, o->problem, *o->operation);
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  save("48,20");
  CHECK(why() == "");
  const std::string file = folder + "/seqused_k.npy";
  for (const int32_t length : {900, -1}) {
    const int32_t lengths[] = {20, length};
    write_npy_bytes(file, {2}, "<i4", lengths);
    CHECK(why() == file + ": entry 1 is " + std::to_string(length) + ", must be from 0 to 48");
  }
  // Unused entries of the page table, and the tail of a last page.
  for (const auto& [lengths, what] :
       {std::pair("48,20", "page_table: entry [1, 2] is page "), {"48,40", " is nan in bf16; "}}) {
    save(lengths);
    std::filesystem::remove(file);
    INFO(why());
    CHECK(why().find(what) != std::string::npos);
    CHECK(why().ends_with("; no seqused_k.npy: all 48 tokens of each sequence are in use"));
    std::filesystem::remove_all(folder);
  }
}

TEST_CASE("page_copy loads copies and refuses conflicting ones", "[emulated]") {
  const std::string folder = "page_copies";
  std::filesystem::remove_all(folder);
  const auto run = [&](std::vector<const char*> more) {
    more.insert(more.begin(), {"07_paged", "--device", "emulated", "--operation", "page_copy"});
    return run_chapter(chapter(), static_cast<int>(more.size()), more.data());
  };
  REQUIRE(run({"--batch", "3", "--kv-heads", "1", "--head-dim", "64", "--page-size", "4", "--save",
               folder.c_str()}) == 0);
  const auto copies = [&](const std::vector<int32_t>& rows) {
    write_npy_bytes(folder + "/page_copies.npy", {std::ssize(rows) / 3, 3}, "<i4", rows.data());
    return run({"--load", folder.c_str()});
  };
  CHECK(copies({0, 5, 4, 0, 6, 2, 1, 2, 0}) == 0);  // one page copied to two; a copy of no token
  CHECK(copies({0, 5, 4, 1, 5, 4}) == 2);           // a page written twice
  CHECK(copies({0, 5, 4, 5, 6, 4}) == 2);           // a page that is also read
  CHECK(copies({0, 7, 4}) == 2);                    // the pool has 7 pages
  CHECK(copies({-1, 5, 4}) == 2);
  CHECK(copies({0, 5, 5}) == 2);  // more tokens than a page has
  std::filesystem::remove_all(folder);
}

TEST_CASE("overwritten slots may hold any value", "[emulated]") {
  const std::string folder = "overwritten";
  std::filesystem::remove_all(folder);
  Problem p = paged(2, 20, 64, 5, DType::bf16);
  p.batch = 2, p.heads = p.kv_heads = 1, p.seqused_k = {17, 7};
  p.finish();
  HostTensors in = draw(paged_append(), p).tensors;
  for (const bool overwritten : {true, false}) {
    HostTensors bad = in;
    HostTensor& k = bad.at("k");
    k.data[static_cast<std::size_t>(k.spec.row(0, 0, overwritten ? 16 : 3) * 64)] = NAN;
    save_tensors(folder, bad);
    Problem loaded = p;
    loaded.inputs = InputKind::files;
    if (overwritten)
      CHECK_NOTHROW(load_inputs(folder, loaded, paged_append()));
    else
      CHECK_THROWS_AS(load_inputs(folder, loaded, paged_append()), InputError);
  }
  std::filesystem::remove_all(folder);
}
