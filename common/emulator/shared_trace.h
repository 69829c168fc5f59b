/// \file
/// What warps and asynchronous work do to shared memory during a recorded launch: the data of the
/// memory panel of a page of `--timeline`.
///
/// An access is one instruction of a warp. The emulator runs lanes one after another, so lanes are
/// joined here: the n-th access of a lane at a line since its last barrier or collective belongs
/// to the n-th accesses of the other lanes there.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/memory.h"
#include "emulator/program.h"
#include "emulator/trace.h"

namespace attn::emulator {

/// The wavefronts of one access of a warp to shared memory, by the rules of warp_access.h: the
/// lanes that each of them serves.
struct BankRows {
  int wavefronts = 0, ideal = 0;
  std::vector<std::vector<int>> rows;
  std::vector<bool> extra;  ///< of each: an earlier one would serve its lanes, but for conflicts
};
/// `address`: a byte per lane, or -1; `bytes`: 1, 2, 4, 8 or 16 per lane, aligned.
BankRows bank_rows(const std::array<std::int64_t, 32>& address, int bytes);

class SharedTrace {
 public:
  /// `limit`: bytes of the file. Accesses for which it certainly has no room are not kept.
  explicit SharedTrace(std::size_t limit) : most_(std::max<std::size_t>(limit / kLeastText, 64)) {}

  // ---- recording: `block` is a number of Trace's, `t` a thread of it ----------------------------
  void add_block(std::size_t block, std::size_t threads);
  void layout(std::size_t block, const std::vector<StaticShared>& variables,
              std::size_t dynamic_bytes, const Members* members);
  /// Of a lane: the clock at which its ordinary code began, reads since then, and its next batch.
  struct Moment {
    Cycles from = 0, code = 0;
    std::size_t batch = 0;
  };
  struct Instruction {
    Kind kind;
    const char* what;  ///< null: ordinary code
    Where where;
    std::size_t bytes;
  };
  /// `group`: of cp.async, the group of its warp's, or -1.
  void access(std::size_t block, std::size_t t, const Instruction&, std::size_t byte,
              const Moment&, std::int64_t group = -1);
  /// Thread t has passed a barrier or a collective, one number for all lanes that pass it together.
  void passed(std::size_t block, std::size_t t, std::uint64_t number);
  /// Asynchronous work: a copy that writes, or MMAs or TMA stores that read.
  using Range = std::pair<std::size_t, std::size_t>;  // first byte, bytes
  void flight(std::size_t block, std::size_t warp, bool writes, const char* what, Place place,
              Cycles begin, Cycles end, std::vector<Range> ranges);
  /// Two accesses without an order between them, or a read of bytes that no thread has written.
  struct RaceSide {
    std::size_t thread = 0;
    bool known = false, in_block = false;
    Kind kind = Kind::read;
    std::string what, source;
    Cycles at = 0;
  };
  struct Race {
    std::string text;
    std::int64_t byte = -1;  // of shared memory
    RaceSide first, second;
    std::size_t access = 0;  // of the second, if it has one
  };
  void race(std::size_t block, Race);

  /// The block has ended. `when(warp, moment)`: the clock of an access; `landed(warp, group)`: that
  /// of the end of a group of cp.async.
  void end_block(std::size_t block,
                 const std::function<Cycles(std::size_t warp, const Moment&)>& when,
                 const std::function<Cycles(std::size_t warp, std::size_t group)>& landed);

  /// JSON of at most `limit` bytes, or empty. Leaves out whole blocks first, the last ones; then
  /// the end of the time. `left_out` says what, or is empty.
  std::string json(double clock_mhz, std::size_t limit, std::string& left_out);

 private:
  static constexpr std::size_t kLeastText = 12;  // bytes of an access in the file
  struct Access {
    Moment moment;
    Cycles at = 0, until = 0;  // until: of a copy, when it has landed
    std::int64_t group = -1;
    std::uint32_t warp = 0, site = 0, pattern = 0, base = 0;
  };
  struct Flight {
    Cycles begin, end;
    std::size_t warp;
    bool writes;
    const char* what;
    Place place;
    std::vector<Range> ranges;
  };
  using Pattern = std::array<std::int32_t, 32>;  // bytes from the lowest address, or -1
  struct Open {
    std::size_t access;
    std::array<std::int64_t, 32> address;
    int lanes = 0;
  };
  struct Count {
    std::uint64_t passed = 0;
    std::uint32_t n = 0;
  };
  struct Warp {
    int lanes = 0, together = 0;
    std::uint64_t last = 0;  // what `together` lanes have passed last
    std::array<std::uint64_t, 32> passed{};
    std::unordered_map<std::uint32_t, std::array<Count, 32>> counts;  // by site
    std::map<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>, Open> open;
  };
  struct Block {
    std::vector<Access> accesses;
    std::vector<Flight> flights;
    std::vector<Race> races;
    std::vector<Warp> warps;
    std::vector<StaticShared> variables;
    std::vector<Member> members;
    std::size_t dynamic_bytes = 0;
    std::size_t touched = 0;  // the access that a lane has joined last
    bool kept = true, cut = false, ended = false;
  };
  struct Site {
    Instruction of;
    std::string source;  // once it is needed
  };
  struct Shapes;  // of a file: see json()

  std::uint32_t site_of(const Instruction&);
  void close(Block&, Open&);
  void close_all(Block&, Warp&);
  void make_room(std::size_t block);
  const std::string& source_of(std::uint32_t site);
  const void* find_second(const Block&, Race&);
  void find_first(const Block&, Race&, const void* second);
  bool covers(const Access&, std::size_t byte) const;
  std::string layout_json(const Block&) const;
  std::string block_json(std::size_t number, double clock_mhz, Cycles until, Shapes&);
  std::string all_json(double clock_mhz, const std::vector<std::size_t>& blocks, std::size_t shown,
                       Cycles until);

  std::size_t most_, count_ = 0;
  std::vector<Block> blocks_;
  std::vector<Site> sites_;
  std::map<std::tuple<std::uintptr_t, int, const char*, std::size_t>, std::uint32_t> site_ids_;
  std::vector<Pattern> patterns_;
  std::map<Pattern, std::uint32_t> pattern_ids_;
};

}  // namespace attn::emulator
