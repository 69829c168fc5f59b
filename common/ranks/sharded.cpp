#include "ranks/sharded.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "attn/backward_cost.h"
#include "attn/error.h"
#include "attn/feature.h"
#include "device/device.h"
#include "ranks/emulated.h"
#include "ranks/gpus.h"

namespace attn::ranks {

std::vector<int> devices_of(const Problem& p) {
  std::vector<int> devices;
  if (const auto given = p.own.find("devices"); given != p.own.end())
    for (const double d : given->second) devices.push_back(static_cast<int>(d));
  if (const auto world = p.own.find("world"); world != p.own.end() && !devices.empty())
    devices.assign(static_cast<std::size_t>(world->second[0]), devices.front());
  return devices;
}

std::optional<std::string> refuse_ranks(const Problem& p) {
  if (!p.own.contains("devices"))
    return "--devices: this step needs them: 0,1 for two ranks, on GPUs 0 and 1 or emulated";
  const auto own = [&](const char* name) { return p.own.contains(name); };
  if (!own("rank") && !own("world") && !own("nccl_id")) return std::nullopt;
  if (!own("rank") || !own("world") || !own("nccl_id"))
    return "--rank, --world and --nccl-id go together: one process per rank";
  const double rank = p.own.at("rank")[0], world = p.own.at("world")[0];
  if (p.own.at("devices").size() != 1) return "--devices: with --rank one GPU, of this process";
  if (rank >= world) return fmt::format("--rank {:g}: must be below --world {:g}", rank, world);
  if (own("transport") && p.own.at("transport")[0] == 1)
    return "--transport copies: copies are between GPUs of one process";
  return std::nullopt;
}

Sharding::Sharding(const Problem& p, TokenOrder o, int world) : whole(p), order(o) {
  for (int rank = 0; rank < world; ++rank) {
    q.push_back(parts_of(order, p.seqlen_q, world, rank));
    k.push_back(parts_of(order, p.seqlen_k, world, rank));
  }
}
int64_t Sharding::kv_bytes_of_largest() const {
  int64_t most = 0;
  for (int rank = 0; rank < world(); ++rank) most = std::max(most, kv_bytes(rank));
  return most;
}

std::vector<int> ring_order(int rank, int world) {
  std::vector<int> owners;
  for (int hop = 0; hop < world; ++hop) owners.push_back((rank - hop + world) % world);
  return owners;
}

RankBlocks blocks_of_rank(const Sharding& s, int rank, const std::vector<int>& owners) {
  const std::vector<Part>& parts = s.q[static_cast<std::size_t>(rank)];
  RankBlocks all;
  all.split = parts.front().count;
  for (const int owner : owners) {
    auto& blocks = all.of_owner.emplace_back();
    for (const ShardBlock& block : blocks_of(s.whole, parts, s.k[static_cast<std::size_t>(owner)]))
      blocks.push_back({block});
  }
  int64_t begin = 0;
  for (std::size_t n = 0; n < parts.size(); begin += parts[n].count, ++n) {
    if (parts[n].count == 0) continue;
    const int64_t end = begin + parts[n].count;
    const unsigned bit = 1u << n;
    PlannedBlock *first = nullptr, *last = nullptr;
    for (auto& blocks : all.of_owner)
      for (PlannedBlock& p : blocks)
        if (p.block.q_row < end && p.block.q_row + p.block.nq > begin) {
          if (first == nullptr) first = &p;
          last = &p;
        }
    const auto has_all = [&](const PlannedBlock* p) {
      return p != nullptr && p->block.q_row <= begin && p->block.q_row + p->block.nq >= end;
    };
    has_all(first) ? first->first |= bit : all.clear |= bit;
    has_all(last) ? last->last |= bit : all.convert |= bit;
  }
  return all;
}

Problem problem_of(const Problem& whole, const ShardBlock& b) {
  Problem p = whole;
  p.batch = 1, p.own.clear(), p.seqused_k.clear();
  p.varlen_q = {b.nq}, p.varlen_k = {b.nk};
  p.causal = false, p.window_left = b.window_left, p.window_right = b.window_right;
  p.finish();
  return p;
}

void copy_rows(Backend backend, void* to, int64_t to_pitch, const void* from, int64_t from_pitch,
               int64_t width, int64_t rows) {
  if (rows == 0) return;
  if (backend == Backend::gpu)
    return copy_rows_on_gpus(to, to_pitch, from, from_pitch, width, rows);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(static_cast<std::byte*>(to) + r * to_pitch,
                static_cast<const std::byte*>(from) + r * from_pitch,
                static_cast<std::size_t>(width));
}

namespace {

// Between [B, H, tokens, columns] and a rank's [B, rows, H, columns], or, for lse, [B, H, rows].
struct Tokens {
  Backend backend;
  int64_t batch, heads, tokens, rows, column_bytes;
  bool by_head = false;

