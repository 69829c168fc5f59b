// Tables from small reports: the output of a chapter program or peers.py, reduced to the fields
// that the table reads.
#include "report/test_reports.h"

using namespace attn::report::test;
using attn::report::fill_tables;

TEST_CASE("a table of steps on rows: rows x columns, GB/s of the model, share of the copy") {
  Reports reports;
  reports.write("s", run("02_online_softmax", "softmax", rows_problem("bf16", 4096, 65536),
                         {step("v4_one_read", 0, 2e9, 1e-3), step("v5_split_row", 0, 3e9, 0)}));
  const std::string text = reports.table("steps s");
  has(text, "NVIDIA H200, softmax: 4096 rows x 65536 columns bf16, medians of 20 launches; ");
  has(text, " GB/s: modelled bytes over time.\n");
  has_line(text, "| step | ms (quartiles) | GB/s | % of copy | modelled GB |");
  has_line(text, "| `v4_one_read` | 1.000 (1.000 .. 1.000) | 2000 | 50.0 | 2.00 |");
  CHECK(text.find("v5_split_row") == std::string::npos);  // not timed
  json topk = rows_problem("fp32", 8, 100);
  topk["top_k"] = 8;
  reports.write(
      "k", run("02_online_softmax", "softmax_topk", topk, {step("v6_softmax_topk", 0, 2e9, 1e-3)}));
  has(reports.table("steps k"), "softmax_topk: 8 rows x 100 columns fp32 k=8, ");
}

TEST_CASE("decode is rated by its useful bytes, against the roof of reading") {
  Reports reports;
  json p = problem("bf16", 8192);
  p["seqlen_q"] = 1;
  json s = step("v2_split_kv", 4e9, 9e9, 1e-3);  // 8 of 9 GB are useful, read in 0.5 ms at best
  s.update({{"compulsory_bytes", 8e9}, {"useful_read_s", 5e-4}, {"useful_bytes_per_s", 8e12}});
  reports.write("d", run("05_flash_decoding", "decode", p, {s}));
  std::string text = reports.table("steps d");
  has_line(text, "| step | ms (quartiles) | GB/s of use | % of read | modelled GB |");
  has_line(text, "| `v2_split_kv` | 1.000 (1.000 .. 1.000) | 8000 | 50.0 | 9.00 |");
  text = reports.table("lengths d");
  has_line(text, "| GB/s of use (% of read) | N=8192 |");
  has_line(text, "| `v2_split_kv` | 8000 (50.0) |");
  p["batch"] = 3, p["seqused_k"] = {5, 0, 8000};
  reports.write("u", run("05_flash_decoding", "decode", p, {s}));
  has(reports.table("steps u"),
      "decode: B=3 Hq=16 Hkv=16 seqlen_q=1 keys in use 0 to 8000, 8005 together, d=128 bf16, ");
  has_line(reports.table("problems u"), "| problem | step | ms (quartiles) | GB/s of use |");
}

TEST_CASE("a share above 100 % says why") {
  Reports reports;
  json fast = step("v2", 1e12, 2e9, 1e-3), slow = step("v1", 1e12, 2e9, 2e-3);
  reports.write("s", run("04_flash_v2", "forward", problem("bf16", 2048), {slow, fast}));
  CHECK(reports.table("steps s").find("Above") == std::string::npos);
  fast["share_of_roof"] = 1.04, fast["binding"] = "tensor";
  reports.write("s", run("04_flash_v2", "forward", problem("bf16", 2048), {slow, fast}));
  has(reports.table("steps s"), "\nAbove 100 % of the tensor roof: the roof is the rate of a ");
  fast["binding"] = "HBM";
  reports.write("s", run("04_flash_v2", "forward", problem("bf16", 2048), {slow, fast}));
  has(reports.table("steps s"), "\nAbove 100 % of the HBM roof: some of the bytes that ");
}

