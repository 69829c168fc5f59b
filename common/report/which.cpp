#include "report/which.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "attn/error.h"
#include "device/device.h"

namespace attn::report {

CLI::App* add_which_command(CLI::App& app, WhichArguments& a) {
  CLI::App* which = app.add_subcommand(
      "which", "lists the steps of libattention that take a problem, and why the others do not");
  attn_problem& p = a.problem;
  p.size = sizeof p;
  p.batch = 1, p.heads = 2, p.seqlen_q = p.seqlen_k = 128, p.head_dim = 64;
  p.window_left = p.window_right = -1;
  p.page_size = 16, p.max_pages = 8, p.num_pages = 64;
  which->add_option("--operation", a.operation,
                    "forward, backward, decode, paged_decode, paged_prefill, paged_append or "
                    "quantised_forward");
  which->add_option("--batch", p.batch);
  which->add_option("--heads", p.heads);
  which->add_option("--kv-heads", a.kv_heads, "as many as --heads if not given");
  which->add_option("--seqlen", a.seqlen, "sets --seqlen-q and --seqlen-k");
  which->add_option("--seqlen-q", p.seqlen_q);
  which->add_option("--seqlen-k", p.seqlen_k);
  which->add_option("--head-dim", p.head_dim);
  which->add_option("--dtype", a.dtype)
      ->check(CLI::IsMember({"bf16", "fp16", "fp32", "int8", "e4m3", "int4"}));
  which->add_flag("--causal", a.causal);
  which->add_option("--window", a.window, "L,R")->delimiter(',')->expected(2);
  which->add_option("--softcap", p.softcap);
  which->add_flag("--alibi", a.alibi);
  which->add_option("--page-size", p.page_size);
  which->add_option("--num-pages", p.num_pages);
  which->add_option("--max-pages", p.max_pages);
  which->add_flag("--deterministic", p.deterministic,
                  "only steps whose results are bitwise equal from run to run");
  which->add_flag("--device-lengths", a.device_lengths, "lengths are on the device alone");
  which->add_option("--device", a.device)->check(CLI::IsMember({"auto", "gpu", "emulated"}));
  which->add_option("--library", a.library, "libattention.so; if not given, that of this build");
  return which;
}

std::string which(const WhichArguments& a) {
  std::string path = a.library;
  if (path.empty())
    path = std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() /
           "lib/libattention.so";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw InputError(fmt::format("which: {}: cannot be loaded ({}): build the target attention",
                                 path, dlerror()));
  const auto ask = reinterpret_cast<decltype(&attn_which)>(dlsym(library, "attn_which"));
  const auto last_error =
      reinterpret_cast<decltype(&attn_last_error)>(dlsym(library, "attn_last_error"));
  if (!ask || !last_error) throw InputError(fmt::format("which: {}: has no attn_which", path));
  attn_problem p = a.problem;
  static constexpr const char* kTypes[] = {"bf16", "fp16", "fp32", "int8", "e4m3", "int4"};
  p.dtype = static_cast<int32_t>(std::ranges::find(kTypes, a.dtype) - std::begin(kTypes));
  const bool gpu = a.device == "gpu" || (a.device == "auto" && gpu_info().available);
  p.backend = gpu ? ATTN_GPU : ATTN_EMULATED;
  p.causal = a.causal, p.alibi = a.alibi;
  p.kv_heads = a.kv_heads > 0 ? a.kv_heads : p.heads;
  if (a.seqlen > 0) p.seqlen_q = p.seqlen_k = a.seqlen;
  if (a.window.size() == 2) p.window_left = a.window[0], p.window_right = a.window[1];
  // Decoding and pages: the lengths of a cache that is full.
  const bool paged = a.operation.starts_with("paged");
  const std::vector<int64_t> lengths(
      static_cast<std::size_t>(std::clamp<int64_t>(p.batch, 1, 1 << 20)),
      paged ? p.page_size * p.max_pages : p.seqlen_k);
  if ((paged || a.operation == "decode") && !a.device_lengths && p.batch <= 1 << 20)
    p.lengths_k = lengths.data();
  std::size_t bytes = 0;
  if (ask(a.operation.c_str(), &p, nullptr, 0, &bytes) != ATTN_OK)
    throw InputError(fmt::format("which: {}", last_error()));
  std::string text(bytes, '\0');
  if (ask(a.operation.c_str(), &p, text.data(), bytes, nullptr) != ATTN_OK)
    throw InputError(fmt::format("which: {}", last_error()));
  text.pop_back();
  return fmt::format("device: {}\n{}", device_text(gpu ? Backend::gpu : Backend::emulated), text);
}

}  // namespace attn::report
