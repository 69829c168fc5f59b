// Operations that write pages: appending tokens, copying pages.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <random>

#include "attn/error.h"
#include "attn/rotary.h"
#include "host/paged.h"
#include "kernels/splits.h"

namespace attn {
namespace {

using namespace splits;

std::vector<TensorSpec> no_tensors(const Problem&) { return {}; }
double no_flop(const Problem&) { return 0; }
double bytes_of_rows(const Problem& p, double rows) {
  return rows * static_cast<double>(p.kv_heads * bytes_of(p.dtype, p.head_dim));
}

// ---- append ------------------------------------------------------------------------------------

// Position of new token i of sequence b; negative: padding, because the sequence is shorter.
int64_t position(const Problem& p, int64_t b, int64_t i) {
  return p.sequence(b).seqlen_k - p.seqlen_q + i;
}
double new_tokens(const Problem& p) {
  double tokens = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    tokens += static_cast<double>(std::min(p.seqlen_q, p.sequence(b).seqlen_k));
  return tokens;
}

TensorSpec fresh(const Problem& p, const char* name) {
  const std::vector<int64_t> each(static_cast<std::size_t>(p.batch), p.seqlen_q);
  return {name,    {1, p.batch * p.seqlen_q, p.kv_heads, p.head_dim},
          p.dtype, Layout::packed(cumulative(each), p.kv_heads),
          nullptr, false,
          3};
}

std::vector<TensorSpec> append_inputs(const Problem& p) {
  const HostTensor table = drawn_table(p);
  std::vector<TensorSpec> specs{
      in_pages(p, "k", table), in_pages(p, "v", table), table.spec,
      seqused_of(p),           fresh(p, "k_new"),       fresh(p, "v_new")};
  if (has_rotary(p)) specs.push_back(rotary_table(p));
  return specs;
}

std::vector<int64_t> appended_rows(const Problem& p, const HostTensors& in, const std::string& k) {
  std::vector<int64_t> rows;
  const TensorSpec spec = in_pages(p, k, in.at("page_table"));
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < p.seqlen_q; ++i)
      for (int64_t h = 0; h < p.kv_heads && position(p, b, i) >= 0; ++h)
        rows.push_back(spec.row(b, h, position(p, b, i)));
  std::ranges::sort(rows);
  return rows;
}

// Two tokens for the same slot have no defined order: one would be lost.
void place_to_append(const Problem& p, HostTensors& in) {
  place_pages(p, in);
  const HostTensor& table = in.at("page_table");
  std::map<int64_t, int64_t> writers;  // slot -> sequence
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      const int64_t at = position(p, b, i), size = page_size_of(p);
      if (at < 0) continue;
      const int64_t page = table.numbers[static_cast<std::size_t>(b * max_pages_of(p) + at / size)];
      const auto [first, fresh] = writers.try_emplace(page * size + at % size, b);
      if (!fresh)
        throw InputError(fmt::format(
            "page_table: sequences {} and {} both append to token {} of page {}: a page that "
            "grows must belong to one sequence",
            first->second, b, at % size, page));
    }
}

std::vector<Expected> append_reference(const Problem& p, const HostTensors& in, Selection) {
  std::vector<Expected> all;
  const auto d = static_cast<std::size_t>(p.head_dim);
  for (const char* name : {"k", "v"}) {
    const HostTensor& given = in.at(name == std::string("k") ? "k_new" : "v_new");
    const bool turned = has_rotary(p) && name == std::string("k");
    Expected e = expected_rows(
        in.at(name).spec,
        static_cast<std::size_t>(new_tokens(p)) * static_cast<std::size_t>(p.kv_heads),
        turned ? 2e-3 : 0, false);
    std::size_t at = 0;
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t i = 0; i < p.seqlen_q; ++i)
        for (int64_t h = 0; h < p.kv_heads && position(p, b, i) >= 0; ++h, ++at) {
          std::vector<double> x(given.row(b, h, i), given.row(b, h, i) + d);
          if (turned) turn<double>(x, in.at("cos_sin").row(0, 0, position(p, b, i)));
          e.rows[at] = {b, h, position(p, b, i)};
          double norm2 = 0;
          for (std::size_t c = 0; c < d; ++c) {
            const double value = x[c];
            norm2 += value * value;
            e.reference[at * d + c] = value;
            e.low[at * d + c] = round_to(p.dtype, static_cast<float>(value));
          }
          e.scale[at] = std::sqrt(norm2);
        }
    all.push_back(std::move(e));
  }
  return all;
}

// ---- copies ------------------------------------------------------------------------------------