TEST_CASE("a mean names all lengths that it is of, and those that are missing") {
  Reports reports;
  json p = {{"schema", "attn-peers-1"},
            {"gpu", "NVIDIA H200"},
            {"torch", "2.11"},
            {"cudnn", 91900},
            {"packages", {{"flash_attn_interface", "3.0"}}}};
  p["problems"] = json::array();
  const auto add = [&](int64_t n, double flash, double cudnn) {
    json ratios = json::array();
    for (const auto& [peer, ratio] : {std::pair{"flash", flash}, {"cudnn", cudnn}})
      if (ratio > 0)
        ratios.push_back(
            {{"step", "v7"}, {"peer", peer}, {"median", ratio}, {"q1", ratio}, {"q3", ratio}});
    p["problems"].push_back({{"problem", problem("bf16", n)},
                             {"operation", "forward"},
                             {"runs", json::array()},
                             {"peers", json::array()},
                             {"ratios", ratios}});
  };
  add(512, 2, 0.5), add(1024, 8, 0);
  reports.write("p", p);
  const std::string text = reports.table("means p step=v7");
  has(text, "geometric mean over the lengths named (least and most)");
  has(text, "cuDNN 91900, flash_attn_interface 3.0, `v7`; ");
  has_line(
      text,
      "| 128 | forward | 512, 1024 | 4.00 (2.00 .. 8.00) | 0.50 (0.50 .. 0.50) of 1 lengths |");
  CHECK(reports.table("means p step=v7 peers=flash").find("cudnn |") == std::string::npos);
  has(reports.refusal("means p"), "needs step=NAME");
  has(reports.refusal("means p step=v9"), "has no such ratio");
  // Steps side by side: a step has the lengths whose problems name it.
  p["problems"][1]["ratios"].push_back(
      {{"step", "v8"}, {"peer", "flash"}, {"median", 9}, {"q1", 9}, {"q3", 9}});
  reports.write("p", p);
  const std::string both = reports.table("means p step=v7,v8 peers=flash");
  has_line(both, "| 128 | forward | `v7` | 512, 1024 | 4.00 (2.00 .. 8.00) |");
  has_line(both, "| 128 | forward | `v8` | 1024 | 9.00 (9.00 .. 9.00) |");
}

