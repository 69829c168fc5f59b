// Comparisons: verdicts from quartiles, the committed exports, changed counters, refusals.
#include <nlohmann/json.hpp>
#include <string>

#include "report/diff.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;
using nlohmann::json;

const fs::path kResults = recorded("01_naive.forward_n2048.json");
const fs::path kV1 = recorded("01_naive.v1_global.ncu.csv");
const fs::path kV2 = recorded("01_naive.v2_coalesced.ncu.csv");

std::vector<Diff> diff(const fs::path& a, const fs::path& b, bool force = false,
                       const std::string& step_a = "", const std::string& step_b = "") {
  return compare_files(read_steps(a, step_a), read_steps(b, step_b), force);
}

// Refused without --force for the reason that the message names, and accepted with it.
void check_forced(const fs::path& a, const fs::path& b, const std::string& why) {
  const std::string message = refusal_of([&] { return diff(a, b); });
  INFO(message);
  CHECK(message.find(why) != std::string::npos);
  CHECK(message.find("--force") != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
  CHECK(text(diff(a, b, true).at(0)).find("note: FORCED: " + why) != std::string::npos);
}

KernelCounters counters(std::map<std::string, double> values) {
  return {"k", "", "", "", std::move(values)};
}

}  // namespace

TEST_CASE("a verdict comes from the quartiles") {
  const Time a{1, 0.98, 1.05, 20};
  CHECK(judge(a, {0.9, 0.88, 0.97, 20}) == Judgement::fast);
  CHECK(judge(a, {1.1, 1.06, 1.2, 20}) == Judgement::slow);
  CHECK(judge(a, {1.005, 0.5, 2, 20}) == Judgement::same);
  CHECK(judge(a, {0.9, 0.85, 0.99, 20}) == Judgement::ambiguous);
  CHECK(judge(a, {1.1, 1.04, 1.2, 20}) == Judgement::ambiguous);
  // Quartile ranges apart, but within 1 %: the same.
  CHECK(judge({1, 1, 1.001, 20}, {1.009, 1.008, 1.01, 20}) == Judgement::same);
  CHECK(judge({1, 1, 1.001, 20}, {1.015, 1.014, 1.016, 20}) == Judgement::slow);
  // With a single time on either side, less than 3 % is ambiguous.
  CHECK(judge({1, 1, 1, 1}, {1.02, 1.02, 1.02, 1}) == Judgement::ambiguous);
  CHECK(judge({1, 1, 1, 20}, {0.98, 0.98, 0.98, 1}) == Judgement::ambiguous);
  CHECK(judge({1, 1, 1, 1}, {1.04, 1.04, 1.04, 1}) == Judgement::slow);
  CHECK(judge({1, 1, 1, 1}, {0.96, 0.96, 0.96, 1}) == Judgement::fast);
}

TEST_CASE("between v1_global and v2_coalesced, sectors a load are what moved") {
  const Diff d = diff(kV1, kV2).at(0);
  CHECK(d.judgement == Judgement::fast);
  CHECK(d.time_a.median == Approx(0.285582432));
  CHECK(d.time_b.median == Approx(0.15862064));
  REQUIRE(!d.total.empty());
  CHECK(d.total[0].counter->key == "ld_sectors_per_request");
  CHECK(d.total[0].a.value() == Approx(71672266752. / 4320133120.));
  CHECK(d.total[0].b.value() == Approx(39460012032. / 4320133120.));
  CHECK(headline(d).find("what moved most: load sectors/request, 16.59 -> 9.13 (x 0.551)") == 0);
  // Also in the kernel that took the time.
  REQUIRE(d.kernels.size() == 3);
  const KernelPair& output = d.kernels[2];
  CHECK(output.name == "output_kernel");
  CHECK(output.counters[0].counter->key == "ld_sectors_per_request");
  CHECK(output.counters[0].factor == Approx(1.5 / 16.5));
  // Causes before counts before rates.
  for (std::size_t i = 1; i < d.total.size(); ++i)
    CHECK(d.total[i - 1].counter->kind <= d.total[i].counter->kind);
  const std::string page = text(d);
  CHECK(page.find("note: problem: not stated by either side") != std::string::npos);
  CHECK(page.find("output_kernel: 137.657 ms -> 12.559 ms") < page.find("softmax_kernel: "));
}

