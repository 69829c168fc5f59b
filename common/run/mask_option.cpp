#include "run/mask_option.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <vector>

#include "attn/error.h"
#include "files/npy.h"
#include "attn/sliding_tiles.h"
#include "attn/tensor.h"
#include "run/parse.h"

namespace attn {
namespace {

constexpr const char* kAccepted =
    "must be random:DENSITY or block:FILE, and ,BLOCK_M,BLOCK_N where blocks have not 128 queries "
    "and 128 keys; or flashmask:KIND; or sta:CANVAS,TILE,WINDOW[,WINDOW...]";

struct Parts {
  std::string of;  // DENSITY, or FILE
  int64_t block_m = 128, block_n = 128;
};
Parts parts_of(const std::string& text, const std::string& rest) {
  const std::vector<std::string> parts = split(rest, ',');
  if ((parts.size() != 1 && parts.size() != 3) || parts[0].empty())
    throw InputError(fmt::format("--mask {}: {}", text, kAccepted));
  Parts p{parts[0]};
  if (parts.size() == 3) {
    p.block_m = parse_number<int64_t>("--mask BLOCK_M", parts[1], 1, int64_t{1} << 31);
    p.block_n = parse_number<int64_t>("--mask BLOCK_N", parts[2], 1, int64_t{1} << 31);
  }
  return p;
}
int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

std::shared_ptr<const KeyMask> random_mask(const Parts& parts, const Problem& p) {
  const double density = parse_number<double>("--mask random", parts.of, 0, 1);
  const std::vector<int64_t> shape{p.batch, p.heads, blocks(p.seqlen_q, parts.block_m),
                                   blocks(p.seqlen_k, parts.block_n)};
  constexpr int64_t kMost = int64_t{1} << 31;
  if (shape[0] * shape[1] > kMost / shape[2] / shape[3])
    throw InputError(fmt::format("--mask random: {} x {} blocks of {} heads: at most 2^31 in all",
                                 shape[2], shape[3], shape[0] * shape[1]));
  std::mt19937_64 random(p.seed);
  std::vector<bool> open(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  for (std::size_t n = 0; n < open.size(); ++n)
    open[n] = static_cast<double>(random() >> 11) * 0x1p-53 < density;
  return std::make_shared<BlockMask>(parts.block_m, parts.block_n, shape, std::move(open));
}

std::shared_ptr<const KeyMask> mask_of_file(const Parts& parts, const Problem& p) {
  const NpyBytes file = read_npy_bytes(parts.of, {"|i1", "|u1", "|b1"});
  if (file.shape.size() != 4)
    throw InputError(fmt::format("--mask {}: has {} dimensions, must be [B or 1, Hq or 1, {}, {}]",
                                 parts.of, file.shape.size(), blocks(p.seqlen_q, parts.block_m),
                                 blocks(p.seqlen_k, parts.block_n)));
  std::vector<bool> open;
  open.reserve(file.bytes.size());
  for (std::size_t n = 0; n < file.bytes.size(); ++n) {
    const int value = std::to_integer<int>(file.bytes[n]);
    if (value > 1)
      throw InputError(fmt::format("--mask {}: entry {} is {}, must be 0 or 1", parts.of, n,
                                   file.type == "|i1" && value > 127 ? value - 256 : value));
    open.push_back(value == 1);
  }
  return std::make_shared<BlockMask>(parts.block_m, parts.block_n, file.shape, std::move(open));
}

// ---- column intervals -------------------------------------------------------------------------

// Masked rows of column j: two intervals [begin, end).
struct Hidden {
  int64_t begin[2] = {0, 0}, end[2] = {0, 0};
};
// Ends of `parts` parts of n tokens, of random lengths.
std::vector<int64_t> ends_of_parts(std::mt19937_64& random, int64_t n, int64_t parts) {
  std::vector<int64_t> ends;
  for (int64_t i = 0; i + 1 < parts; ++i)
    ends.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1)));
  ends.push_back(n);
  std::ranges::sort(ends);
  return ends;
}
struct Part {
  int64_t begin, end;
};
Part part_of(const std::vector<int64_t>& ends, int64_t j) {
  const auto end = std::ranges::upper_bound(ends, j);
  return {end == ends.begin() ? 0 : *(end - 1), *end};
}