  void copy(std::byte* whole, std::byte* shard, const std::vector<Part>& parts,
            bool to_shard) const {
    const int64_t shard_pitch = column_bytes * (by_head ? 1 : heads);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h) {
        int64_t row = 0;
        for (const Part& part : parts) {
          std::byte* const w = whole + ((b * heads + h) * tokens + part.first) * column_bytes;
          std::byte* const s =
              shard + (by_head ? (b * heads + h) * rows + row : (b * rows + row) * heads + h) *
                          column_bytes;
          const int64_t w_pitch = column_bytes * part.stride;
          if (to_shard)
            copy_rows(backend, s, shard_pitch, w, w_pitch, column_bytes, part.count);
          else
            copy_rows(backend, w, w_pitch, s, shard_pitch, column_bytes, part.count);
          row += part.count;
        }
      }
  }
};

}  // namespace

double timeout_of(const Problem& p) {
  const auto given = p.own.find("timeout");
  return given == p.own.end() ? 30 : given->second[0];
}

Status run_ranks(const Arguments& args, const Program& program,
                 const std::function<void(Rank&)>& finish, const std::vector<Output>& outputs) {
  const std::vector<int> devices = devices_of(args.problem);
  const double timeout_s = timeout_of(args.problem);
  if (args.backend == Backend::emulated) {
    if (args.problem.own.contains("rank"))
      throw InputError("--rank: emulated ranks are in one process: --devices 0,1,...");
    return run_emulated(static_cast<int>(devices.size()), program, finish, timeout_s);
  }
  Process process;
  if (const auto rank = args.problem.own.find("rank"); rank != args.problem.own.end()) {
    Problem same = args.problem;
    for (const char* name : {"rank", "devices", "nccl_id"}) same.own.erase(name);
    process = {static_cast<int>(rank->second[0]), nccl_id_file, same.text(), outputs};
    const int in_use = args.device.ordinal == Device::kInUse ? gpu_info().ordinal
                                                              : args.device.ordinal;
    if (in_use != devices.front())
      throw InputError(fmt::format("--rank: --device gpu:{0} must be the GPU of --devices {0}",
                                   devices.front()));
  }
  const auto transport = args.problem.own.find("transport");
  const bool copies = transport != args.problem.own.end() && transport->second[0] == 1;
  return run_on_gpus(devices, copies ? Transport::copies : Transport::nccl, program, finish,
                     timeout_s, process);
}

namespace {
// What the ranks of several processes make together.
std::vector<Output> outputs_of(const Arguments& args, const std::vector<std::string>& names) {
  const Problem& p = args.problem;
  const int64_t row = bytes_of(p.dtype, p.head_dim);
  std::vector<Output> all;
  for (const std::string& name : names) {
    const bool of_k = name == "dk" || name == "dv";
    const int64_t rows = p.batch * (of_k ? p.kv_heads * p.seqlen_k : p.heads * p.seqlen_q);
    all.push_back({args.out<std::byte>(name), rows * (name == "lse" ? 4 : row)});
  }
  return all;
}
}  // namespace