TEST_CASE("a counter that a side lacks is n/a, and moves nothing") {
  const auto ranked =
      rank_counters(counters({{"time_s", 1}, {"hbm_read_bytes", 8}}), counters({{"l2_bytes", 4}}));
  REQUIRE(ranked.size() == 2);
  for (const Moved& m : ranked) {
    CHECK(m.rank == 0);
    CHECK(moved(m));
    CHECK(factor_text(m) == "n/a");
    CHECK((value_text(*m.counter, m.a) == "n/a") != (value_text(*m.counter, m.b) == "n/a"));
    CHECK(better_text(m).empty());
  }
}

TEST_CASE("wider accesses are neither better nor worse, more sectors are worse") {
  const auto verdict = [&](const char* key, std::map<std::string, double> a,
                           std::map<std::string, double> b) {
    for (const Moved& m : rank_counters(counters(std::move(a)), counters(std::move(b))))
      if (m.counter->key == key) return better_text(m);
    return std::string("not there");
  };
  for (const std::string op : {"ld", "st"}) {
    const auto of = [&](double sectors, double requests) {
      return std::map<std::string, double>{{op + "_sectors", sectors},
                                           {op + "_requests", requests}};
    };
    const std::string key = op + "_sectors_per_request";
    CHECK(verdict(key.c_str(), of(64, 16), of(64, 4)) == "wider");
    CHECK(verdict(key.c_str(), of(64, 16), of(60, 4)) == "wider");  // and fewer sectors
    CHECK(verdict(key.c_str(), of(64, 4), of(64, 16)) == "narrower");
    CHECK(verdict(key.c_str(), of(64, 4), of(128, 4)) == "worse");  // scattered
    CHECK(verdict(key.c_str(), of(64, 4), of(256, 8)) == "worse");
    CHECK(verdict(key.c_str(), of(128, 4), of(64, 4)) == "better");
    CHECK(verdict((op + "_requests").c_str(), of(64, 16), of(64, 4)) == "better");
    CHECK(verdict((op + "_sectors").c_str(), of(64, 16), of(128, 16)) == "worse");
  }
}

TEST_CASE("a headline is a counter that moved by 10 %") {
  const auto of = [](std::map<std::string, double> a, std::map<std::string, double> b) {
    Diff d;
    d.total = rank_counters(counters(std::move(a)), counters(std::move(b)));
    return headline(d);
  };
  CHECK(of({{"stall_barrier", 0.46}, {"instructions", 100}},
           {{"stall_barrier", 0.43}, {"instructions", 50}})
            .find("what moved most: instructions, 100 inst -> 50 inst") == 0);
  CHECK(of({{"stall_barrier", 0.46}}, {{"stall_barrier", 0.43}}).empty());
}

TEST_CASE("from 0 and to 0 are said as such") {
  const auto a = counters({{"tensor_bf16_ops", 0}, {"shared_ld_conflicts", 9}, {"l2_bytes", 0}});
  const auto b = counters({{"tensor_bf16_ops", 7}, {"shared_ld_conflicts", 0}, {"l2_bytes", 0}});
  for (const Moved& m : rank_counters(a, b)) {
    if (m.counter->key == "tensor_bf16_ops") CHECK(factor_text(m) == "from 0");
    if (m.counter->key == "shared_ld_conflicts") CHECK(factor_text(m) == "to 0");
    if (m.counter->key == "l2_bytes") CHECK_FALSE(moved(m));
  }
}

TEST_CASE("results of one chapter: two steps by name, all steps with those of another run") {
  const Diff d = diff(kResults, kResults, false, "v1_global", "v2_coalesced").at(0);
  CHECK(d.judgement == Judgement::fast);
  CHECK(d.total.empty());
  CHECK(d.time_a.count == 20);
  CHECK(text(d).find("counters: n/a in A and B") != std::string::npos);
  CHECK(diff(kResults, kResults, false, "v2_coalesced", "v1_global").at(0).judgement ==
        Judgement::slow);
  const auto all = diff(kResults, kResults);
  REQUIRE(all.size() == 5);
  for (const Diff& same : all) CHECK(same.judgement == Judgement::same);
  // One step on one side, several on the other: the one with the same name.
  CHECK(diff(kV1, kResults).at(0).b.step == "v1_global");
  CHECK(refusal_of([&] { return diff(kResults, kResults, false, "v9", ""); }).find("no step v9") !=
        std::string::npos);
  CHECK(refusal_of([&] { return diff(kV1, kV2, false, "v3", ""); }).find("no step v3") !=
        std::string::npos);
  json one_step = json::parse(read_all(recorded("01_naive.backward_b1_n2048.json")));
  one_step["steps"].erase(0);
  TemporaryFile file;
  const fs::path path = file.write(one_step.dump());
  CHECK(refusal_of([&] { return diff(kV1, path); }).find("--step-a") == std::string::npos);
}

