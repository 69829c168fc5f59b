/// \file
/// Recorded builds of steps (attn/record.h) on a GPU: the same bits as the plain ones, and events
/// that nest and pair. Linked into every chapter's tests.
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "device/recording.h"
#include "run/gpu_timeline.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

bool same_bits(const HostTensor& a, const HostTensor& b) {
  return a.numbers == b.numbers && a.data.size() == b.data.size() &&
         std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0;
}

double ns(const nlohmann::json& e, const char* what = "ts") {
  return e.at(what).get<double>() * 1000;
}

// Spans of a track do not overlap in part; every flight has one end, which is not before it.
void check_events(const nlohmann::json& events) {
  std::map<std::pair<int, int>, std::vector<std::pair<long, long>>> tracks;
  std::map<int, double> open;
  std::set<std::string> kinds;
  for (const auto& e : events) {
    const std::string phase = e["ph"];
    if (phase == "X") {
      const long begin = std::lround(ns(e));
      tracks[{e["pid"], e["tid"]}].emplace_back(begin, begin + std::lround(ns(e, "dur")));
      kinds.insert(e["cat"].get<std::string>());
    } else if (phase == "b") {
      open[e["id"]] = ns(e);
    } else if (phase == "e") {
      REQUIRE(open.contains(e["id"]));
      CHECK(ns(e) >= open[e["id"]]);
      open.erase(e["id"]);
    }
  }
  CHECK(open.empty());
  CHECK(kinds.contains("mark"));
  CHECK(kinds.contains("wait"));
  for (auto& [track, spans] : tracks) {
    std::ranges::sort(spans, [](const auto& a, const auto& b) {
      return std::pair(a.first, -a.second) < std::pair(b.first, -b.second);
    });
    std::vector<long> around;
    for (const auto& [begin, end] : spans) {
      while (!around.empty() && around.back() <= begin) around.pop_back();
      CHECK((around.empty() || end <= around.back()));
      around.push_back(end);
    }
  }
}

}  // namespace

TEST_CASE("recorded builds give the same bits, and their events nest and pair",
          "[gpu][timeline]") {
  for (const Step& step : chapter().steps) {
    if (!step.launch.recorded) continue;
    const Operation& op = *step.operation;
    for (const int64_t d : {64, 128}) {
      Problem p = problem(op.few_queries > 0 ? 3 : 300, 420, d, DType::bf16);
      p.heads = 4, p.kv_heads = 2, p.causal = d == 64;
      p.finish();
      if (refusal(step, p)) continue;
      INFO(step.name << ", head dim " << d);
      Session session(p, op, Backend::gpu, draw_inputs(p, op.inputs(p)));
      REQUIRE(session.prepare(step).ok());
      REQUIRE(session.launch().ok());
      const HostTensors plain = session.outputs();

      Step recorded = step;
      recorded.launch.gpu = step.launch.recorded;
      Recording recording(Backend::gpu);
      REQUIRE(session.prepare(recorded).ok());
      REQUIRE(session.launch().ok());  // makes the rings
      REQUIRE(recording.clear().ok());
      REQUIRE(recording.sample_clocks().ok());
      REQUIRE(session.launch().ok());
      REQUIRE(recording.sample_clocks().ok());
      RecordedLaunch launch;
      REQUIRE(recording.read(launch).ok());
      CHECK(!session.damage());
      for (const auto& [name, tensor] : session.outputs())
        CHECK(same_bits(tensor, plain.at(name)));

      emulator::Trace trace(1000);
      constexpr std::size_t kBytes = 50'000'000;
      const GpuTimeline t = add_to_trace(launch, "step.cu", kBytes, trace);
      std::size_t blocks = 0;
      for (const RecordedKernel& k : launch.kernels) blocks += k.count();
      CHECK(t.blocks == blocks);
      CHECK(t.lost == "");
      CHECK(t.shares.busy > 0);
      CHECK(!launch.kernels.at(0).members.empty());
      const SmClocks clocks(launch.samples);
      CHECK(clocks.sms() == static_cast<std::size_t>(gpu_info().num_sms));
      CHECK(clocks.mhz > 200);
      CHECK(clocks.mhz < 4000);
      std::string left_out;
      const nlohmann::json json =
          nlohmann::json::parse(trace.json("{\"what\":\"a test\"}", kBytes, left_out));
      CHECK(left_out == "");
      check_events(json["traceEvents"]);
      for (const auto& e : json["traceEvents"]) {  // all names are known
        const std::string name = e["name"];
        CHECK(!name.starts_with("mark "));
        CHECK(!name.starts_with("mbarrier at"));
      }
    }
  }
}
