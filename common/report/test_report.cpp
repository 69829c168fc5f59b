// The fixtures were written by chapter 01's program:
//   emulated_forward   --step v2_coalesced,v4_tensor_core --seqlen 33 --head-dim 12
//   emulated_backward  --step b2_cublas --seqlen 33 --head-dim 16 --causal --window 5,-1 --kv-heads
//   1
//                      --dtype fp16 --inputs needle --seed 18446744073709551615
//   emulated_fail      the same, with a checker whose bound was too tight
//   gpu_forward        --time --step v2_coalesced,v4_tensor_core --heads 4 --seqlen 512 --head-dim
//   64
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attn/error.h"
#include "report/result_file.h"
#include "report/summary.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

namespace fs = std::filesystem;
using attn::report::read_result_file;
using attn::report::ResultFile;
using attn::report::summary_text;
using namespace attn::report::test;
using nlohmann::json;

// The message with which a file is refused, or "" if it is read.
std::string refusal(const fs::path& path) {
  try {
    (void)read_result_file(path);
    return "";
  } catch (const attn::InputError& e) {
    return e.what();
  }
}

void check_refusal(const fs::path& path, const std::string& what) {
  const std::string message = refusal(path);
  INFO(message);
  CHECK(message.find(path.string() + ": ") == 0);
  CHECK(message.find(what) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

// Calls `visit` with `value` and every value inside it, and their paths.
template <class Visit>
void visit_all(json& value, const std::string& where, const Visit& visit) {
  if (value.is_object())
    for (auto& [key, inner] : value.items()) visit_all(inner, where + "/" + key, visit);
  else if (value.is_array())
    for (std::size_t i = 0; i < value.size(); ++i)
      visit_all(value[i], where + "/" + std::to_string(i), visit);
  visit(value, where);
}

}  // namespace

TEST_CASE("a result file says what the program found") {
  const ResultFile forward = read_result_file(fixture("emulated_forward.json"));
  CHECK(forward.chapter == "01_naive");
  CHECK(forward.operation == "forward");
  CHECK(forward.device.find("emulated") == 0);
  CHECK(forward.problem.text() ==
        "B=1 Hq=2 Hkv=2 seqlen_q=33 seqlen_k=33 d=12 bf16 inputs=random seed=1");
  REQUIRE(forward.steps.size() == 2);
  // Refused steps come first, then the steps that ran.
  CHECK(forward.steps[0].name == "v4_tensor_core");
  CHECK(forward.steps[0].outcome == "unsupported");
  CHECK(forward.steps[0].reason.find("--head-dim 12") == 0);
  CHECK(forward.steps[1].name == "v2_coalesced");
  CHECK(forward.steps[1].outcome == "pass");
  CHECK(forward.steps[1].reason.empty());
  CHECK_FALSE(forward.steps[1].median_s.has_value());
  CHECK_FALSE(forward.steps[1].share_of_roof.has_value());

  const ResultFile backward = read_result_file(fixture("emulated_backward.json"));
  CHECK(backward.problem.text() ==
        "B=1 Hq=2 Hkv=1 seqlen_q=33 seqlen_k=33 d=16 fp16 causal window=5,-1 inputs=needle "
        "seed=18446744073709551615");
  CHECK(backward.problem.softmax_scale == 0.25);
  REQUIRE(backward.steps.size() == 1);
  CHECK(backward.steps[0].outcome == "pass");

  const ResultFile fail = read_result_file(fixture("emulated_fail.json"));
  REQUIRE(fail.steps.size() == 1);
  CHECK(fail.steps[0].outcome == "fail");
  CHECK(fail.steps[0].reason.find("dq (b 0, h 0, row 13, column 12)") == 0);
}

TEST_CASE("what only some problems have is read") {
  json document = json::parse(read_all(fixture("emulated_forward.json")));
  document["problem"]["softcap"] = 15;
  document["problem"]["alibi"] = true;
  document["problem"]["dropout"] = 0.25;
  TemporaryFile file;
  CHECK(read_result_file(file.write(document.dump())).problem.text() ==
        "B=1 Hq=2 Hkv=2 seqlen_q=33 seqlen_k=33 d=12 bf16 softcap=15 alibi dropout=0.25 "
        "inputs=random seed=1");
  document["problem"].update({{"batch", 3}, {"varlen_q", {33, 0, 5}}, {"varlen_k", {33, 7, 0}}});
  CHECK(read_result_file(file.write(document.dump())).problem.text() ==
        "B=3 Hq=2 Hkv=2 varlen=33,0,5 varlen_k=33,7,0 d=12 bf16 softcap=15 alibi dropout=0.25 "
        "inputs=random seed=1");
  document["problem"].erase("varlen_q");
  document["problem"].update({{"batch", 0}, {"seqlen_q", 0}, {"seqlen_k", 0}});  // an empty result
  CHECK(read_result_file(file.write(document.dump())).problem.batch == 0);
  document["problem"].update({{"batch", 3}, {"varlen_q", {33, 0, 5}}});
  for (const json& wrong : {json{33, 0}, json{33, -1, 5}, json{33, "0", 5}, json(33)}) {
    document["problem"]["varlen_k"] = wrong;
    check_refusal(file.write(document.dump()), "problem.varlen_k");
  }
  document["problem"]["softcap"] = "x";
  document["problem"]["varlen_k"] = {33, 7, 0};
  check_refusal(file.write(document.dump()), "problem.softcap");
}

TEST_CASE("a result file of a GPU holds times and shares of the roof") {
  const ResultFile gpu = read_result_file(fixture("gpu_forward.json"));
  CHECK(gpu.device == "NVIDIA H200 (sm_90)");
  REQUIRE(gpu.steps.size() == 2);
  for (const auto& step : gpu.steps) {
    INFO(step.name);
    REQUIRE(step.median_s.has_value());
    REQUIRE(step.share_of_roof.has_value());
    CHECK(*step.median_s > 1e-6);
    CHECK(*step.median_s < 1e-3);
    CHECK(*step.share_of_roof > 0);
    CHECK(*step.share_of_roof < 1);
    CHECK_FALSE(step.binding.empty());
  }
}

TEST_CASE("a summary has times, or predictions and the GPU that they are for") {
  const ResultFile emulated = read_result_file(fixture("emulated_backward.json"));
  const std::string predicted = summary_text({emulated});
  INFO(predicted);
  CHECK(predicted.find("\nat least: not measured, but predicted for NVIDIA H200 SXM; "
                       "--gpu NAME is for another: h200, ") != std::string::npos);
  CHECK(predicted.find("% of roof") == std::string::npos);
  const std::string& binding = emulated.steps[0].binding;
  const std::string time = fmt::format("{:.2f} ns", emulated.steps[0].predicted_s * 1e9);
  CHECK(predicted.ends_with(fmt::format("pass     at least {}  {}\n", time, binding)));

  // The common properties of its steps appear once, above them.
  CHECK(predicted.find(fmt::format("\n{} backward: B=", emulated.chapter)) != std::string::npos);
  CHECK(predicted.find("B=") == predicted.rfind("B="));

  // Together with a timed run: each has its own problem and device.
  const ResultFile timed = read_result_file(fixture("gpu_forward.json"));
  const std::string both = summary_text({emulated, timed});
  INFO(both);
  CHECK(both.find("at least " + time) != std::string::npos);
  CHECK(both.find(fmt::format("{:.1f} % {}", 100 * *timed.steps[0].share_of_roof,
                              timed.steps[0].binding)) != std::string::npos);
  CHECK(both.find("predicted for NVIDIA H200 SXM") != std::string::npos);
  CHECK(both.find("seed=1; device: NVIDIA H200 (sm_90)\n") != std::string::npos);

  CHECK(summary_text({timed}).find("at least") == std::string::npos);
  // A step that did not run has no predicted time.
  ResultFile refused = emulated;
  refused.steps[0].outcome = "unsupported";
  CHECK(summary_text({refused}).find("at least") == std::string::npos);
}

TEST_CASE("what is no result file is refused in one line that names it") {
  TemporaryFile file;
  check_refusal(file.path(), "cannot be read");  // file missing
  check_refusal(fs::temp_directory_path(), "cannot be read");
  check_refusal(file.write(""), "is not JSON");
  check_refusal(file.write("hello"), "is not JSON");
  check_refusal(file.write("[]"), "is not an object");
  check_refusal(file.write("{}"), "schema is missing");
  check_refusal(file.write(R"({"schema": 1})"), "schema is not text");
  check_refusal(file.write(R"({"schema": "attn-results-2"})"), "attn-results-1");
  check_refusal(file.write(std::string(100000, '[')), "is not JSON");
}

TEST_CASE("a file that was cut is refused wherever it was cut") {
  const std::string whole = read_all(fixture("emulated_backward.json"));
  TemporaryFile file;
  const std::size_t end = whole.find_last_of('}');
  for (std::size_t size = 0; size <= end; size += 1 + size / 50)
    check_refusal(file.write(whole.substr(0, size)), "is not JSON");
}

TEST_CASE("a value of another kind is refused or read, and never crashes") {
  json document = json::parse(read_all(fixture("emulated_forward.json")));
  TemporaryFile file;
  const std::vector<json> others = {nullptr, true, -7, 0, 1.5, 1e300, UINT64_MAX, "x",
                                    json::array(), json::object(), json::array({1, 2, 3})};
  int refused = 0;
  visit_all(document, "", [&](json& value, const std::string& where) {
    const json original = value;
    for (const json& other : others) {
      value = other;
      const std::string message = refusal(file.write(document.dump()));
      INFO(where << " = " << other.dump() << ": " << message);
      CHECK((message.empty() || message.find(file.path().string() + ": ") == 0));
      CHECK(message.find('\n') == std::string::npos);
      refused += !message.empty();
    }
    value = original;
  });
  CHECK(refused > 100);
}

TEST_CASE("a field that is missing is named") {
  const json document = json::parse(read_all(fixture("emulated_forward.json")));
  TemporaryFile file;
  for (const char* key : {"schema", "chapter", "device", "operation", "problem", "steps"}) {
    json damaged = document;
    damaged.erase(key);
    check_refusal(file.write(damaged.dump()), std::string(key) + " is missing");
  }
  for (const char* key :
       {"name", "operation", "outcome", "reason", "time", "share_of_roof", "binding"}) {
    json damaged = document;
    damaged["steps"][1].erase(key);
    check_refusal(file.write(damaged.dump()), std::string("steps[1].") + key + " is missing");
  }
}

TEST_CASE("text from a file cannot steer a terminal") {
  json document = json::parse(read_all(fixture("emulated_forward.json")));
  document["chapter"] = "a\x1b[2Jb\nc";
  TemporaryFile file;
  CHECK(read_result_file(file.write(document.dump())).chapter == "a [2Jb c");
}

TEST_CASE("the memory that a step needs is optional, and never below 0") {
  json document = json::parse(read_all(fixture("emulated_forward.json")));
  TemporaryFile file;
  CHECK_FALSE(read_result_file(file.write(document.dump())).steps[1].memory_bytes.has_value());
  document["steps"][1]["memory_bytes"] = nullptr;
  CHECK_FALSE(read_result_file(file.write(document.dump())).steps[1].memory_bytes.has_value());
  document["steps"][1]["memory_bytes"] = 4096.0;
  CHECK(read_result_file(file.write(document.dump())).steps[1].memory_bytes == 4096.0);
  document["steps"][1]["memory_bytes"] = -1;
  check_refusal(file.write(document.dump()), "memory_bytes must not be below 0");
}

TEST_CASE("a problem with what only some operations have is told as the program told it") {
  json document = json::parse(read_all(fixture("emulated_forward.json")));
  document["problem"].update(
      {{"seqused_k", {5}}, {"mask", "blocks:64x64:0.3"}, {"own", {{"page_size", {16}}}}});
  TemporaryFile file;
  const std::string text = problem_text(read_result_file(file.write(document.dump())));
  CHECK(text.find(" seqused=5 ") != text.npos);
  CHECK(text.find(" mask=blocks:64x64:0.3 page_size=16 inputs=") != text.npos);
  document["problem"]["own"]["page_size"] = {"many"};
  check_refusal(file.write(document.dump()), "problem.own.page_size is not a list of numbers");
  document["problem"]["own"] = json::object();
  document["problem"]["seqused_k"] = {5, 6};
  check_refusal(file.write(document.dump()),
                "problem.seqused_k has 2 lengths, must have 1, one per sequence");
}

TEST_CASE("a problem on rows is told in rows and columns") {
  json document = json::parse(read_all(fixture("emulated_forward.json")));
  document["operation"] = "softmax", document["problem"]["matrix"] = true;
  TemporaryFile file;
  CHECK(problem_text(read_result_file(file.write(document.dump()))) ==
        "rows=66 cols=33 bf16 inputs=random seed=1");
}