TensorSpec whole_pool(const Problem& p, const char* name) {
  const bool loaded = p.inputs == InputKind::files;
  const int64_t pages =
      std::max(p.own.contains("num_pages") ? num_pages_of(p) : 0, loaded ? 0 : 2 * p.batch + 1);
  TensorSpec spec{name, {pages, page_size_of(p), p.kv_heads, p.head_dim}, p.dtype};
  spec.file = std::string(name) + "_pages";
  return spec;
}
// Copies from one half of the pages to the other, in random order: whole pages, and every third one
// in part.
void draw_copies(const Problem& p, HostTensor& t) {
  std::vector<int64_t> pages(static_cast<std::size_t>(whole_pool(p, "k").shape[0]));
  std::iota(pages.rbegin(), pages.rend(), 0);
  std::mt19937_64 random(p.seed);
  for (std::size_t n = 1; n < pages.size(); ++n)
    std::swap(pages[n], pages[n + random() % (pages.size() - n)]);
  for (int64_t n = 0; n < p.batch; ++n) {
    const int64_t size = page_size_of(p);
    const auto part = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(size));
    const auto row = t.numbers.begin() + 3 * n;
    row[0] = pages[static_cast<std::size_t>(2 * n + 1)];
    row[1] = pages[static_cast<std::size_t>(2 * n)];
    row[2] = n % 3 == 2 ? part : size;
  }
}
TensorSpec copies_of(const Problem& p) {
  return {"page_copies", {1, 1, p.batch, 3}, DType::int32, {}, draw_copies, false, 2};
}
// calls body(page, token, head) for each row that is written, and gives its source
template <class Body>
void for_each_copied(const Problem& p, const HostTensors& in, Body body) {
  const std::vector<int64_t>& copies = in.at("page_copies").numbers;
  for (auto at = copies.begin(); at != copies.end(); at += 3)
    for (int64_t i = 0; i < at[2]; ++i)
      for (int64_t h = 0; h < p.kv_heads; ++h) body(at[0], at[1], i, h);
}
// Copies have no defined order: a page is either read or written, and written only once.
void check_copies(const Problem& p, HostTensors& in) {
  const std::vector<int64_t>& copies = in.at("page_copies").numbers;
  const int64_t pages = in.at("k").spec.shape[0];
  std::map<int64_t, std::size_t> writers, readers;  // page -> copy
  for (std::size_t n = 0; n < copies.size() / 3; ++n) {
    const int64_t from = copies[3 * n], to = copies[3 * n + 1], tokens = copies[3 * n + 2];
    for (const int64_t page : {from, to})
      if (page < 0 || page >= pages)
        throw InputError(fmt::format("page_copies: entry [{}] names page {}, must be from 0 to {}",
                                     n, page, pages - 1));
    if (tokens < 0 || tokens > page_size_of(p))
      throw InputError(fmt::format("page_copies: entry [{}] copies {} tokens, must be from 0 to {}",
                                   n, tokens, page_size_of(p)));
    readers.try_emplace(from, n);
    if (!writers.try_emplace(to, n).second)
      throw InputError(fmt::format("page_copies: entries [{}] and [{}] both write page {}",
                                   writers.at(to), n, to));
  }
  for (const auto& [page, n] : writers)
    if (readers.contains(page))
      throw InputError(fmt::format("page_copies: entry [{}] writes page {}, which entry [{}] reads",
                                   n, page, readers.at(page)));
}
std::vector<int64_t> copied_rows(const Problem& p, const HostTensors& in, const std::string& k) {
  std::vector<int64_t> rows;
  for_each_copied(p, in, [&](int64_t, int64_t to, int64_t i, int64_t h) {
    rows.push_back(in.at(k).spec.row(to, i, h));
  });
  std::ranges::sort(rows);
  return rows;
}
std::vector<Expected> copy_reference(const Problem& p, const HostTensors& in, Selection) {
  std::vector<Expected> all;
  for (const char* name : {"k", "v"}) {
    const HostTensor& t = in.at(name);
    std::size_t rows = 0, at = 0;
    for_each_copied(p, in, [&](int64_t, int64_t, int64_t, int64_t) { ++rows; });
    Expected e = expected_rows(t.spec, rows, 0, false);
    for_each_copied(p, in, [&](int64_t from, int64_t to, int64_t i, int64_t h) {
      e.rows[at] = {to, i, h};
      const auto first = static_cast<std::ptrdiff_t>(at) * p.head_dim;
      std::copy_n(t.row(from, i, h), p.head_dim, e.reference.begin() + first);
      std::copy_n(t.row(from, i, h), p.head_dim, e.low.begin() + first);
      ++at;
    });
    all.push_back(std::move(e));
  }
  return all;
}

}  // namespace

