// ncu's CSV: the committed exports, the other page, other units, and damaged files.
#include <string>
#include <vector>

#include "report/containers.h"
#include "report/counters.h"
#include "report/test_files.h"
#include "tests/catch.h"

namespace {

using namespace attn::report;
using namespace attn::report::test;

const std::string kHeader =
    R"("ID","Kernel Name","Block Size","Grid Size","CC","Section Name","Metric Name","Metric Unit","Metric Value")"
    "\n";

std::string row(const std::string& id, const std::string& kernel, const std::string& metric,
                const std::string& unit, const std::string& value) {
  return "\"" + id + "\",\"" + kernel + "\",\"(32, 1, 1)\",\"(4, 1, 1)\",\"9.0\",\"s\",\"" +
         metric + "\",\"" + unit + "\",\"" + value + "\"\n";
}

void check_refusal(const fs::path& path, const std::string& what) {
  const std::string message = refusal_of([&] { return read_counter_file(path); });
  INFO(message);
  CHECK(message.find(path.string() + ": ") == 0);
  CHECK(message.find(what) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

}  // namespace

TEST_CASE("an export of ncu holds the launches of a step") {
  const CounterFile v1 = read_counter_file(recorded("01_naive.v1_global.ncu.csv"));
  CHECK(v1.file == "01_naive.v1_global.ncu.csv");
  CHECK(v1.step == "v1_global");
  CHECK(v1.compute_capability == "9.0");
  CHECK(element_type(v1.kernels) == "bf16");
  REQUIRE(v1.kernels.size() == 3);
  const KernelCounters& scores = v1.kernels[0];
  CHECK(scores.name == "scores_kernel");
  CHECK(scores.grid == "(64, 256, 64)");
  CHECK(scores.value("time_s").value() == Approx(0.1395456));
  CHECK(scores.value("hbm_read_bytes").value() == 69592576);
  CHECK(scores.value("ld_sectors_per_request").value() == Approx(16.5));
  CHECK(scores.value("st_sectors_per_request").value() == Approx(32));
  CHECK(scores.value("hbm_bytes_per_s").value() == Approx((69592576. + 1051954176.) / 0.1395456));
  CHECK(scores.value("tensor_ops").value() == 0);
  // Not collected, so absent and not 0.
  CHECK_FALSE(scores.value("shared_wavefronts").has_value());
  CHECK_FALSE(scores.value("bank_conflict_pct").has_value());
  CHECK_FALSE(scores.value("stall_barrier").has_value());
  CHECK(value_text(*find_counter("bank_conflict_pct"), scores.value("bank_conflict_pct")) == "n/a");
}

TEST_CASE("every committed export is read") {
  int files = 0;
  for (const std::string& name : document_names(evidence(""), "", ".ncu.csv")) {
    INFO(name);
    const CounterFile file = read_counter_file(evidence(name + ".ncu.csv"));
    CHECK_FALSE(file.step.empty());
    CHECK(step_total(file.kernels).value("time_s").value() > 0);
    ++files;
  }
  CHECK(files > 100);
}

TEST_CASE("a step's total is a sum, a ratio of sums, the largest or a mean by time") {
  const CounterFile v2 = read_counter_file(recorded("01_naive.v2_coalesced.ncu.csv"));
  const KernelCounters total = step_total(v2.kernels);
  double time = 0, sectors = 0, requests = 0, weighted = 0, registers = 0;
  for (const KernelCounters& k : v2.kernels) {
    time += *k.value("time_s");
    sectors += *k.value("ld_sectors");
    requests += *k.value("ld_requests");
    weighted += *k.value("time_s") * *k.value("warps_active_pct");
    registers = std::max(registers, *k.value("registers"));
  }
  CHECK(total.value("time_s").value() == Approx(time));
  CHECK(total.value("ld_sectors_per_request").value() == Approx(sectors / requests));
  CHECK(total.value("warps_active_pct").value() == Approx(weighted / time));
  CHECK(total.value("registers").value() == registers);
}

TEST_CASE("a counter that one launch lacks has no total") {
  TemporaryFile file;
  const CounterFile f = read_counter_file(
      file.write(kHeader + row("0", "a(int)", "gpu__time_duration.sum", "ns", "1,000") +
                 row("0", "a(int)", "dram__bytes_read.sum", "byte", "64") +
                 row("1", "b(int)", "gpu__time_duration.sum", "ns", "500") +
                 row("1", "b(int)", "dram__bytes_read.sum", "byte", "n/a")));
  REQUIRE(f.kernels.size() == 2);
  CHECK(f.kernels[0].value("hbm_read_bytes").value() == 64);
  CHECK_FALSE(f.kernels[1].value("hbm_read_bytes").has_value());
  const KernelCounters total = step_total(f.kernels);
  CHECK(total.value("time_s").value() == Approx(1.5e-6));
  CHECK_FALSE(total.value("hbm_read_bytes").has_value());
}

TEST_CASE("the names and units of other versions mean the same") {
  TemporaryFile file;
  const auto one = [&](const char* metric, const char* unit, const char* value) {
    return read_counter_file(file.write("==PROF== Connected to process 1\n" + kHeader +
                                        row("0", "k", metric, unit, value) + "==PROF== Done\n"))
        .kernels.at(0);
  };
  CHECK(one("Duration", "us", "139,545.6").value("time_s").value() == Approx(0.1395456));
  CHECK(one("gpu__time_duration.sum", "msecond", "1.5").value("time_s").value() == Approx(1.5e-3));
  CHECK(one("dram__sectors_read.sum", "sector", "100").value("hbm_read_bytes").value() == 3200);
  CHECK(one("dram__bytes_write.sum", "Mbyte", "1.05").value("hbm_write_bytes").value() ==
        Approx(1.05e6));
  CHECK(one("smsp__inst_executed.sum", "inst", "7").value("instructions").value() == 7);
  CHECK(one("Achieved Occupancy", "%", "95.3").value("warps_active_pct").value() == Approx(95.3));
  CHECK(one("launch__shared_mem_per_block", "Kbyte/block", "5.12")
            .value("shared_per_block_bytes")
            .value() == Approx(5120));
}

TEST_CASE("the raw page has a column a counter") {
  const CounterFile f = read_counter_file(fixture("raw.ncu.csv"));
  REQUIRE(f.kernels.size() == 1);
  CHECK(f.gpu == "NVIDIA H200");
  CHECK(f.kernels[0].name == "tr");
  CHECK(f.kernels[0].value("time_s").value() == Approx(124.032e-6));
  CHECK(f.kernels[0].value("hbm_read_bytes").value() == 67113984);
  CHECK(f.kernels[0].value("ld_sectors_per_request").value() == Approx(4));
  CHECK(f.kernels[0].value("bank_conflict_pct").value() ==
        Approx(100. * (16338539 + 42649) / 18494363));
  CHECK_FALSE(f.kernels[0].value("instructions").has_value());
}

TEST_CASE("what is not an export of ncu is refused in one line that names it") {
  TemporaryFile file;
  check_refusal(file.path(), "cannot be read");
  check_refusal(file.write(""), "is empty");
  check_refusal(file.write("a,b\n1,2\n"), "not an export of ncu");
  check_refusal(file.write(kHeader), "holds no kernel");
  check_refusal(file.write("\"ID\",\"Metric Name\"\n\"0\",\"x\"\n"), "line 1: has no column");
  check_refusal(file.write(kHeader + row("0", "k", "some__other.sum", "", "1")), "no counter");
  check_refusal(file.write(kHeader + "\"0\",\"k\"\n"), "line 2: 2 fields, not 9");
  check_refusal(file.write(kHeader + row("0", "k", "lts__t_bytes.sum", "byte", "95,30")),
                "line 2: '95,30' is not a number");
  check_refusal(file.write(kHeader + row("0", "k", "lts__t_bytes.sum", "byte", "-4")),
                "not a number");
  check_refusal(file.write(kHeader + row("0", "k", "lts__t_bytes.sum", "byte", "1e999")),
                "not a number");
}

TEST_CASE("an export that was cut is refused or read, and never crashes") {
  const std::string whole = read_all(recorded("01_naive.v2_coalesced.ncu.csv"));
  TemporaryFile file;
  int refused = 0;
  for (std::size_t size = 0; size < whole.size(); size += 1 + size / 40) {
    const std::string message =
        refusal_of([&] { return read_counter_file(file.write(whole.substr(0, size))); });
    CHECK(message.find('\n') == std::string::npos);
    refused += !message.empty();
  }
  CHECK(refused > 50);
}

TEST_CASE("every counter has a meaning in one line, and a name of its own") {
  std::vector<std::string> seen;
  for (const Counter& c : all_counters()) {
    INFO(c.key);
    CHECK_FALSE(c.meaning.empty());
    CHECK(c.meaning.find('\n') == c.meaning.npos);
    CHECK(std::find(seen.begin(), seen.end(), c.key) == seen.end());
    seen.emplace_back(c.key);
    CHECK(find_counter(c.key) == &c);
  }
}

TEST_CASE("the element type is what the template arguments agree on") {
  const auto type = [](std::vector<std::string> signatures) {
    std::vector<KernelCounters> kernels;
    for (std::string& s : signatures) kernels.push_back({"", s, "", "", {}});
    return element_type(kernels);
  };
  CHECK(type({"void a<__nv_bfloat16>(const T1 *)", "b(const float *)"}) == "bf16");
  CHECK(type({"void a<128, __half>(const T2 *)"}) == "fp16");
  CHECK(type({"void a<float>(const T1 *)"}) == "fp32");
  CHECK(type({"void a<float>(int)", "void b<__half>(int)"}).empty());
  CHECK(type({"nvjet_sm90_tss_256x128"}).empty());
}