Status run_forward(const Arguments& args, TokenOrder order, const ForwardProgram& program) {
  const Problem& p = args.problem;
  const Sharding sharding(p, order, static_cast<int>(devices_of(p).size()));
  const int64_t row = bytes_of(p.dtype, p.head_dim);
  const auto whole = [&](const char* name) { return args.out<std::byte>(name); };
  const auto tokens = [&](const Rank& rank, bool queries) {
    const int r = rank.index();
    return Tokens{args.backend,
                  p.batch,
                  queries ? p.heads : p.kv_heads,
                  queries ? p.seqlen_q : p.seqlen_k,
                  queries ? sharding.rows_q(r) : sharding.rows_k(r),
                  row};
  };
  const auto prepare = [&](Rank& rank) {
    const auto r = static_cast<std::size_t>(rank.index());
    const int64_t rows = sharding.rows_q(rank.index());
    auto* const q = static_cast<std::byte*>(rank.allocate("q", sharding.q_bytes(rank.index())));
    auto* const kv = static_cast<std::byte*>(rank.allocate("kv", sharding.kv_bytes(rank.index())));
    rank.allocate("o", sharding.q_bytes(rank.index()));
    rank.allocate("lse", p.batch * p.heads * rows * 4);
    tokens(rank, true).copy(whole("q"), q, sharding.q[r], true);
    tokens(rank, false).copy(whole("k"), kv, sharding.k[r], true);
    tokens(rank, false)
        .copy(whole("v"), kv + sharding.kv_bytes(rank.index()) / 2, sharding.k[r], true);
    program.prepare({sharding, rank});
  };
  const auto run = [&](Rank& rank) { program.run({sharding, rank}); };
  const auto finish = [&](Rank& rank) {
    const auto& parts = sharding.q[static_cast<std::size_t>(rank.index())];
    Tokens t = tokens(rank, true);
    t.copy(whole("o"), static_cast<std::byte*>(rank.buffer("o")), parts, false);
    t.column_bytes = 4, t.by_head = true;
    t.copy(whole("lse"), static_cast<std::byte*>(rank.buffer("lse")), parts, false);
  };
  return run_ranks(args, {prepare, run}, finish, outputs_of(args, {"o", "lse"}));
}

std::optional<std::string> refuse_decode(const Problem& p) {
  if (auto reason = refuse_ranks(p)) return reason;
  if (p.masked() && p.seqlen_q > 1 && !p.seqused_k.empty())
    return "--seqused: with a mask and several queries, all sequences must use the whole cache";
  if (p.window_left >= 0 && !p.seqused_k.empty())
    return "--seqused: with a window, all sequences must use the whole cache";
  return std::nullopt;
}

namespace {

DecodeShard decode_shard(const Problem& p, Rank& rank) {
  const Part part = parts_of(TokenOrder::contiguous, p.seqlen_k, rank.world(), rank.index())[0];
  DecodeShard shard{p, Shape::kNoWindow, Shape::kNoWindow, rank};
  Problem& local = shard.local;
  local.own.clear();
  local.seqlen_k = part.count;
  for (int64_t& used : local.seqused_k)
    used = std::clamp<int64_t>(used - part.first, 0, part.count);
  local.causal = false, local.window_left = local.window_right = -1;
  local.finish();
  // Distance of the local diagonal from that of the whole cache: the keys of later ranks.
  const int64_t later = p.seqlen_k - part.first - part.count;
  const int64_t right = p.causal ? 0 : p.window_right;
  if (right >= 0 && p.seqlen_q > 1)
    shard.window_right = static_cast<int>(std::min<int64_t>(later + right, Shape::kNoWindow));
  if (p.window_left >= 0)
    shard.window_left = static_cast<int>(std::max<int64_t>(
        std::min<int64_t>(p.window_left, Shape::kNoWindow) - later, -Shape::kNoWindow));
  return shard;
}

}  // namespace

std::vector<DecodeShard> decode_shards(const Problem& whole, const Rank& of) {
  std::vector<DecodeShard> all;
  for (int r = 0; r < of.world(); ++r) all.push_back(decode_shard(whole, of.peer(r)));
  return all;
}

std::optional<std::string> refuse_decode_pages(const Problem& p) {
  if (auto reason = refuse_ranks(p)) return reason;
  if (p.masked() && p.seqlen_q > 1) return "--causal: with pages on ranks only one query";
  if (p.window_left >= 0) return "--window: this step has none";
  return std::nullopt;
}

