// Profiles: the committed results and exports joined and read back, and mismatches.
#include <nlohmann/json.hpp>
#include <string>

#include "report/profile.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;
using nlohmann::json;

const fs::path kResults = recorded("01_naive.forward_n2048.json");
const fs::path kExport = recorded("01_naive.v2_coalesced.ncu.csv");

std::string import_refusal(const fs::path& results, const fs::path& counters,
                           const ImportOptions& options = {}) {
  return refusal_of([&] { return import_profile(results, counters, options); });
}

void check_profile_refusal(const fs::path& path, const std::string& what) {
  const std::string message = refusal_of([&] { return read_profile(path); });
  INFO(message);
  CHECK(message.find(path.string() + ": ") == 0);
  CHECK(message.find(what) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

}  // namespace

TEST_CASE("a profile holds a step's times and its counters") {
  TemporaryFile file;
  const Profile p = read_profile(file.write(import_profile(kResults, kExport, {})));
  const ResultFile results = read_result_file(kResults);
  CHECK(p.run.chapter == "01_naive");
  CHECK(p.run.gpu == "NVIDIA H200");
  CHECK(p.run.compute_capability == "9.0");
  CHECK(p.run.problem.text() == results.problem.text());
  CHECK(p.step().name == "v2_coalesced");
  const StepRow& step = results.steps.at(1);
  CHECK(p.step().time.value().median == step.time.value().median);
  CHECK(p.step().time.value().q1 == step.time.value().q1);
  CHECK(p.step().time.value().q3 == step.time.value().q3);
  CHECK(p.step().predicted_s == step.predicted_s);
  CHECK(p.step().phases.size() == 3);
  const CounterFile counters = read_counter_file(kExport);
  REQUIRE(p.counters.kernels.size() == counters.kernels.size());
  for (std::size_t k = 0; k < counters.kernels.size(); ++k) {
    CHECK(p.counters.kernels[k].name == counters.kernels[k].name);
    CHECK(p.counters.kernels[k].grid == counters.kernels[k].grid);
    CHECK(p.counters.kernels[k].values == counters.kernels[k].values);
  }
  CHECK(p.counters.clocks.empty());
}

TEST_CASE("a counter that nobody collected is null in a profile, and never 0") {
  const json profile = json::parse(import_profile(kResults, kExport, {}));
  const json& values = profile.at("counters").at("kernels").at(0).at("values");
  CHECK(values.at("shared_wavefronts").is_null());
  CHECK(values.at("tensor_bf16_ops") == 0);
  CHECK(values.at("time_s").get<double>() == Approx(0.137685568));
  CHECK(profile.at("counters").at("clocks").is_null());
}

TEST_CASE("the clocks are what the export or the option says") {
  TemporaryFile file;
  const std::string said = "==profile.sh== clocks: none\n" + read_all(kExport);
  const auto clocks = [&](const fs::path& path, const std::string& option) {
    return json::parse(import_profile(kResults, path, {"v2_coalesced", option, false}))
        .at("counters")
        .at("clocks");
  };
  CHECK(clocks(kExport, "base") == "base");
  CHECK(clocks(file.write(said, "x.csv"), "") == "none");
  CHECK(import_refusal(kResults, file.write("==profile.sh== clocks: fast\n" + read_all(kExport)))
            .find("must be none or base") != std::string::npos);
}

TEST_CASE("files that do not belong together are not joined unless forced") {
  TemporaryFile file;
  const auto refused = [&](const fs::path& results, const fs::path& counters, const char* why) {
    const std::string message = import_refusal(results, counters);
    INFO(message);
    CHECK(message.find(why) != std::string::npos);
    CHECK(message.find("--force") != std::string::npos);
    CHECK(message.find('\n') == std::string::npos);
    CHECK(import_refusal(results, counters, {"v2_coalesced", "", true}).empty());
  };
  // Counted at 2048, timed at 4096.
  refused(recorded("01_naive.forward_n4096.json"), kExport, "another problem?");
  refused(fixture("emulated_forward.json"), kExport, "emulated");
  const auto changed = [&](const char* from, const char* to) {
    std::string bytes = read_all(kExport);
    for (std::size_t at; (at = bytes.find(from)) != bytes.npos;)
      bytes.replace(at, std::string(from).size(), to);
    return file.write(bytes, "01_naive.v2_coalesced.ncu.csv");
  };
  refused(kResults, changed("\"9.0\"", "\"8.0\""), "compute capability 8.0, not 9.0");
  refused(kResults, changed("<__nv_bfloat16>", "<__half>"), "kernels for fp16, not bf16");
  refused(kResults,
          file.write("==profile.sh== problem: forward B=1 Hq=2 Hkv=2 seqlen_q=8 seqlen_k=8 d=64 "
                     "bf16 inputs=random seed=1\n" +
                         read_all(kExport),
                     "01_naive.v2_coalesced.ncu.csv"),
          "of the problem 'forward B=1");
  // The seed changes values, not work.
  CHECK(import_refusal(kResults,
                       file.write("==profile.sh== problem: forward B=4 Hq=16 Hkv=16 seqlen_q=2048 "
                                  "seqlen_k=2048 d=128 bf16 inputs=random seed=7\n" +
                                      read_all(kExport),
                                  "01_naive.v2_coalesced.ncu.csv"))
            .empty());
}

TEST_CASE("the step comes from the name of the export or from the option") {
  TemporaryFile file;
  const fs::path nameless = file.write(read_all(kExport), "export.csv");
  CHECK(import_refusal(kResults, nameless).find("--step takes one of v1_global") !=
        std::string::npos);
  CHECK(import_refusal(kResults, nameless, {"v2_coalesced", "", false}).empty());
  CHECK(import_refusal(kResults, kExport, {"v9_nosuch", "", false}).find("has no step v9_nosuch") !=
        std::string::npos);
  CHECK(import_refusal(kResults, recorded("01_naive.b1_global.ncu.csv")).find("b1_global") !=
        std::string::npos);
}

TEST_CASE("a damaged profile is refused in one line that names it") {
  const std::string whole = import_profile(kResults, kExport, {});
  TemporaryFile file;
  check_profile_refusal(file.path(), "cannot be read");
  check_profile_refusal(kResults, "must be 'attn-profile-1'");
  for (std::size_t size = 0; size < whole.size() - 2; size += 1 + size / 20)
    check_profile_refusal(file.write(whole.substr(0, size)), "is not JSON");
  const auto damaged = [&](const char* pointer, const json& value) {
    json document = json::parse(whole);
    document[json::json_pointer(pointer)] = value;
    return file.write(document.dump());
  };
  const std::string kernel = "/counters/kernels/0/";
  check_profile_refusal(damaged("/step", 3), "step is not an object");
  check_profile_refusal(damaged("/counters/kernels", json::array()), "holds no kernel");
  check_profile_refusal(damaged("/counters/clocks", "fast"), "must be one of none, base");
  check_profile_refusal(damaged((kernel + "values/nosuch").c_str(), 1), "is not a counter");
  check_profile_refusal(damaged((kernel + "values/ld_sectors_per_request").c_str(), 1),
                        "is not a counter");
  check_profile_refusal(damaged((kernel + "values/time_s").c_str(), "fast"),
                        "counters.kernels[0].values.time_s is not a number");
  check_profile_refusal(damaged((kernel + "values/time_s").c_str(), -1), "must not be below 0");
}
