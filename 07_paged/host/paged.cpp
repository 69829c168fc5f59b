#include "host/paged.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>

#include "attn/error.h"
#include "attn/rotary.h"
#include "check/inputs.h"
#include "files/npy.h"
#include "files/tensor_files.h"
#include "kernels/splits.h"

namespace attn {
namespace {

using namespace splits;

constexpr int64_t kLargestPage = 4096;               // tokens
constexpr int64_t kNoPage = (int64_t{1} << 31) - 1;  // unused entry of the page table
constexpr int64_t kSparePages = 3;                   // unallocated pages, at least
constexpr int64_t kLongest = 1 << 30;

int64_t own(const Problem& p, const char* name, int64_t otherwise) {
  const auto found = p.own.find(name);
  return found == p.own.end() ? otherwise : static_cast<int64_t>(found->second.at(0));
}
std::vector<int64_t> lengths_of(const Problem& p) {
  if (p.varlen()) return p.varlen_k;
  return p.seqused_k.empty() ? std::vector(static_cast<std::size_t>(p.batch), p.seqlen_k)
                             : p.seqused_k;
}
// --shared-prefix: the first sequence of b's group, and the number of pages they share, full pages
// only.
int64_t leader_of(const Problem& p, int64_t b) {
  const auto shared = p.own.find("shared_prefix");
  if (shared == p.own.end()) return b;
  return b - b % static_cast<int64_t>(shared->second.at(1));
}
int64_t shared_pages(const Problem& p, int64_t length) {
  return std::min(own(p, "shared_prefix", 0), length) / page_size_of(p);
}
int64_t saved_pages(const Problem& p) {
  const std::vector<int64_t> lengths = lengths_of(p);
  std::vector<int64_t> of_group(lengths.size());
  int64_t saved = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t pages = shared_pages(p, lengths[static_cast<std::size_t>(b)]);
    int64_t& most = of_group[static_cast<std::size_t>(leader_of(p, b))];
    saved += std::min(pages, most), most = std::max(pages, most);
  }
  return saved;
}
int64_t pages_in_use(const Problem& p) {
  int64_t pages = -saved_pages(p);
  for (const int64_t n : lengths_of(p)) pages += (n + page_size_of(p) - 1) / page_size_of(p);
  return pages;
}

// ---- the tensors -------------------------------------------------------------------------------

// Sequences take pages from a shuffled pool. The pool's last page is always among them, so that a
// pool past 2^32 elements has valid tokens at its end.
void shuffled(const Problem& p, HostTensor& table) {
  if (p.inputs == InputKind::files) return;  // loaded page table
  const int64_t in_use = pages_in_use(p), all = num_pages_of(p);
  if (in_use > all)
    throw InputError(fmt::format("--num-pages {}: the sequences need {}", all, in_use));
  std::vector<int64_t> pages(static_cast<std::size_t>(all));
  std::iota(pages.rbegin(), pages.rend(), 0);
  if (own(p, "identity_table", 0) > 0) std::ranges::sort(pages);
  std::mt19937_64 random(p.seed);
  const bool moved = own(p, "identity_table", 0) == 0;
  for (std::size_t n = 1; moved && n < static_cast<std::size_t>(in_use); ++n)
    std::swap(pages[n], pages[n + random() % (pages.size() - n)]);
  if (moved && in_use > 1) std::swap(pages[0], pages[random() % static_cast<uint64_t>(in_use)]);
  auto next = pages.begin();
  const std::vector<int64_t> lengths = lengths_of(p);
  const int64_t room = max_pages_of(p);
  // of each group, by its first sequence
  std::vector<std::vector<int64_t>> prefixes(lengths.size());
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = lengths[static_cast<std::size_t>(b)];
    std::vector<int64_t>& prefix = prefixes[static_cast<std::size_t>(leader_of(p, b))];
    for (int64_t n = 0; n < room; ++n) {
      int64_t& entry = table.numbers[static_cast<std::size_t>(b * room + n)];
      const bool shared = n < shared_pages(p, length);
      if (shared && n < static_cast<int64_t>(prefix.size())) {
        entry = prefix[static_cast<std::size_t>(n)];
        continue;
      }
      entry = n * page_size_of(p) < length ? *next++ : kNoPage;
      if (shared) prefix.push_back(entry);
    }
  }
}

}  // namespace

