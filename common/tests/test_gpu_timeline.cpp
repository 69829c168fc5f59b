// Timelines of a GPU, from made-up rings: clocks that differ from SM to SM, copies and groups of
// MMAs up to the wait that ends them, marks, arrows, full rings.
#include <nlohmann/json.hpp>

#include "attn/step.h"
#include "run/gpu_timeline.h"
#include "run/timeline.h"
#include "tests/catch.h"

using namespace attn;

namespace {

constexpr std::uint32_t kShared = 1024;  // base of shared memory
constexpr std::uint64_t kEpoch = 1'700'000'000'000'000'000;  // %globaltimer, too large for a double

// Rings of one kernel, and SMs whose clocks begin anywhere.
class Rings {
 public:
  Rings(std::size_t blocks, std::size_t warps, std::size_t capacity = 64) {
    RecordedKernel k;
    k.blocks[0] = blocks, k.blocks[1] = k.blocks[2] = 1;
    k.warps = warps, k.capacity = capacity;
    k.records.resize(blocks * warps * capacity);
    k.members = {{1, 0, 64, 8, {2, 0}}, {2, 64, 64, 2, {2, 16}}};
    launch.texts = {{1, "full"}, {2, "sK"}};
    launch.marks = {{record_hash("softmax"), "softmax"}, {record_hash("PV"), "PV"}};
    launch.kernels.push_back(k);
  }
  // `clock` cycles at kEpoch + `ns`, at `ns_per_cycle`.
  void sm(std::uint32_t sm, std::uint64_t clock, double ns_per_cycle) {
    for (const std::uint64_t cycles : {0, 2000, 5000, 100'000, 104'000})
      launch.samples.push_back(
          {sm, 32, clock + cycles,
           kEpoch + static_cast<std::uint64_t>(static_cast<double>(cycles) * ns_per_cycle)});
  }
  void begin(std::size_t block, std::size_t warp, std::uint32_t sm, std::uint64_t clock,
             std::uint64_t ns) {
    at_ = &launch.kernels[0].records[(block * launch.kernels[0].warps + warp) *
                                     launch.kernels[0].capacity];
    begin_ = clock;
    *at_++ = {record_tag(RecordKind::begin), kShared, static_cast<std::uint32_t>(clock),
              static_cast<std::uint32_t>(clock >> 32)};
    ns += kEpoch;
    *at_++ = {record_tag(RecordKind::timer), sm, static_cast<std::uint32_t>(ns),
              static_cast<std::uint32_t>(ns >> 32)};
  }
  // From the begin of the warp, in cycles.
  void add(RecordKind kind, std::uint32_t what, std::uint64_t from, std::uint64_t to,
           int extra = 0) {
    *at_++ = {record_tag(kind, 7, extra), what, static_cast<std::uint32_t>(begin_ + from),
              static_cast<std::uint32_t>(begin_ + to)};
  }
  void mark(RecordKind kind, const char* name, std::uint64_t at) {
    *at_++ = {record_tag(kind), record_hash(name), 0, static_cast<std::uint32_t>(begin_ + at)};
  }
  void copy(std::uint32_t barrier, std::uint32_t to, std::uint64_t at) {
    *at_++ = {record_tag(RecordKind::tma, 9), barrier, to,
              static_cast<std::uint32_t>(begin_ + at)};
  }
  GpuTimeline convert(std::size_t bytes = 5'000'000) {
    trace = emulator::Trace(1000);
    const GpuTimeline t = add_to_trace(launch, "06_x/v1_step.cu", bytes, trace);
    std::string left_out;
    json = nlohmann::json::parse(trace.json("{\"what\":\"made up\"}", bytes, left_out));
    json["left_out"] = left_out;
    return t;
  }
  // Events of a phase and name.
  std::vector<nlohmann::json> named(const std::string& phase, const std::string& name) const {
    std::vector<nlohmann::json> all;
    for (const auto& e : json["traceEvents"])
      if (e["ph"] == phase && e["name"] == name) all.push_back(e);
    return all;
  }
  RecordedLaunch launch;
  emulator::Trace trace{1000};
  nlohmann::json json;

 private:
  Record* at_ = nullptr;
  std::uint64_t begin_ = 0;
};

double ns(const nlohmann::json& event, const char* what = "ts") {
  return event.at(what).get<double>() * 1000;
}

}  // namespace