TEST_CASE("a headline has mean, least, most and points, and names the strongest peer") {
  Reports reports;
  json p = {
      {"schema", "attn-peers-1"}, {"gpu", "NVIDIA H200"}, {"torch", "2.11"}, {"cudnn", 91900}};
  p["problems"] = json::array();
  const auto add = [&](std::map<std::string, double> by_peer) {
    json ratios = json::array();
    for (const auto& [peer, ratio] : by_peer)
      ratios.push_back({{"step", "v7"}, {"peer", peer}, {"median", ratio}});
    p["problems"].push_back({{"problem", problem("bf16", 512)}, {"ratios", ratios}});
  };
  add({{"cudnn", 2}, {"cudnn graph", 0.5}, {"flash", 3}});
  add({{"cudnn", 0.5}, {"cudnn graph", 0.5}});
  reports.write("peers.09_x", p), reports.write("peers.09_x.fp8", p);
  json o = {{"schema", "attn-others-1"},
            {"measured_by", "not by this repository's scripts"},
            {"date", "2026-11-26"},
            {"gpu", "NVIDIA H100"},
            {"commit", "abc"},
            {"method", "m"},
            {"problems", "n: tokens"},
            {"libraries", json::object()},
            {"peers", {{"fa3", "FlashAttention-3"}, {"fa3_kernel", "its kernel alone"}}}};
  const auto row = [](const char* name, double fa3, double kernel) {
    return json{{"name", name},
                {"us", {{"fa3", 10 * fa3}, {"fa3_kernel", 10 * kernel}, {"v7", 10}}},
                {"ratio", {{"v7", {{"fa3", fa3}, {"fa3_kernel", kernel}}}}}};
  };
  o["rows"] = {row("fwd d64 n512", 1.21, 0.9), row("fwd d64 n2048", 1.0, 0.4)};
  reports.write("others.09_x", o);
  const std::string text = reports.table(
      "headline Decode,_long=peers.09_x:v7:cudnn,cudnn_graph,flash "
      "FP8=peers.09_x.fp8:v7:cudnn,cudnn_graph,flash "
      "Forward=others.09_x:v7:fa3,fa3_kernel");
  has_line(text,
           "| what | step | compared with | times as fast | least to most | problems | card | "
           "measured by |");
  has_line(text,
           "| Decode, long | `v7` | cuDNN, called | 1.00 | 0.50 to 2.00 | 2 | NVIDIA H200 | "
           "`peers.py` |");
  has_line(text,
           "| Decode, long | `v7` | cuDNN, as a graph | 0.50 | 0.50 to 0.50 | 2 | "
           "NVIDIA H200 | `peers.py` |");
  has_line(text,
           "| Decode, long | `v7` | FlashAttention-2 (PyTorch), called | 3.00 | 3.00 to 3.00 | "
           "1 of 2 | NVIDIA H200 | `peers.py` |");
  has_line(text,
           "| FP8 | `v7` | FlashAttention-2 (PyTorch), called | 3.00 | 3.00 to 3.00 | 1 of 2 | "
           "NVIDIA H200 | `peers_formats.py` |");
  has_line(text,
           "| Forward | `v7` | FlashAttention-3 | 1.10 | 1.00 to 1.21 | 2 | NVIDIA H100 | "
           "others, 2026-11-26 |");
  for (json& one : p["problems"]) one["problem"]["dtype"] = "e4m3";
  reports.write("peers.09_x8", p);
  has(reports.table("headline FP8=peers.09_x8:v7:cudnn,cudnn_graph"), "| cuDNN in bf16 | 1.00 |");
  has(reports.refusal("headline Decode=peers.09_x:v7:cudnn,flash"),
      "leaves out the strongest peer of v7: cudnn graph");
  has(reports.refusal("headline Decode=peers.09_x:v8:cudnn"), "has no ratio of v8");
  has(reports.refusal("headline Decode=peers.09_x:v7:fa3"), "v7 has no peer fa3");
  has(reports.refusal("headline peers.09_x:v7"), "must be LABEL=FILE:STEP:PEER,PEER");
  CHECK(reports.table("headline A=nosuch:v7:cudnn") == "not measured yet\n");

  const std::string others = reports.table("others others.09_x");
  has(others,
      "NVIDIA H100, measured on 2026-11-26 at commit abc, not by this repository's scripts");
  has(others, "`others.09_x.jsonl`. n: tokens. `x name`");
  has_line(others,
           "| problem | FlashAttention-3 us | its kernel alone us | `v7` us | "
           "`v7` x FlashAttention-3 | `v7` x its kernel alone |");
  has_line(others, "| d64 n512 | 12.1 | 9.0 | 10.0 | 1.21 | 0.90 |");
  has(others, "`v7` x FlashAttention-3: 1.10 (1.00 to 1.21)");
  has_line(reports.table("others others.09_x peers=fa3"),
           "| problem | FlashAttention-3 us | `v7` us | `v7` x FlashAttention-3 |");
  has(reports.refusal("others peers.09_x"), "peers.09_x is of our scripts");
}

TEST_CASE("tables say how many tokens a batch of several lengths has") {
  Reports reports;
  json p = problem("bf16", 2048);
  p.update({{"batch", 3}, {"varlen_q", {0, 2048, 52}}, {"varlen_k", {0, 2048, 52}}});
  const std::vector<json> steps{step("v1", 1e12, 2e9, 1e-3)};
  reports.write("v", run("04_flash_v2", "forward", p, steps));
  has(reports.table("steps v"),
      "forward: B=3 Hq=16 Hkv=16 varlen 2100 tokens, longest 2048, d=128 bf16, ");
  has(reports.table("lengths v"), "forward d=128 bf16 varlen, N the longest");
  has(reports.refusal("memory v"), "v is of several lengths, must be of one");
  p["varlen_k"] = {7, 1, 2048};
  reports.write("v", run("04_flash_v2", "forward", p, steps));
  has(reports.table("steps v"),
      "varlen 2100 queries, longest 2048, 2056 keys, longest 2048, d=128 bf16, ");
}