TensorSpec table_of(const Problem& p) {
  return {"page_table", {1, 1, p.batch, max_pages_of(p)}, DType::int32, {}, shuffled, false, 2};
}
TensorSpec in_pages(const Problem& p, const std::string& name, const HostTensor& table) {
  TensorSpec spec{
      name,
      {num_pages_of(p), page_size_of(p), p.kv_heads, p.head_dim},
      p.dtype,
      Layout::paged(table, lengths_of(p), num_pages_of(p), page_size_of(p), p.kv_heads)};
  spec.file = name + "_pages";
  return spec;
}

HostTensor drawn_table(const Problem& p) {
  HostTensor table = zeros(table_of(p));
  shuffled(p, table);
  return table;
}

namespace {
// ---- sinks -------------------------------------------------------------------------------------

// One logit per query head, large enough to matter compared with thousands of keys.
void draw_sinks(const Problem& p, HostTensor& t) {
  for (int64_t h = 0; h < p.heads; ++h)
    t.data[static_cast<std::size_t>(h)] = 4 + 2 * normal(p.seed, 81, static_cast<uint64_t>(h));
}
TensorSpec sinks_of(const Problem& p) {
  return {"sinks", {1, 1, 1, p.heads}, DType::fp32, {}, draw_sinks, false, 1};
}

// A sink only adds e^sink to the denominator: O shrinks to the keys' share of it. Errors of scores
// affect both terms.
std::vector<Expected> with_sinks(std::vector<Expected> expected, const HostTensors& in) {
  Expected &o = expected.at(0), &lse = expected.at(1);
  const auto columns = static_cast<std::size_t>(o.spec.columns());
  for (std::size_t r = 0; r < o.rows.size(); ++r) {
    const double sink = double{in.at("sinks").data[static_cast<std::size_t>(o.rows[r].h)]};
    const auto joined = [&](double x) {  // (-inf) - (-inf) is NaN
      return x == sink ? x + std::log(2)
                       : std::max(x, sink) + std::log1p(std::exp(-std::abs(x - sink)));
    };
    const double all = joined(lse.reference[r]);
    const double share = std::isfinite(lse.reference[r]) ? std::exp(lse.reference[r] - all) : 0;
    for (std::size_t c = r * columns; c < (r + 1) * columns; ++c)
      o.reference[c] *= share,
          o.low[c] = round_to(o.spec.dtype, static_cast<float>(o.low[c] * share));
    // A small share makes O subnormal in fp16, where the spacing of values does not shrink further.
    const double spacing = subnormal_slack(o.spec);
    o.scale[r] *= share, o.slack[r] = 2 * share * (o.slack[r] - spacing) + spacing;
    lse.reference[r] = all;
    lse.low[r] = static_cast<float>(joined(double{lse.low[r]}));
    lse.scale[r] = std::max(1.0, std::isfinite(all) ? std::abs(all) : 0.0);
  }
  return expected;
}

// ---- rotary embedding --------------------------------------------------------------------------

// The keys in the pages are already rotated, so only queries are rotated here. Queries before the
// first key stay unchanged.
template <class Scalar>
void turn_query(const InputRow<Scalar>& row) {
  if (!row.of_q) return;
  const int64_t position = row.problem.seqlen_k - row.problem.seqlen_q + row.i;
  turn(row.x, row.inputs.at("cos_sin").row(0, 0, std::max<int64_t>(0, position)));
}
// Rotated queries are rounded to 16 bits, so a product with a key is off by at most the unit
// roundoff of |q| |k|. The errors of the columns are independent: over many columns the standard
// deviation of their sum is smaller by sqrt(d). Four standard deviations are tolerated.
double turned_error(const Problem& p, const HostTensors&, int64_t, double largest) {
  const double unit = p.dtype == DType::fp16 ? 0x1p-12 : p.dtype == DType::bf16 ? 0x1p-9 : 0x1p-25;
  return unit * largest * std::min(1.0, 4 / std::sqrt(static_cast<double>(p.head_dim)));
}

}  // namespace

std::vector<TensorSpec> paged_inputs(const Problem& p) {
  const HostTensor table = drawn_table(p);
  std::vector<TensorSpec> specs = attention_inputs(p);
  for (TensorSpec& spec : specs)
    if (spec.name == "k" || spec.name == "v") spec = in_pages(p, spec.name, table);
  std::erase_if(specs, [](const TensorSpec& spec) { return spec.name == "cu_seqlens_k"; });
  specs.push_back(table.spec);
  specs.push_back(seqused_of(p));
  if (p.own.contains("sinks")) specs.push_back(sinks_of(p));
  if (has_rotary(p)) specs.push_back(rotary_table(p));
  return specs;
}

// A sink times log2(e) must be finite in float32.
constexpr float kLargestSink = 1e30f;