TEST_CASE("clocks of SMs that differ in offset and rate are mapped to one time", "[timeline]") {
  // Block 1 begins 100 ns after block 0. Its SM has counted since long ago, beyond 32 bits.
  Rings r(2, 1);
  r.sm(3, 1'000'000, 0.5);
  r.sm(8, 90'000'000'000, 1.0);
  r.begin(0, 0, 3, 1'000'000 + 2000, 1000);
  r.add(RecordKind::block_wait, 0, 200, 400);  // 100 to 200 ns
  r.begin(1, 0, 8, 90'000'000'000 + 1100, 1100);
  r.add(RecordKind::block_wait, 0, 10, 50);  // 110 to 150 ns
  const GpuTimeline t = r.convert();
  const auto waits = r.named("X", "__syncthreads");
  REQUIRE(waits.size() == 2);
  CHECK(ns(waits[0]) == Approx(100));
  CHECK(ns(waits[0], "dur") == Approx(100));
  CHECK(ns(waits[1]) == Approx(110));
  CHECK(ns(waits[1], "dur") == Approx(40));
  CHECK(waits[0]["args"]["source"] == "06_x/v1_step.cu:7");
  CHECK(t.blocks == 2);
  CHECK(t.sms == 2);
  CHECK(t.end_ns == 200);
  CHECK(t.begins_off_ns < 1);
  CHECK(r.named("M", "process_name")[0]["args"]["name"] == "block (0,0,0) on SM 3");
  const SmClocks clocks(r.launch.samples);
  CHECK(clocks.mhz == Approx(1500));  // the mean of 2000 and 1000
  CHECK(clocks.residual_ns < 1);
  CHECK(clocks.resolution_ns == 32);
}

TEST_CASE("a clock that stood still before the launch is mapped by the begin of its blocks",
          "[timeline]") {
  Rings r(2, 1);
  r.sm(0, 0, 1.0);
  r.sm(1, 0, 1.0);
  r.begin(0, 0, 0, 1000, 1000);
  r.add(RecordKind::block_wait, 0, 10, 20);
  r.begin(1, 0, 1, 1000 - 700, 1000);  // it stood for 700 ns
  r.add(RecordKind::block_wait, 0, 30, 50);
  const GpuTimeline t = r.convert();
  const auto waits = r.named("X", "__syncthreads");
  REQUIRE(waits.size() == 2);
  CHECK(ns(waits[0]) == Approx(10));
  CHECK(ns(waits[1]) == Approx(30));
  CHECK(t.moved_ns == Approx(700).margin(1));
  CHECK(t.begins_off_ns < 1);
}

TEST_CASE("the rate of a clock is not changed by the time for which it stood still",
          "[timeline]") {
  Rings r(1, 1);
  r.sm(0, 0, 1.0);
  for (SmSample& s : r.launch.samples)
    if (s.clock >= 100'000) s.ns += 50'000;
  const SmClocks clocks(r.launch.samples);
  CHECK(clocks.mhz == Approx(1000));
  CHECK(clocks.residual_ns < 1);
}

TEST_CASE("a clock that changes its rate shows in the residual", "[timeline]") {
  Rings r(1, 1);
  r.sm(0, 0, 1.0);
  r.launch.samples[1].ns += 500;
  CHECK(SmClocks(r.launch.samples).residual_ns > 10);
}

TEST_CASE("clocks whose low half wraps within a block stay in order", "[timeline]") {
  const std::uint64_t clock = (std::uint64_t{1} << 32) - 100;
  Rings r(1, 1);
  r.sm(0, clock, 1.0);
  r.begin(0, 0, 0, clock, 0);
  r.add(RecordKind::block_wait, 0, 50, 250);
  r.convert();
  REQUIRE(r.named("X", "__syncthreads").size() == 1);
  CHECK(ns(r.named("X", "__syncthreads")[0]) == Approx(50));
  CHECK(ns(r.named("X", "__syncthreads")[0], "dur") == Approx(200));
}

TEST_CASE("an SM without samples has the mean rate, from the begin of its block", "[timeline]") {
  Rings r(2, 1);
  r.sm(0, 0, 0.5);
  r.begin(0, 0, 0, 0, 0);
  r.begin(1, 0, 5, 123'456'789, 300);
  r.add(RecordKind::block_wait, 0, 200, 400);
  r.convert();
  REQUIRE(r.named("X", "__syncthreads").size() == 1);
  CHECK(ns(r.named("X", "__syncthreads")[0]) == Approx(400));
  CHECK(ns(r.named("X", "__syncthreads")[0], "dur") == Approx(100));
}

TEST_CASE("a copy is in flight until the first wait at its barrier that ends after its issue",
          "[timeline]") {
  Rings r(1, 2);
  r.sm(0, 0, 1.0);
  r.begin(0, 0, 0, 0, 0);  // the producer
  r.add(RecordKind::mbarrier_arrive, kShared + 32, 10, 14);
  r.copy(kShared + 32, kShared + 64 + 32, 20);
  r.add(RecordKind::mbarrier_arrive, kShared + 32, 310, 314);
  r.copy(kShared + 32, kShared + 64 + 32, 320);
  r.begin(0, 1, 0, 0, 0);  // the consumer
  r.add(RecordKind::mbarrier_wait, kShared + 32, 5, 200);
  r.add(RecordKind::mbarrier_wait, kShared + 32, 205, 500);
  r.convert();
  const auto begins = r.named("b", "TMA full[1], at most");
  const auto ends = r.named("e", "TMA full[1], at most");
  REQUIRE(begins.size() == 2);
  REQUIRE(ends.size() == 2);
  CHECK(ns(begins[0]) == Approx(20));
  CHECK(ns(ends[0]) == Approx(200));
  CHECK(ns(begins[1]) == Approx(320));
  CHECK(ns(ends[1]) == Approx(500));
  CHECK(begins[0]["args"]["writes"] == "sK[1]");
  CHECK(begins[0]["args"]["issuer"] == 1);
  // An arrow from each arrival to the wait that it ended.
  const auto from = r.named("s", "ends"), to = r.named("f", "ends");
  REQUIRE(from.size() == 2);
  CHECK(ns(from[0]) == Approx(10));
  CHECK(ns(to[0]) == Approx(199));
  CHECK(ns(from[1]) == Approx(310));
  CHECK(ns(to[1]) == Approx(499));
}

TEST_CASE("an arrival before a wait has not ended it", "[timeline]") {
  Rings r(1, 2);
  r.sm(0, 0, 1.0);
  r.begin(0, 0, 0, 0, 0);
  r.add(RecordKind::named_arrive, 1, 10, 14);
  r.begin(0, 1, 0, 0, 0);
  r.add(RecordKind::named_wait, 1, 50, 60);
  r.convert();
  CHECK(r.named("X", "named barrier 1").size() == 2);
  CHECK(r.named("s", "ends").empty());
}

TEST_CASE("groups of MMAs end at the wait that leaves fewer in flight", "[timeline]") {
  Rings r(1, 8);
  r.sm(0, 0, 1.0);
  for (std::size_t w = 4; w < 8; ++w) {
    r.begin(0, w, 0, 0, 0);
    r.add(RecordKind::wgmma_group, 0, 10, 20);
    r.add(RecordKind::wgmma_group, 0, 30, 40);
    r.add(RecordKind::wgmma_wait, 0, 50, 100, 1);
    r.add(RecordKind::wgmma_wait, 0, 110, 150, 0);
  }
  r.begin(0, 0, 0, 0, 0);
  r.convert();
  const auto begins = r.named("b", "wgmma of warpgroup 1, at most");
  const auto ends = r.named("e", "wgmma of warpgroup 1, at most");
  REQUIRE(begins.size() == 2);  // the first warp draws them
  CHECK(ns(begins[0]) == Approx(10));
  CHECK(ns(ends[0]) == Approx(100));
  CHECK(ns(begins[1]) == Approx(30));
  CHECK(ns(ends[1]) == Approx(150));
}

TEST_CASE("groups of cp.async end likewise", "[timeline]") {
  Rings r(1, 1);
  r.sm(0, 0, 1.0);
  r.begin(0, 0, 0, 0, 0);
  r.add(RecordKind::copy_group, 0, 10, 12);
  r.add(RecordKind::copy_group, 0, 20, 22);
  r.add(RecordKind::copy_wait, 0, 30, 60, 1);
  r.convert();
  REQUIRE(r.named("e", "cp.async of warp 0, at most").size() == 1);
  CHECK(ns(r.named("e", "cp.async of warp 0, at most")[0]) == Approx(60));
  CHECK(r.named("X", "cp_async_wait").size() == 1);
}

TEST_CASE("marks nest, and the end of one ends those inside", "[timeline]") {
  Rings r(1, 1);
  r.sm(0, 0, 1.0);
  r.begin(0, 0, 0, 0, 0);
  r.mark(RecordKind::mark, "softmax", 10);
  r.mark(RecordKind::mark, "PV", 20);
  r.mark(RecordKind::mark_end, "softmax", 50);
  r.mark(RecordKind::mark_end, "PV", 60);  // has ended
  r.mark(RecordKind::mark, "PV", 70);
  r.add(RecordKind::block_wait, 0, 80, 90);  // the last record ends it
  r.convert();
  REQUIRE(r.named("X", "softmax").size() == 1);
  CHECK(ns(r.named("X", "softmax")[0], "dur") == Approx(40));
  const auto inner = r.named("X", "PV");
  REQUIRE(inner.size() == 2);
  CHECK(ns(inner[0], "dur") == Approx(30));
  CHECK(ns(inner[1], "dur") == Approx(20));
}

TEST_CASE("a full ring loses the last part of its warp's time, and says so", "[timeline]") {
  Rings r(1, 2, 8);
  r.sm(0, 0, 1.0);
  r.begin(0, 0, 0, 0, 0);
  r.add(RecordKind::block_wait, 0, 10, 20);
  r.begin(0, 1, 0, 0, 0);
  for (std::uint64_t n = 1; n <= 5; ++n) r.add(RecordKind::block_wait, 0, n * 1000, n * 1000 + 500);
  r.add(RecordKind::block_wait, 0, 99'000, 99'500);  // overwritten until the end
  const GpuTimeline t = r.convert();
  CHECK(r.named("X", "__syncthreads").size() == 6);
  CHECK(t.end_ns == 5500);
  CHECK(t.lost ==
        "rings of 1 warps were full; lost is the last part of their time, first of warp 1 of block "
        "(0,0,0) after 5.5 us");
}

TEST_CASE("records of an earlier launch behind the last one are not read", "[timeline]") {
  Rings r(1, 1);
  r.sm(0, 0, 1.0);
  r.begin(0, 0, 0, 1'000'000, 1'000'000);
  r.add(RecordKind::block_wait, 0, 10, 20);
  r.add(RecordKind::block_wait, 0, std::uint64_t(-5000), std::uint64_t(-4000));
  const GpuTimeline t = r.convert();
  CHECK(r.named("X", "__syncthreads").size() == 1);
  CHECK(t.end_ns == 20);
}

TEST_CASE("an SM is busy while a warp of it runs, waits while all wait", "[timeline]") {
  Rings r(2, 2);
  r.sm(0, 0, 1.0);
  r.sm(1, 0, 1.0);
  r.begin(0, 0, 0, 0, 0);
  r.add(RecordKind::block_wait, 0, 100, 400);
  r.add(RecordKind::named_arrive, 1, 990, 1000);
  r.begin(0, 1, 0, 0, 0);
  r.add(RecordKind::block_wait, 0, 200, 400);
  r.begin(1, 0, 1, 0, 0);  // its block ends at 500
  r.add(RecordKind::named_arrive, 1, 490, 500);
  const GpuTimeline t = r.convert();
  CHECK(t.shares.busy == Approx((800 + 500) / 2000.0).margin(0.002));
  CHECK(t.shares.waiting == Approx(200 / 2000.0).margin(0.002));
  CHECK(t.shares.idle == Approx(500 / 2000.0).margin(0.002));
  REQUIRE(t.over_time.size() > 10);
  CHECK(t.over_time.front().busy == Approx(1));
  CHECK(t.over_time.back().idle == Approx(0.5));
}

TEST_CASE("blocks that a file has no room for are left out, the last to begin first",
          "[timeline]") {
  Rings r(50, 1);
  r.sm(0, 0, 1.0);
  for (std::size_t b = 0; b < 50; ++b) {
    r.begin(b, 0, 0, (50 - b) * 1000, (50 - b) * 1000);
    for (std::uint64_t n = 1; n < 60; ++n) r.add(RecordKind::block_wait, 0, n * 10, n * 10 + 5);
  }
  const GpuTimeline t = r.convert(50'000);
  CHECK(t.blocks == 50);
  const auto names = r.named("M", "process_name");
  REQUIRE(!names.empty());
  REQUIRE(names.size() < 50);
  CHECK(names[0]["args"]["name"] == "block (49,0,0) on SM 0");
  CHECK(r.json["left_out"] == std::to_string(50 - names.size()) + " of 50 blocks");
}

TEST_CASE("a step without a recorded build names those that have one", "[timeline]") {
  const auto launch = [](const Arguments&) { return Status::success(); };
  Chapter chapter{"06_x", "", {}};
  chapter.steps.resize(3);
  chapter.steps[0].name = "v1_a";
  chapter.steps[1].name = "v2_b", chapter.steps[1].launch.recorded = launch;
  chapter.steps[2].name = "v3_c", chapter.steps[2].launch.recorded = launch;
  CHECK(!cannot_record(chapter, chapter.steps[1]));
  CHECK(cannot_record(chapter, chapter.steps[0]).value_or("") ==
        "v1_a has no marks (ATTN_SPAN) and cannot be recorded on a GPU: v2_b, v3_c can, all steps "
        "can with --device emulated");
  chapter.steps.resize(1);
  CHECK(cannot_record(chapter, chapter.steps[0]).value_or("").find("no step of this chapter can") !=
        std::string::npos);
}