namespace {

// Q, the numbers of keys in use, and room for O and lse.
void give_queries(const Arguments& args, const DecodeShard& shard) {
  const Problem& p = shard.local;
  const int64_t bytes = shard.rows() * bytes_of(p.dtype, p.head_dim);
  copy_rows(args.backend, shard.rank.allocate("q", bytes), bytes, args.in<std::byte>("q"), bytes,
            bytes, 1);
  std::vector<int32_t> used(static_cast<std::size_t>(p.batch), static_cast<int32_t>(p.seqlen_k));
  if (!p.seqused_k.empty()) used.assign(p.seqused_k.begin(), p.seqused_k.end());
  copy_rows(args.backend, shard.rank.allocate("seqused_k", 4 * p.batch), 4, used.data(), 4, 4,
            p.batch);
  shard.rank.allocate("o", bytes);
  shard.rank.allocate("lse", shard.rows() * 4);
}
// Of the rows of O and lse every world-th.
void take_rows(const Arguments& args, const Rank& rank) {
  const Problem& p = args.problem;
  const int64_t first = rank.index(), world = rank.world();
  const int64_t rows = (p.batch * p.heads * p.seqlen_q - first + world - 1) / world;
  for (const auto& [name, bytes] :
       {std::pair("o", bytes_of(p.dtype, p.head_dim)), {"lse", int64_t{4}}})
    copy_rows(args.backend, args.out<std::byte>(name) + first * bytes, world * bytes,
              static_cast<std::byte*>(rank.buffer(name)) + first * bytes, world * bytes, bytes,
              std::max<int64_t>(0, rows));
}

}  // namespace

Status run_decode(const Arguments& args, const DecodeProgram& program) {
  const Problem& p = args.problem;
  const int64_t row = bytes_of(p.dtype, p.head_dim);
  const auto prepare = [&](Rank& rank) {
    const DecodeShard shard = decode_shard(p, rank);
    const int64_t keys = shard.local.seqlen_k;
    const int64_t first =
        parts_of(TokenOrder::contiguous, p.seqlen_k, rank.world(), rank.index())[0].first;
    give_queries(args, shard);
    for (const char* name : {"k", "v"})
      copy_rows(args.backend, rank.allocate(name, p.batch * p.kv_heads * keys * row), keys * row,
                args.in<std::byte>(name) + first * row, p.seqlen_k * row, keys * row,
                keys == 0 ? 0 : p.batch * p.kv_heads);
    program.prepare(shard);
  };
  const auto run = [&](Rank& rank) { program.run(decode_shard(p, rank)); };
  return run_ranks(
      args, {prepare, run}, [&](Rank& rank) { take_rows(args, rank); },
      outputs_of(args, {"o", "lse"}));
}

Status run_decode_pages(const Arguments& args, int64_t page_size, const DecodeProgram& program) {
  const Problem& p = args.problem;
  const int64_t row = bytes_of(p.dtype, p.head_dim);
  const auto shard_of = [&](Rank& rank) {
    const int64_t world = rank.world(), turn = page_size * world;
    DecodeShard shard{p, Shape::kNoWindow, Shape::kNoWindow, rank};
    Problem& local = shard.local;
    local.own.clear();
    local.seqlen_k = (p.seqlen_k + turn - 1) / turn * page_size;
    local.seqused_k.assign(static_cast<std::size_t>(p.batch), p.seqlen_k);
    if (!p.seqused_k.empty()) local.seqused_k = p.seqused_k;
    for (int64_t& used : local.seqused_k)  // whole turns, and what the last one has for this rank
      used = used / turn * page_size +
             std::clamp<int64_t>(used % turn - rank.index() * page_size, 0, page_size);
    local.causal = false, local.window_left = local.window_right = -1;
    local.finish();
    return shard;
  };
  const auto prepare = [&](Rank& rank) {
    const DecodeShard shard = shard_of(rank);
    const int64_t max_pages = shard.local.seqlen_k / page_size, num_pages = p.batch * max_pages;
    give_queries(args, shard);
    std::vector<int32_t> table(static_cast<std::size_t>(num_pages));
    for (std::size_t n = 0; n < table.size(); ++n)
      table[n] = static_cast<int32_t>(table.size() - 1 - n);
    copy_rows(args.backend, rank.allocate("page_table", 4 * num_pages), 4, table.data(), 4, 4,
              num_pages);
    for (const char* name : {"k", "v"}) {
      auto* const pool =
          static_cast<std::byte*>(rank.allocate(name, num_pages * page_size * p.kv_heads * row));
      for (int64_t n = 0; n < num_pages; ++n) {
        const int64_t b = n / max_pages;
        const int64_t first = (n % max_pages * rank.world() + rank.index()) * page_size;
        const int64_t keys = std::clamp<int64_t>(p.seqlen_k - first, 0, page_size);
        for (int64_t h = 0; h < p.kv_heads; ++h)
          copy_rows(args.backend,
                    pool + (table[static_cast<std::size_t>(n)] * page_size * p.kv_heads + h) * row,
                    p.kv_heads * row,
                    args.in<std::byte>(name) + ((b * p.kv_heads + h) * p.seqlen_k + first) * row,
                    row, row, keys);
      }
    }
    program.prepare(shard);
  };
  const auto run = [&](Rank& rank) { program.run(shard_of(rank)); };
  return run_ranks(
      args, {prepare, run}, [&](Rank& rank) { take_rows(args, rank); },
      outputs_of(args, {"o", "lse"}));
}