// The kinds by name: whether the kind is combined with a causal mask, and the rows it masks in
// column j of n, given the ends of parts (documents, blocks, buckets) and a random number per
// column.
struct Kind {
  const char* name;
  bool causal;
  int64_t parts;
  Hidden (*hidden)(int64_t n, int64_t j, const std::vector<int64_t>& ends, uint64_t random);
};
constexpr Kind kKinds[] = {
    {"causal", true, 1, [](int64_t, int64_t, const auto&, uint64_t) { return Hidden{}; }},
    {"sliding_window", true, 1,
     [](int64_t n, int64_t j, const auto&, uint64_t) {
       return Hidden{{j + 1 + n / 8}, {n}};
     }},
    {"causal_document", true, 6,
     [](int64_t n, int64_t j, const auto& ends, uint64_t) {
       return Hidden{{part_of(ends, j).end}, {n}};
     }},
    {"document", false, 6,
     [](int64_t n, int64_t j, const auto& ends, uint64_t) {
       const Part part = part_of(ends, j);
       return Hidden{{0, part.end}, {part.begin, n}};
     }},
    // 6 parts: the first of each three is a question, visible to the next two, its answers.
    {"share_question", true, 6,
     [](int64_t n, int64_t j, const auto& ends, uint64_t) {
       const auto part = std::ranges::upper_bound(ends, j) - ends.begin();
       return Hidden{{part % 3 == 0 ? ends[static_cast<std::size_t>(part + 2)]
                                    : ends[static_cast<std::size_t>(part)]},
                     {n}};
     }},
    // The first tokens attend to all tokens and are visible to all; the others have a two-sided
    // window.
    {"global_sliding_window", false, 1,
     [](int64_t n, int64_t j, const auto&, uint64_t) {
       const int64_t global = n / 16, window = n / 8;
       if (j < global) return Hidden{};
       return Hidden{{global, std::min(n, j + window + 1)}, {std::max(global, j - window), n}};
     }},
    // Examples that are not visible to each other, and a last part that attends to all of them.
    {"causal_blockwise", true, 6,
     [](int64_t, int64_t j, const auto& ends, uint64_t) {
       return Hidden{{part_of(ends, j).end}, {ends[ends.size() - 2]}};
     }},
    {"prefix_lm_causal", false, 1,
     [](int64_t n, int64_t j, const auto&, uint64_t) {
       return j < n / 4 ? Hidden{} : Hidden{{0}, {j}};
     }},
    {"prefix_lm_document", false, 6,
     [](int64_t n, int64_t j, const auto& ends, uint64_t) {
       const Part part = part_of(ends, j);
       const bool prefix = j < part.begin + (part.end - part.begin) / 4;
       return Hidden{{0, part.end}, {prefix ? part.begin : j, n}};
     }},
    // Some rows are fully masked, and some columns are visible to no row.
    {"qk_sparse", true, 1,
     [](int64_t n, int64_t j, const auto&, uint64_t) {
       if (j >= n / 2 && j < n / 2 + n / 8) return Hidden{{0}, {n}};
       return Hidden{{n / 4}, {n / 4 + n / 8}};
     }},
    {"hash_sparse", true, 16,
     [](int64_t n, int64_t j, const auto& ends, uint64_t) {
       return Hidden{{part_of(ends, j).end}, {n}};
     }},
    {"random_eviction", true, 1,
     [](int64_t n, int64_t j, const auto&, uint64_t random) {
       return Hidden{{j + 1 + static_cast<int64_t>(random % static_cast<uint64_t>(n))}, {n}};
     }},
};

// Reads a folder's hidden_begin.npy and hidden_end.npy, as --save writes them.
std::shared_ptr<const KeyMask> intervals_of_files(const std::string& folder) {
  const auto read = [&](const char* name) {
    const auto path = std::filesystem::path(folder) / name;
    NpyBytes file = read_npy_bytes(path, {"<i4", "<i8"});
    if (file.shape.size() != 4 || (file.shape[2] != 1 && file.shape[2] != 2))
      throw InputError(
          fmt::format("{}: has shape [{}], must be [B or 1, Hq or 1, 1 or 2, seqlen_k]",
                      path.string(), fmt::join(file.shape, ", ")));
    TensorSpec spec{name, {}, file.type == "<i4" ? DType::int32 : DType::int64};
    std::ranges::copy(file.shape, spec.shape);
    std::vector<int64_t> rows = from_bytes(spec, file.bytes).numbers;
    for (std::size_t n = 0; n < rows.size(); ++n)
      if (rows[n] < 0 || rows[n] > std::numeric_limits<int32_t>::max())
        throw InputError(fmt::format("{}: entry {} is {}, must be a query from 0 on", path.string(),
                                     n, rows[n]));
    return std::pair{file.shape, rows};
  };
  const auto [shape, begin] = read("hidden_begin.npy");
  const auto [other, end] = read("hidden_end.npy");
  if (shape != other)
    throw InputError(
        fmt::format("{}: hidden_begin.npy [{}] and hidden_end.npy [{}] must have one "
                    "shape",
                    folder, fmt::join(shape, ", "), fmt::join(other, ", ")));
  return std::make_shared<ColumnIntervals>(shape, begin, end, "flashmask:" + folder);
}