TEST_CASE("a copy that was not measured is no roof to compare with") {
  Reports reports;
  json r = run("02_online_softmax", "softmax", rows_problem("bf16", 4096, 65536),
               {step("v4", 0, 2e9, 1e-3)});
  r["roofs"]["hbm_copy"]["source"] = "datasheet";
  reports.write("s", r);
  has_line(reports.table("steps s"), "| `v4` | 1.000 (1.000 .. 1.000) | 2000 | n/a | 2.00 |");
}

TEST_CASE("a table of lengths has a column for each number of columns") {
  Reports reports;
  const auto softmax = [&](const char* name, int64_t cols, const std::vector<json>& steps) {
    reports.write(name,
                  run("02_online_softmax", "softmax", rows_problem("bf16", 4096, cols), steps));
  };
  softmax("a", 1024, {step("v3", 0, 3e9, 1e-3), step("v4", 0, 2e9, 1e-3)});
  softmax("b", 65536, {step("v3", 0, 3e9, 2e-3), step("v4", 0, 2e9, 0)});
  const std::string text = reports.table("lengths a b");
  has_line(text, "| GB/s (% of copy) | cols=1024 | cols=65536 |");
  has_line(text, "| `v3` | 3000 (75.0) | 1500 (37.5) |");
  has_line(text, "| `v4` | 2000 (50.0) | - |");
  has(text,
      "NVIDIA H200, softmax bf16. GB/s: modelled bytes over time; in brackets, % of the copy");
  reports.write("n1024",
                run("03_flash_v1", "forward", problem("bf16", 1024), {step("v7", 4e11, 1, 1e-3)}));
  reports.write("n16384",
                run("03_flash_v1", "forward", problem("bf16", 16384), {step("v7", 2e11, 1, 1e-3)}));
  reports.write("n2048",
                run("03_flash_v1", "forward", problem("bf16", 2048), {step("v7", 3e11, 1, 1e-3)}));
  has_line(reports.table("lengths n*"), "| TFLOP/s | N=1024 | N=2048 | N=16384 |");
  has_line(reports.table("lengths n*"), "| `v7` | 400.0 | 300.0 | 200.0 |");
  has_line(reports.table("lengths n*"), "NVIDIA H200, forward d=128 bf16.");
  json two = step("v7", 4e11, 1, 2e-3);
  two["phases"] = {{{"name", "quantise"}, {"time", time_of(1e-3)}},
                   {{"name", "attention"}, {"time", time_of(1e-3)}}};
  reports.write("two", run("06_flash_v3_hopper", "forward", problem("bf16", 1024),
                           {two, step("v8", 4e11, 1, 1e-3)}));
  const std::string of_phase = reports.table("lengths two phase=attention");
  has_line(of_phase, "| `v7` | 400.0 |");
  has(of_phase, "the phase attention alone");
  CHECK(of_phase.find("v8") == std::string::npos);
  has_line(reports.table("lengths two"), "| `v7` | 200.0 |");
  has(reports.refusal("lengths two phase=nosuch"), "no step of two has a phase nosuch");
  two["flop"] = 0;  // a softmax, a copy: bytes only
  reports.write("bytes", run("06_flash_v3_hopper", "forward", problem("bf16", 1024), {two}));
  has(reports.refusal("lengths bytes phase=attention"), "no step of bytes has a phase attention");
  has(reports.refusal("lengths n1024 a"),
      "a is of softmax bf16 on NVIDIA H200, not of forward d=128 bf16 on NVIDIA H200");
}

