#include "run/step_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "attn/error.h"
#include "attn/feature.h"
#include "check/operation.h"

namespace attn {

std::vector<std::string> operation_names(const Chapter& chapter) {
  std::vector<std::string> names;
  for (const Operation* op : operations_of(chapter)) names.push_back(op->name);
  return names;
}

std::string dtype_help(const Chapter& chapter) {
  std::vector<std::string_view> quantised;
  for (const DType type : {DType::int8, DType::e4m3, DType::int4})
    if (std::ranges::any_of(chapter.steps, [=](const Step& s) { return quantises_to(s) == type; }))
      quantised.push_back(name(type));
  if (quantised.empty()) return "fp32, fp16, bf16 (bf16)";
  return fmt::format("fp32, fp16, bf16; or {}: given in bf16, quantised by the step (bf16)",
                     fmt::join(quantised, ", "));
}

const Step& step_called(const Chapter& chapter, const char* option, const std::string& name) {
  std::vector<std::string> names, begin_so;
  const Step* found = nullptr;
  for (const std::string& begin : {name, name + "_"}) {
    begin_so.clear();
    for (const Step& s : chapter.steps) {
      if (s.name == name) return s;
      if (name.empty() || !s.name.starts_with(begin)) continue;
      begin_so.push_back(s.name), found = &s;
    }
    if (begin_so.size() == 1) return *found;
    if (!begin_so.empty()) names = begin_so;
  }
  if (!names.empty())
    throw InputError(
        fmt::format("{} {}: ambiguous, may be {}", option, name, fmt::join(names, ", ")));
  for (const Step& s : chapter.steps) names.push_back(s.name);
  throw InputError(fmt::format("{} {}: unknown step, this chapter has {}", option,
                               name.empty() ? "''" : name, fmt::join(names, ", ")));
}

void group_options(const Chapter& chapter, CLI::App& app) {
  const std::vector<const Operation*> operations = operations_of(chapter);
  const auto group = [&](const std::string& option, auto has) {
    std::vector<std::string> names;
    for (const Operation* op : operations)
      if (std::ranges::any_of(chapter.steps,
                              [&](const Step& s) { return s.operation == op && has(s); }))
        names.push_back(op->name);
    CLI::Option* const o = app.get_option_no_throw(option);
    if (o == nullptr || names.size() == operations.size()) return;
    o->group(names.empty() ? "" : fmt::format("Of {}", fmt::join(names, ", ")));
  };
  const auto on_rows = [](const Step& s) { return s.operation->matrix; };
  const auto on_heads = [](const Step& s) { return !s.operation->matrix; };
  for (const char* option : {"--rows", "--cols"}) group(option, on_rows);
  for (const char* option : {"--head-dim", "--scale"}) group(option, on_heads);
  const auto takes_it = [](const Step& s, const Feature& f) {
    return (f.everywhere || takes(s, f.name)) && (f.on_matrix || !s.operation->matrix);
  };
  for (const Feature& f : shared_features())
    group(f.option(), [&](const Step& s) { return takes_it(s, f); });
  group("--varlen-k", [](const Step& s) { return takes(s, "varlen"); });
  for (const Operation* op : operations)
    for (const Feature& f : op->own)
      group(f.option(), [&](const Step& s) {
        return std::ranges::find(s.operation->own, f.name, &Feature::name) !=
                   s.operation->own.end() &&
               (f.everywhere || takes(s, f.name));
      });
}

}  // namespace attn