// With a loaded page table, tokens are moved accordingly; its unused entries are set to 2^31 - 1.
void place_pages(const Problem& p, HostTensors& in) {
  if (in.contains("sinks"))
    for (const float x : in.at("sinks").data)
      if (!(x <= kLargestSink))
        throw InputError(
            fmt::format("sinks: {}; must be -inf (no sink) or at most {}", x, kLargestSink));
  HostTensor& table = in.at("page_table");
  for (const char* name : {"k", "v"})
    if (in.contains(name)) in.at(name).spec.layout = in_pages(p, name, table).layout;
  const std::vector<int64_t> lengths = lengths_of(p);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t n = 0; n < max_pages_of(p); ++n)
      if (n * page_size_of(p) >= lengths[static_cast<std::size_t>(b)])
        table.numbers[static_cast<std::size_t>(b * max_pages_of(p) + n)] = kNoPage;
}

std::vector<int64_t> shape_of_file(const std::string& folder, const char* file, std::size_t rank,
                                   const char* sides) {
  const std::filesystem::path path = std::filesystem::path(folder) / file;
  const bool is_table = std::string_view(file).starts_with("page_");  // page_table, page_copies
  const std::vector<int64_t> shape =
      is_table ? read_npy_shape(path, {"<i4", "<i8"}) : read_npy_shape(path, {"<f4", "<f2"});
  if (shape.size() != rank)
    throw InputError(fmt::format("{}: has shape [{}], must be [{}]", path.string(),
                                 fmt::join(shape, ", "), sides));
  return shape;
}

void sizes_of_pages(const std::string& folder, Problem& p, const char* file) {
  const auto k = shape_of_file(folder, file, 4, "num_pages, page_size, kv_heads, head_dim");
  const auto table = shape_of_file(folder, "page_table.npy", 2, "batch, max_pages");
  for (const auto& [name, shape] : {std::pair{file, k}, std::pair{"page_table.npy", table}})
    if (std::ranges::min(shape) < 1)
      throw InputError(fmt::format("{}/{}: has shape [{}], every side must be at least 1", folder,
                                   name, fmt::join(shape, ", ")));
  if (k[1] > kLargestPage)
    throw InputError(fmt::format("{}/{}: has pages of {} tokens, must be at most {}", folder, file,
                                 k[1], kLargestPage));
  if (p.own.contains("shared_prefix"))
    throw InputError(
        "--shared-prefix: not together with --load, whose page_table.npy says what is shared");
  p.batch = table[0], p.head_dim = k[3], p.kv_heads = k[2];
  p.own["num_pages"] = {static_cast<double>(k[0])};
  p.own["page_size"] = {static_cast<double>(k[1])};
  p.seqlen_k = table[1] * k[1];
  const std::filesystem::path used = std::filesystem::path(folder) / "seqused_k.npy";
  if (!std::filesystem::exists(used)) return;
  if (!p.seqused_k.empty() || p.own.contains("lengths"))
    throw InputError(fmt::format("--seqused, --lengths: not together with {}", used.string()));
  p.seqused_k = load_lengths(used, p.batch, p.seqlen_k);
}