TEST_CASE("a table of problems: a row for each, whatever they differ in") {
  Reports reports;
  json window = problem("bf16", 2048);
  window["window"] = {1024, 0};
  reports.write("a", run("04_flash_v2", "forward", problem("bf16", 1024),
                         {step("v7", 4e11, 1, 1e-3), step("v8", 4e11, 1, 0)}));
  reports.write("b", run("04_flash_v2", "forward", window, {step("v7", 2e11, 1, 2e-3)}));
  const std::string text = reports.table("problems a b");
  has(text, "NVIDIA H200, forward.\n");
  has_line(text, "| problem | step | ms (quartiles) | TFLOP/s |");
  has(text, "N=1024 d=128 bf16 | `v7` | 1.000 (1.000 .. 1.000) | 400.0 |");
  has(text, "window=1024,0 | `v7` | 2.000 (2.000 .. 2.000) | 100.0 |");
  CHECK(text.find("`v8`") == std::string::npos);  // not timed
  reports.write("c",
                run("04_flash_v2", "backward", problem("bf16", 1024), {step("b2", 4e11, 1, 1e-3)}));
  has(reports.refusal("problems a c"), "c is backward on NVIDIA H200, not forward");
}

TEST_CASE("a table compares steps of several documents") {
  Reports reports;
  json of_phase = step("q1_int8_qk", 4e12, 2e9, 2e-3);
  of_phase["phases"] = {{{"name", "attention"}, {"time", {{"median_s", 1e-3}}}}};
  reports.write("a", run("08_quant_sparse", "forward", problem("bf16", 2048),
                         {step("v14_tuned", 4e12, 2e9, 4e-3)}));
  reports.write("b", run("08_quant_sparse", "forward", problem("int8", 2048),
                         {of_phase, step("q2_smooth_k", 4e12, 2e9, 0)}));
  const std::string columns = " A_title=ms:a,b Micro=us:b Rate=attention:b";
  const std::string text = reports.table("compare step=v14_tuned,q1_int8_qk" + columns);
  has(text, "Medians on an NVIDIA H200.\n");
  has_line(text, "| step | type | A title | Micro | Rate |");
  has_line(text, "| `v14_tuned` | bf16 | 4.000 | - | - |");
  has_line(text, "| `q1_int8_qk` | int8 | 2.000 | 2000 | 4000.0 |");
  CHECK_THROWS_WITH(reports.table("compare step=q2_smooth_k" + columns),
                    ContainsSubstring("no document has a time of q2_smooth_k"));
  CHECK_THROWS_WITH(reports.table("compare step=v14_tuned Title"),
                    ContainsSubstring("Title: must be TITLE=VALUE:DOCUMENT,..."));
}

TEST_CASE("a table of memory joins chapters by length and says what is refused") {
  Reports reports;
  const auto need = [&](const char* name, const char* chapter, const char* s, int n,
                        const json& bytes) {
    json r = run(chapter, "forward", problem("bf16", n), {step(s, 1, 1, 0)});
    r["steps"][0]["memory_bytes"] = bytes;
    r["device"]["memory_free_bytes"] = 139.0 * (1 << 30);
    reports.write(name, r);
  };
  const double gib = 1 << 30;
  need("a.m131072", "01_naive", "v5_cublas", 131072, 1538.0 * gib);
  need("a.m1024", "01_naive", "v5_cublas", 1024, 0.125 * gib);
  need("b.m1024", "03_flash_v1", "v7_exp2", 1024, 0.25 * gib);
  need("b.m131072", "03_flash_v1", "v7_exp2", 131072, 3 * gib);
  need("b.m200000", "03_flash_v1", "v7_exp2", 200000, nullptr);
  const std::string text = reports.table("memory a.m* b.m*");
  has(text, "forward: B=1 Hq=16 Hkv=16 d=128 bf16: ");
  has(text, "Refused: more than the 139.0 GiB that were free.");
  has_line(text, "| N | 01_naive `v5_cublas` GiB | 03_flash_v1 `v7_exp2` GiB |");
  has_line(text, "| 1024 | 0.12 | 0.25 |");
  has_line(text, "| 131072 | 1538.00 (refused) | 3.00 |");
  has_line(text, "| 200000 | - | refused |");
  CHECK(text.find("| 1024 ") < text.find("| 131072 "));
  reports.write(
      "c", run("03_flash_v1", "forward", problem("bf16", 1024, 8), {step("v7_exp2", 1, 1, 0)}));
  reports.write("rows", run("02_online_softmax", "softmax", rows_problem("bf16", 8, 9),
                            {step("v4", 0, 1, 0)}));
  has(reports.refusal("memory rows"), "rows is of rows, must be of attention");
  reports.write("old",
                run("03_flash_v1", "forward", problem("bf16", 4096), {step("v7_exp2", 1, 1, 0)}));
  has_line(reports.table("memory a.m1024 old"), "| 4096 | - | n/a |");
  has(reports.refusal("memory a.m1024 c"), "c is of another problem than a.m1024");
}