std::shared_ptr<const KeyMask> flashmask(const std::string& text, const std::string& name,
                                         const Problem& p) {
  if (std::filesystem::is_directory(name)) return intervals_of_files(name);
  const auto kind = std::ranges::find(kKinds, name, &Kind::name);
  if (kind == std::end(kKinds)) {
    std::string names;
    for (const Kind& k : kKinds) names += (names.empty() ? "" : ", ") + std::string(k.name);
    throw InputError(fmt::format(
        "--mask {}: must be one of {}, or a folder with hidden_begin.npy and hidden_end.npy", text,
        names));
  }
  if (p.seqlen_q != p.seqlen_k)
    throw InputError(fmt::format("--mask {}: {} queries and {} keys: must be equal", text,
                                 p.seqlen_q, p.seqlen_k));
  if (kind->causal && !p.causal) throw InputError(fmt::format("--mask {}: needs --causal", text));
  if (!kind->causal && p.causal)
    throw InputError(fmt::format("--mask {}: not with --causal: the mask is not causal", text));
  const int64_t n = p.seqlen_k;
  std::mt19937_64 random(p.seed);
  const std::vector<int64_t> ends = ends_of_parts(random, n, kind->parts);
  std::vector<int64_t> begins[2], stops[2];
  bool second = false;
  for (int64_t j = 0; j < n; ++j) {
    const Hidden hidden = kind->hidden(n, j, ends, random());
    for (int i = 0; i < 2; ++i) {
      const int64_t begin = std::clamp<int64_t>(hidden.begin[i], 0, n),
                    end = std::clamp<int64_t>(hidden.end[i], 0, n);
      begins[i].push_back(begin), stops[i].push_back(std::max(begin, end));
    }
    second = second || stops[1].back() > begins[1].back();
  }
  if (second) begins[0].insert(begins[0].end(), begins[1].begin(), begins[1].end());
  if (second) stops[0].insert(stops[0].end(), stops[1].begin(), stops[1].end());
  return std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 1, second ? 2 : 1, n}, begins[0],
                                           stops[0], "flashmask:" + name);
}

// ---- windows of tiles -------------------------------------------------------------------------

Sides sides_of(const std::string& text, const std::string& part) {
  const std::vector<std::string> sides = split(part, 'x');
  if (sides.size() != 3)
    throw InputError(fmt::format("--mask {}: {}: must be TxHxW, as 30x48x80", text, part));
  Sides s;
  for (std::size_t i = 0; i < 3; ++i)
    s[i] = parse_number<int64_t>("--mask sta", sides[i], 1, 1 << 20);
  return s;
}
std::shared_ptr<const KeyMask> sliding_tiles(const std::string& text, const std::string& rest,
                                             const Problem& p) {
  const std::vector<std::string> parts = split(rest, ',');
  if (parts.size() < 3)
    throw InputError(fmt::format(
        "--mask {}: must be sta:CANVAS,TILE,WINDOW, as sta:30x48x80,6x8x8,18x24x24", text));
  const Sides canvas = sides_of(text, parts[0]), tile = sides_of(text, parts[1]);
  if (std::ssize(parts) - 2 > p.heads)
    throw InputError(fmt::format("--mask {}: {} windows and {} heads: at most one per head", text,
                                 parts.size() - 2, p.heads));
  std::vector<Sides> windows;
  for (int64_t h = 0; h < p.heads; ++h)  // cycles through the list
    windows.push_back(sides_of(text, parts[2 + static_cast<std::size_t>(h) % (parts.size() - 2)]));
  const int64_t tokens = canvas[0] * canvas[1] * canvas[2];
  if (p.seqlen_q != p.seqlen_k || p.seqlen_k < tokens)
    throw InputError(fmt::format(
        "--mask {}: {} queries and {} keys: must be as many, the canvas of {} tokens and text",
        text, p.seqlen_q, p.seqlen_k, tokens));
  return std::make_shared<SlidingTiles>(canvas, tile, windows, p.seqlen_k - tokens);
}

}  // namespace

std::shared_ptr<const KeyMask> read_mask(const std::string& text, const Problem& p,
                                         const std::string& load) {
  const auto colon = text.find(':');
  const std::string kind = text.substr(0, colon),
                    rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  std::shared_ptr<const KeyMask> mask;
  if (kind == "random") mask = random_mask(parts_of(text, rest), p);
  if (kind == "block") mask = mask_of_file(parts_of(text, rest), p);
  if (kind == "sta") mask = sliding_tiles(text, rest, p);
  if (kind == "flashmask") {
    const auto loaded = [&](const char* name) {
      return !load.empty() && std::filesystem::exists(std::filesystem::path(load) / name);
    };
    if (!std::filesystem::is_directory(rest) &&
        (loaded("hidden_begin.npy") || loaded("hidden_end.npy")))
      mask = intervals_of_files(load);
    else
      mask = flashmask(text, rest, p);
  }
  if (mask == nullptr) throw InputError(fmt::format("--mask {}: {}", text, kAccepted));
  try {
    mask->fits(p);
  } catch (const InputError& e) {  // it describes the fault but not the source of the tensor
    if (kind == "block" || kind == "flashmask")
      throw InputError(fmt::format("--mask {}: {}", text, e.what()));
    throw;
  }
  return mask;
}

}  // namespace attn