Status run_backward(const Arguments& args, TokenOrder order, const ForwardProgram& program) {
  const Problem& p = args.problem;
  const Sharding sharding(p, order, static_cast<int>(devices_of(p).size()));
  const int64_t row = bytes_of(p.dtype, p.head_dim);
  // Between rows of [B, heads, tokens, d] and a dense part of them.
  const auto copy = [&](const char* name, std::byte* dense, const Part& part, int64_t heads,
                        int64_t tokens, int64_t bytes, bool to_rank) {
    std::byte* const whole = args.out<std::byte>(name) + part.first * bytes;
    const int64_t width = part.count * bytes;
    const int64_t rows = width == 0 ? 0 : p.batch * heads;
    if (to_rank)
      copy_rows(args.backend, dense, width, whole, tokens * bytes, width, rows);
    else
      copy_rows(args.backend, whole, tokens * bytes, dense, width, width, rows);
  };
  const auto each_part = [&](Rank& rank, bool to_rank) {
    const auto r = static_cast<std::size_t>(rank.index());
    for (std::size_t n = 0; n < sharding.q[r].size(); ++n) {
      const Part& part = sharding.q[r][n];
      const int64_t bytes = p.batch * p.heads * part.count * row;
      const auto at = [&](const std::string& name, int64_t size) {
        const std::string numbered = name + std::to_string(n);
        return static_cast<std::byte*>(to_rank ? rank.allocate(numbered, size)
                                               : rank.buffer(numbered));
      };
      if (!to_rank) {
        copy("dq", at("dq", bytes), part, p.heads, p.seqlen_q, row, false);
        continue;
      }
      for (const char* name : {"q", "o", "do"})
        copy(name, at(name, bytes), part, p.heads, p.seqlen_q, row, true);
      copy("lse", at("lse", p.batch * p.heads * part.count * 4), part, p.heads, p.seqlen_q, 4,
           true);
      at("dq", bytes);
    }
    auto* kv = static_cast<std::byte*>(
        to_rank ? rank.allocate("kv", sharding.kv_bytes(rank.index())) : rank.buffer("dkv"));
    for (const Part& part : sharding.k[r])
      for (const char* one : {to_rank ? "k" : "dk", to_rank ? "v" : "dv"}) {
        copy(one, kv, part, p.kv_heads, p.seqlen_k, row, to_rank);
        kv += p.batch * p.kv_heads * part.count * row;
      }
    if (to_rank) rank.allocate("dkv", sharding.kv_bytes(rank.index()));
  };
  const auto prepare = [&](Rank& rank) {
    each_part(rank, true);
    program.prepare({sharding, rank});
  };
  const auto run = [&](Rank& rank) { program.run({sharding, rank}); };
  return run_ranks(
      args, {prepare, run}, [&](Rank& rank) { each_part(rank, false); },
      outputs_of(args, {"dq", "dk", "dv"}));
}

std::vector<Workspace> workspaces_of_backward(const Problem& p) {
  std::vector<Workspace> all = gradient_workspaces(p, {p.head_dim == 128 ? 64 : 128, 128});
  all.push_back({"tile_counter", 4});
  return all;
}

}  // namespace attn::ranks