TEST_CASE("a table of ratios: rate, median and quartiles of each peer, - where there is none") {
  Reports reports;
  const auto ratio = [](const char* s, const char* peer, double m) {
    return json{{"step", s}, {"peer", peer}, {"median", m}, {"q1", m - 0.01}, {"q3", m + 0.01}};
  };
  const auto entry = [](const json& r, const json& peers, const json& ratios) {
    return json{{"problem", r.at("problem")},
                {"operation", r.at("operation")},
                {"runs", {r}},
                {"peers", peers},
                {"ratios", ratios}};
  };
  const json timed = {{"name", "flash"}, {"time", time_of(1e-3)}};
  const json too_large = {{"name", "01_naive:v5_cublas"}, {"reason", "out of memory"}};
  const json there = {{"name", "01_naive:v5_cublas"}, {"time", time_of(1e-3)}};
  json p = {
      {"schema", "attn-peers-1"}, {"gpu", "NVIDIA H200"}, {"torch", "2.11"}, {"cudnn", 91900}};
  const auto forward = [&](int n) {
    return run("03_flash_v1", "forward", problem("bf16", n),
               {step("v4", 2e11, 1, 2e-3), step("v7", 3e11, 1, 1e-3)});
  };
  p["problems"] = {entry(forward(1024), {timed, too_large},
                         {ratio("v4", "flash", 0.4), ratio("v7", "flash", 0.81)}),
                   entry(forward(2048), {timed, there},
                         {ratio("v7", "flash", 0.9), ratio("v7", "01_naive:v5_cublas", 1.5),
                          ratio("v4", "flash", 0.5)})};
  reports.write("p", p);
  const std::string one = reports.table("ratios p step=v7");
  has(one, "NVIDIA H200, PyTorch 2.11, cuDNN 91900, `v7`; ");
  has_line(one, "| problem | TFLOP/s | x flash | x 01_naive:v5_cublas |");
  has_line(one, "| B=1 Hq=16 Hkv=16 N=1024 d=128 bf16 | 300.0 | 0.81 (0.80 .. 0.82) | - |");
  has_line(
      one,
      "| B=1 Hq=16 Hkv=16 N=2048 d=128 bf16 | 300.0 | 0.90 (0.89 .. 0.91) | 1.50 (1.49 .. 1.51) |");
  const std::string all = reports.table("ratios p peers=flash");
  has_line(all, "| problem | step | TFLOP/s | x flash |");
  has_line(all, "| B=1 Hq=16 Hkv=16 N=1024 d=128 bf16 | `v4` | 100.0 | 0.40 (0.39 .. 0.41) |");
  json eight = p;  // steps that take e4m3: a library's own type above its column
  for (json& x : eight["problems"]) {
    x["problem"]["dtype"] = "e4m3";
    for (json& peer : x["peers"]) peer["name"] = peer["name"] == "flash" ? "fa3" : peer["name"];
  }
  reports.write("p8", eight);
  has_line(reports.table("ratios p8 step=v7"),
           "| problem | TFLOP/s | x FA3 bf16 | x 01_naive:v5_cublas |");
  has(reports.refusal("ratios p step=v9"), "has no such ratio");
  has(reports.refusal("ratios p steps=v7"),
      "steps=v7: must be a file, step=NAME, peers=NAME,NAME or over=STEP");
  const std::string over = reports.table("ratios p step=v7 peers=flash over=v4");
  has_line(over, "| problem | TFLOP/s | x `v4` | x flash |");
  has_line(over, "| B=1 Hq=16 Hkv=16 N=1024 d=128 bf16 | 300.0 | 2.00 | 0.81 (0.80 .. 0.82) |");
  has(over, "of the rounds; of steps the ratio of the medians.");
  has(reports.refusal("ratios p step=v7 over=v9"), "over=v9: p has none");
  has(reports.refusal("means p step=v7 over=v4"), "table means: has no over=");

  // Problems on rows, from two files; a step that refuses a problem keeps its row.
  const auto rows = [&](const char* name, int64_t cols, double s) {
    const json r =
        run("02_online_softmax", "softmax", rows_problem("bf16", 8, cols), {step("v4", 0, 2e9, s)});
    json q = p;
    q["problems"] = {entry(r, {{{"name", "softmax"}, {"time", time_of(1e-3)}}},
                           s > 0 ? json{ratio("v4", "softmax", 1.25)} : json::array())};
    reports.write(name, q);
  };
  rows("r1", 1024, 1e-3);
  rows("r2", 16777216, 0);
  const std::string both = reports.table("ratios r1 r2 step=v4");
  has_line(both, "| problem | GB/s | % of copy | x softmax |");
  has_line(both, "| softmax 8 rows x 1024 columns bf16 | 2000 | 50.0 | 1.25 (1.24 .. 1.26) |");
  has_line(both, "| softmax 8 rows x 16777216 columns bf16 | - | - | - |");
  has(both, " GB/s: modelled bytes over time.");

  // A peer that lacks a problem leaves an empty cell and does not shift the others.
  const std::string peers = reports.table("peers p");
  has_line(
      peers,
      "| B=1 Hq=16 Hkv=16 N=1024 d=128 bf16 | 1.000 | - | 2.000 | 0.50 | - | 1.000 | 1.00 | - |");
}