namespace {

void sizes_of_files(const std::string& folder, Problem& p) {
  auto q = shape_of_file(
      folder, "q.npy", 4,
      p.files_bnhd ? "batch, seqlen_q, heads, head_dim" : "batch, heads, seqlen_q, head_dim");
  if (p.files_bnhd) std::swap(q[1], q[2]);
  sizes_of_pages(folder, p);
  if (q[0] != p.batch || q[3] != p.head_dim)
    throw InputError(fmt::format(
        "{}: q.npy [{}], k_pages.npy and page_table.npy must agree in batch ({}) and head_dim ({})",
        folder, fmt::join(q, ", "), p.batch, p.head_dim));
  if (q[1] < 1 || q[1] % p.kv_heads != 0)
    throw InputError(fmt::format(
        "{}/q.npy: {} heads and k_pages.npy {}: the query heads must be a multiple of the "
        "key/value "
        "heads{}",
        folder, q[1], p.kv_heads,
        p.files_bnhd ? "" : "; of [batch, seqlen_q, heads, head_dim] say --layout bnhd"));
  p.heads = q[1], p.seqlen_q = q[2];
}

// ---- options of its own ------------------------------------------------------------------------

// Parses "uniform:16,512": the distribution and its parameters.
std::vector<double> read_lengths(const std::string& text) {
  const std::size_t colon = std::min(text.find(':'), text.size());
  std::vector<double> values;
  const char *at = text.data() + colon, *const end = text.data() + text.size();
  while (at < end) {
    int64_t n = -1;
    const auto [stop, error] = std::from_chars(at + 1, end, n);
    if (error != std::errc() || n < 0 || n > kLongest || (stop != end && *stop != ',')) break;
    values.push_back(static_cast<double>(n)), at = stop;
  }
  const std::string kind = text.substr(0, colon);
  const bool whole = at == end;
  if (whole && kind == "uniform" && values.size() == 2 && values[0] <= values[1])
    return {0, values[0], values[1]};
  if (whole && kind == "zipf" && values.size() == 1 && values[0] >= 1) return {1, values[0]};
  if (whole && kind == "const" && values.size() == 1) return {2, values[0]};
  throw InputError(fmt::format(
      "--lengths {}: must be uniform:A,B, zipf:MEAN or const:N, as uniform:16,512", text));
}

// Parses "32768,8": tokens, and sequences that share them; all sequences by default.
std::vector<double> read_shared(const std::string& text) {
  std::vector<double> values;
  const char *at = text.data(), *const end = text.data() + text.size();
  while (at <= end) {
    int64_t n = -1;
    const auto [stop, error] = std::from_chars(at, end, n);
    if (error != std::errc() || n < 1 || n > kLongest || (stop != end && *stop != ',')) break;
    values.push_back(static_cast<double>(n)), at = stop + 1;
  }
  if (at != end + 1 || values.empty() || values.size() > 2)
    throw InputError(
        fmt::format("--shared-prefix {}: must be TOKENS or TOKENS,SEQUENCES, as 1024,8", text));
  if (values.size() == 1) values.push_back(static_cast<double>(kLongest));
  return values;
}

// A 32-bit generator with the same stream on every platform, taken modulo: PyTorch's randint draws
// the same values from the same seed.
std::vector<int64_t> draw_lengths(const std::vector<double>& how, int64_t batch, uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int64_t> lengths(static_cast<std::size_t>(batch));
  for (int64_t& n : lengths) {
    const auto a = static_cast<int64_t>(how[1]);
    if (how[0] == 0) n = a + random() % (static_cast<int64_t>(how[2]) - a + 1);
    if (how[0] == 2) n = a;
  }
  if (how[0] != 1) return lengths;
  // Zipf: the n-th longest sequence has 1/n of the longest length, in random order. The mean is
  // exact up to rounding.
  double sum = 0;
  for (int64_t n = 1; n <= batch; ++n) sum += 1 / static_cast<double>(n);
  for (int64_t n = 1; n <= batch; ++n)
    lengths[static_cast<std::size_t>(n - 1)] = std::max<int64_t>(
        1, std::llround(how[1] * static_cast<double>(batch) / sum / static_cast<double>(n)));
  for (std::size_t n = lengths.size(); n > 1; --n) std::swap(lengths[n - 1], lengths[random() % n]);
  return lengths;
}

void take_lengths(Problem& p, const std::set<std::string>& given) {
  const auto how = p.own.find("lengths");
  if (how == p.own.end()) return;
  for (const char* other : {"--seqused", "--seqlen-k", "--seqlen"})
    if (given.contains(other))
      throw InputError(fmt::format("{}: not together with --lengths", other));
  p.seqused_k = draw_lengths(how->second, p.batch, p.seed);
  p.seqlen_k = 1;
  for (const int64_t n : p.seqused_k) p.seqlen_k = std::max(p.seqlen_k, n);
}

}  // namespace

// Draws the lengths of --lengths; the capacity is the longest of them, and no prefix is longer.
void complete_lengths(Problem& p, const std::set<std::string>& given) {
  take_lengths(p, given);
  if (!p.own.contains("shared_prefix") || p.inputs == InputKind::files) return;
  const int64_t shared = own(p, "shared_prefix", 0);
  const std::vector<int64_t> lengths =
      p.varlen() && p.varlen_k.empty() ? p.varlen_q : lengths_of(p);
  const int64_t longest = lengths.empty() ? 0 : *std::ranges::max_element(lengths);
  if (shared > longest)
    throw InputError(
        fmt::format("--shared-prefix {}: the longest sequence has {} tokens", shared, longest));
}

int64_t num_pages_of(const Problem& p) {
  const int64_t given = own(p, "num_pages", 0), in_use = given > 0 ? 0 : pages_in_use(p);
  return given > 0 ? given : in_use + std::max(kSparePages, in_use / 8);
}