const Operation& paged_append() {
  static const Operation operation = [] {
    Operation op;
    op.name = "paged_append";
    op.inputs = append_inputs;
    op.saved = no_tensors;
    op.outputs = [](const Problem& p) {
      const HostTensor table = drawn_table(p);
      return std::vector{in_pages(p, "k", table), in_pages(p, "v", table)};
    };
    op.flop = no_flop;
    op.reference = append_reference;
    op.few_queries = 1;
    op.own = page_options();
    op.own.push_back({.name = "rotary",
                      .lacking = "rotary embedding",
                      .help = "RoPE: rotate keys by their positions as they are appended",
                      .everywhere = true});
    op.changes = appended_rows;
    op.useful_bytes = [](const Problem& p) { return 4 * bytes_of_rows(p, new_tokens(p)); };
    op.place = place_to_append;
    op.complete = [](Problem& p, const std::set<std::string>& given) {
      complete_lengths(p, given);
      if (p.seqlen_q > p.seqlen_k)
        throw InputError(
            fmt::format("--seqlen-q {}: more new tokens than the {} that a sequence has room for",
                        p.seqlen_q, p.seqlen_k));
    };
    op.sizes_of_files = [](const std::string& folder, Problem& p) {
      const auto k = shape_of_file(folder, "k_new.npy", 3, "batch * seqlen_q, kv_heads, head_dim");
      sizes_of_pages(folder, p);
      if (k[0] < 1 || k[0] % p.batch != 0)
        throw InputError(fmt::format(
            "{}/k_new.npy: has {} tokens, must be a multiple of the {} sequences of page_table.npy",
            folder, k[0], p.batch));
      p.seqlen_q = k[0] / p.batch, p.heads = p.kv_heads;
    };
    return op;
  }();
  return operation;
}

const Operation& page_copy() {
  static const Operation operation = [] {
    Operation op;
    op.name = "page_copy";
    op.inputs = [](const Problem& p) {
      return std::vector{whole_pool(p, "k"), whole_pool(p, "v"), copies_of(p)};
    };
    op.saved = no_tensors;
    op.outputs = [](const Problem& p) {
      return std::vector{whole_pool(p, "k"), whole_pool(p, "v")};
    };
    op.flop = no_flop;
    op.reference = copy_reference;
    op.few_queries = 1;
    op.own = {page_options()[0], page_options()[1]};
    op.complete = [](Problem& p, const std::set<std::string>&) {
      if (p.inputs != InputKind::files && p.own.contains("num_pages") &&
          num_pages_of(p) < 2 * p.batch + 1)
        throw InputError(fmt::format("--num-pages {}: {} copies need {}", num_pages_of(p), p.batch,
                                     2 * p.batch + 1));
      if (!p.seqused_k.empty()) throw InputError("--seqused: page_copy has pages, no sequences");
    };
    op.changes = copied_rows;
    op.place = check_copies;
    // Loaded copies count as whole pages: their numbers of tokens are only in the file.
    op.useful_bytes = [](const Problem& p) {
      if (p.inputs == InputKind::files)
        return 4 * bytes_of_rows(p, static_cast<double>(p.batch * page_size_of(p)));
      HostTensor copies = zeros(copies_of(p));
      draw_copies(p, copies);
      double rows = 0;
      for (std::size_t n = 2; n < copies.numbers.size(); n += 3)
        rows += static_cast<double>(copies.numbers[n]);
      return 4 * bytes_of_rows(p, rows);
    };
    op.sizes_of_files = [](const std::string& folder, Problem& p) {
      const auto k =
          shape_of_file(folder, "k_pages.npy", 4, "num_pages, page_size, kv_heads, head_dim");
      const auto copies = shape_of_file(folder, "page_copies.npy", 2, "copies, 3");
      if (std::ranges::min(k) < 1 || copies[1] != 3)
        throw InputError(
            fmt::format("{}: k_pages.npy [{}] needs sides of at least 1, and "
                        "page_copies.npy [{}] rows of (from, to, tokens)",
                        folder, fmt::join(k, ", "), fmt::join(copies, ", ")));
      p.batch = copies[0], p.kv_heads = p.heads = k[2], p.head_dim = k[3];
      p.own["num_pages"] = {static_cast<double>(k[0])};
      p.own["page_size"] = {static_cast<double>(k[1])};
    };
    return op;
  }();
  return operation;
}

}  // namespace attn