TEST_CASE("a table of traffic: the model beside ncu") {
  Reports reports;
  const auto phase = [](const char* name, const json& l2) {
    return json{{"name", name},     {"tensor_flop", 0}, {"fp32_flop", 0}, {"exp", 0},
                {"hbm_read", 1e9},  {"hbm_write", 1e9}, {"l2_bytes", l2}, {"predicted_s", 1},
                {"binding", "HBM"}, {"time", nullptr}};
  };
  json whole = step("v7", 1, 2e9, 1e-3), part = step("b2", 1, 4e9, 1e-3),
       none = step("v2", 1, 4e9, 1e-3);
  whole["phases"] = {phase("attention", 20e9)};
  part["phases"] = {phase("dot", nullptr), phase("main", 10e9)};
  none["phases"] = {phase("dot", nullptr), phase("main", 10e9)};
  reports.write("t", run("03_flash_v1", "forward", problem("bf16", 2048), {whole, part, none}));
  const auto counted = [&](const std::string& s, const std::string& said,
                           const std::vector<double>& l2_of_kernels) {
    std::string csv =
        said + "\"ID\",\"Kernel Name\",\"CC\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n";
    for (std::size_t id = 0; id < l2_of_kernels.size(); ++id)
      for (const auto& [metric, unit, value] :
           {std::tuple("lts__t_bytes.sum", "byte", l2_of_kernels[id]),
            std::tuple("dram__bytes_read.sum", "byte", 1.5e9),
            std::tuple("dram__bytes_write.sum", "byte", 0.5e9),
            std::tuple("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "sector",
                       l2_of_kernels[id] / 80),
            std::tuple("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", "sector",
                       l2_of_kernels[id] / 160)})
        csv += fmt::format(
            "\"{}\",\"void k{}<__nv_bfloat16>(int)\",\"9.0\",\"{}\",\"{}\",\"{:.0f}\"\n", id, id,
            metric, unit, value);
    reports.write("03_flash_v1." + s + ".ncu.csv", csv);
  };
  const std::string line =
      "==profile.sh== problem: forward B=1 Hq=16 Hkv=16 seqlen_q=2048 seqlen_k=2048 d=128 ";
  counted("v7", line + "bf16 inputs=random seed=3\n", {21e9});
  counted("b2", "", {3e9, 9e9});  // has no problem; only its second launch has a model
  counted("v2", "", {3e9});       // one launch, two phases: ambiguous
  const std::string text = reports.table("traffic t 03_flash_v1 v7,b2,v2");
  has(text,
      "NVIDIA H200, forward B=1 Hq=16 Hkv=16 seqlen_q=2048 seqlen_k=2048 d=128 bf16 "
      "inputs=random; ");
  has_line(text,
           "| step | modelled L2 GB | asked by SMs GB | asked / modelled | counted in L2 GB | "
           "modelled HBM GB "
           "| counted HBM GB |");
  // 3/160 of the bytes in sectors of 32: 0.6 of the L2 count.
  has_line(text, "| `v7` | 20.0 | 12.6 | 0.63 | 21.0 | 2.00 | 2.00 |");
  has_line(text, "| `b2` main | 10.0 | 5.40 | 0.54 | 9.00 | 4.00 | 4.00 |");
  has_line(text, "| `v2` main | 10.0 | n/a | n/a | n/a | 4.00 | 2.00 |");

  counted("v7", line + "fp16 inputs=random seed=3\n", {21e9});
  has(reports.refusal("traffic t 03_flash_v1 v7"), "03_flash_v1.v7.ncu.csv is of 'forward B=1");
  has(reports.refusal("traffic t 01_naive v7"), "t is of 03_flash_v1, not of 01_naive");
  has(reports.refusal("traffic t 03_flash_v1 v9"), "t has no step v9");
  CHECK(reports.table("traffic nosuch 03_flash_v1 v7") == "not measured yet\n");
  fs::remove(reports.path() / "03_flash_v1.b2.ncu.csv");
  CHECK(reports.table("traffic t 03_flash_v1 b2") == "not measured yet\n");
}