int64_t saved_tokens(const Problem& p) {
  return p.inputs == InputKind::files ? 0 : saved_pages(p) * page_size_of(p);
}

std::vector<int64_t> drawn_lengths(const std::string& text, int64_t batch, uint64_t seed) {
  return draw_lengths(read_lengths(text), batch, seed);
}

// Reducing a failure: it may need more than one token per page, or more than one page per sequence.
std::vector<std::pair<std::string, Problem>> other_page_sizes(const Problem& p) {
  const std::vector<int64_t> lengths = lengths_of(p);
  const int64_t longest = lengths.empty() ? 0 : *std::ranges::max_element(lengths);
  std::vector<std::pair<std::string, Problem>> all;
  const auto add = [&](std::string change, int64_t size) {
    Problem varied = p;
    varied.own["page_size"] = {static_cast<double>(size)};
    varied.own.erase("num_pages");
    all.emplace_back(std::move(change), std::move(varied));
  };
  if (page_size_of(p) > 1) add("with pages of 1 token", 1);
  if (page_size_of(p) < longest && longest <= kLargestPage)
    add(fmt::format("with one page a sequence ({})", longest), longest);
  return all;
}
std::vector<std::pair<std::string, Problem>> pages_in_order(const Problem& p) {
  if (own(p, "identity_table", 0) > 0) return {};
  Problem varied = p;
  varied.own["identity_table"] = {1};
  return {{"with pages in order", std::move(varied)}};
}

std::vector<Feature> page_options() {
  return {{.name = "page_size",
           .lacking = "pages",
           .help = "tokens per page (16)",
           .kind = Feature::Kind::number,
           .least = 1,
           .most = kLargestPage,
           .whole = true,
           .otherwise = 16,
           .vary = other_page_sizes,
           .everywhere = true},
          {.name = "identity_table",
           .lacking = "table in order",
           .help = "pages of the pool in order: a page table of 0, 1, 2, ...",
           .vary = pages_in_order,
           .everywhere = true},
          {.name = "num_pages",
           .lacking = "pool",
           .help = "pages in the pool (default: an eighth more than the sequences need)",
           .kind = Feature::Kind::number,
           .least = 1,
           .most = 0x1p31 - 2,
           .whole = true,
           .everywhere = true},
          {.name = "blocks",
           .lacking = "plan",
           .help = "thread blocks of the plan (default: one per SM; 132 without a GPU)",
           .kind = Feature::Kind::number,
           .least = 1,
           .most = 1024,
           .whole = true,
           .everywhere = true},
          {.name = "lengths",
           .lacking = "lengths",
           .help = "random lengths of the sequences: uniform:A,B, zipf:MEAN or const:N",
           .kind = Feature::Kind::list,
           .read = read_lengths,
           .everywhere = true}};
}

const Operation& paged_decode() {
  static const Operation operation = [] {
    Operation op = decode();
    op.name = "paged_decode";
    op.inputs = paged_inputs;
    op.place = place_pages;
    op.sizes_of_files = sizes_of_files;
    op.complete = complete_lengths;
    op.own = page_options();
    op.own.push_back(
        {.name = "shared_prefix",
         .lacking = "shared prefix",
         .help = "N or N,G: the first N tokens of each G sequences (all) are equal; v8 and v17 "
                 "read them once if they are 128 or more",
         .kind = Feature::Kind::list,
         .read = read_shared,
         .everywhere = true});
    op.own.push_back({.name = "sinks",
                      .lacking = "attention sinks",
                      .help = "attention sinks: one logit per query head in the denominator of "
                              "softmax"});
    op.own.push_back(
        {.name = "rotary",
         .lacking = "rotary embedding",
         .help = "RoPE: paged_decode rotates the queries, keys in pages are rotated already; "
                 "paged_append rotates the new keys",
         .rows = turn_query<double>,
         .rows_low = turn_query<float>,
         .error = turned_error});
    op.reference = [own = op.own](const Problem& p, const HostTensors& in, Selection selection) {
      std::vector<Expected> expected = attention_reference(p, in, selection, own);
      return p.own.contains("sinks") ? with_sinks(std::move(expected), in) : expected;
    };
    op.useful_bytes = [](const Problem& p) {  // shared tokens count once
      if (p.window_left >= 0) return decode().useful_bytes(p);
      return decode().useful_bytes(p) -
             2 * static_cast<double>(saved_tokens(p)) *
                 static_cast<double>(bytes_of(p.dtype, p.kv_heads * p.head_dim));
    };
    return op;
  }();
  return operation;
}

}  // namespace attn