TEST_CASE("profiles bring quartiles and counters together") {
  TemporaryFile a, b;
  const fs::path v1 = a.write(import_profile(kResults, kV1, {}), "v1.json");
  const fs::path v2 = b.write(import_profile(kResults, kV2, {}), "v2.json");
  const Diff d = diff(v1, v2).at(0);
  CHECK(d.judgement == Judgement::fast);
  CHECK(d.time_a.count == 20);
  CHECK(d.total.at(0).counter->key == "ld_sectors_per_request");
  CHECK(text(d).find("problem: forward B=4 Hq=16 Hkv=16 seqlen_q=2048") != std::string::npos);
  // Times of the same kind are compared: an export has only ncu's time.
  CHECK(diff(v1, kV2).at(0).time_source.find("ncu") != std::string::npos);
}

TEST_CASE("what cannot be compared is refused unless forced") {
  TemporaryFile file;
  json results = json::parse(read_all(kResults));
  const auto with = [&](const char* pointer, const json& value) {
    json changed = results;
    changed[json::json_pointer(pointer)] = value;
    return file.write(changed.dump());
  };
  check_forced(kResults, with("/device/name", "NVIDIA H100"), "another GPU");
  check_forced(kResults, with("/problem/dtype", "fp16"), "another element type");
  check_forced(kResults, with("/problem/seqlen_k", 4096), "another problem");
  CHECK(diff(kResults, with("/problem/seed", 5)).size() == 5);
  std::string export_80 = read_all(kV2);
  for (std::size_t at; (at = export_80.find("\"9.0\"")) != export_80.npos;)
    export_80.replace(at, 5, "\"8.0\"");
  check_forced(kV1, file.write(export_80, "01_naive.v2_coalesced.ncu.csv"),
               "another compute capability");
  TemporaryFile other;
  const auto clocks = [&](TemporaryFile& f, const fs::path& path, const std::string& how) {
    return f.write("==profile.sh== clocks: " + how + "\n" + read_all(path),
                   path.filename().string());
  };
  const fs::path free = clocks(file, kV1, "none");
  check_forced(free, clocks(other, kV2, "base"), "another clock control");
  check_forced(kResults, clocks(other, kV2, "base"), "another clock control");
  CHECK(diff(free, kV2).at(0).notes.back() == "clock control: not stated by B");
}

TEST_CASE("steps that nobody timed are refused") {
  const fs::path emulated = fixture("emulated_forward.json");
  const auto refused = [&](const std::string& step) {
    return refusal_of([&] { return diff(emulated, emulated, false, step, step); });
  };
  CHECK(refused("v2_coalesced").find("--time") != std::string::npos);
  CHECK(refused("").find("no step that both timed") != std::string::npos);
}

TEST_CASE("kernels are matched by name, or by position where the numbers agree") {
  const Diff same_number =
      diff(recorded("01_naive.v4_tensor_core.ncu.csv"), recorded("01_naive.v5_cublas.ncu.csv"))
          .at(0);
  REQUIRE(same_number.kernels.size() == 3);
  CHECK(same_number.kernels[0].name == "scores_kernel / cuBLAS");
  CHECK(same_number.kernels[1].name == "softmax_kernel");
  CHECK(same_number.kernels[2].name == "output_kernel / cuBLAS");
  const Diff other_number =
      diff(recorded("01_naive.v1_global.ncu.csv"), recorded("01_naive.b1_global.ncu.csv")).at(0);
  CHECK(other_number.kernels.empty());
  CHECK(other_number.unmatched.size() == 8);
}