TEST_CASE(
    "a table of counters has its steps in the order of the chapter: v2 before v10, backward last") {
  Reports reports;
  const std::string one = read_all(recorded("01_naive.v1_global.ncu.csv"));
  for (const char* step : {"v10_last", "b1_back", "v2_next"})
    reports.write(fmt::format("09_x.{}.ncu.csv", step), one);
  const std::string text = reports.table("counters 09_x");
  CHECK(text.find("v2_next") < text.find("v10_last"));
  CHECK(text.find("v10_last") < text.find("b1_back"));
  CHECK(text.find("b1_back") != std::string::npos);
}

TEST_CASE("a table whose report is not there says so, and says which") {
  Reports reports;
  reports.write("there",
                run("03_flash_v1", "forward", problem("bf16", 1024), {step("v7", 4e11, 1, 1e-3)}));
  for (const char* words :
       {"steps nosuch", "ladder nosuch", "phases nosuch", "lengths there nosuch", "lengths nosuch*",
        "memory nosuch*", "peers nosuch", "ratios nosuch step=v7", "counters 09_nosuch",
        "diff nosuch there"}) {
    INFO(words);
    CHECK(reports.table(words) == "not measured yet\n");
    REQUIRE(reports.missing.size() == 1);
    CHECK(reports.missing[0].find(std::string("page.md: table ") + words + ": ") !=
          std::string::npos);
  }
  reports.table("steps there");
  CHECK(reports.missing.empty());
  // A damaged report, or a missing folder, is an error.
  reports.write("cut.json", std::string("{\"schema\": "));
  has(reports.refusal("steps cut"), "cut.json: is not a JSON object");
  has(reports.refusal("nosuch there"),
      "must be steps, ladder, tree, phases, lengths, problems, accuracy, memory, chapters, "
      "compare, peers, "
      "ratios, means, others, headline");
  has(refusal_of([&] { return fill_tables("", "page.md", reports.path() / "nowhere"); }),
      "no such folder");
}
