#include "run/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "attn/error.h"
#include "device/gpus.h"
#include "check/field.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "run/file_shapes.h"
#include "run/mask_option.h"
#include "run/parse.h"
#include "run/step_options.h"
#include "run/timeline_page.h"

namespace attn {
namespace {

template <class Choice>
Choice parse_choice(const std::string& option, const std::string& text,
                    std::initializer_list<std::pair<const char*, Choice>> choices,
                    const char* other = nullptr) {
  std::string accepted;
  for (const auto& [name, value] : choices) {
    if (text == name) return value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(name);
  }
  if (other != nullptr) accepted += std::string(" or ") + other;
  throw InputError(fmt::format("{} {}: must be one of {}", option, text, accepted));
}

std::vector<int64_t> parse_lengths(const std::string& option, const std::string& text) {
  std::vector<int64_t> lengths;
  for (const std::string& part : split(text, ','))
    lengths.push_back(parse_number<int64_t>(option, part, 0, std::numeric_limits<int64_t>::max()));
  return lengths;
}

// `list`: the value of --varlen, or nothing. Other options that set lengths contradict a list.
void take_varlen(const std::string& list, const std::set<std::string>& given, Problem& p) {
  const auto not_given = [&](const char* option, std::initializer_list<const char*> others) {
    for (const char* other : others)
      if (given.contains(other))
        throw InputError(fmt::format("{}: not together with {}", other, option));
  };
  if (list.empty()) {
    if (!p.varlen_k.empty())
      throw InputError("--varlen-k: needs --varlen, the queries of each sequence");
  } else if (list == "skewed") {
    not_given("--varlen skewed", {"--varlen-k", "--seqlen-q", "--seqlen-k", "--load"});
    if (p.batch < 1 || p.seqlen_q < 1)
      throw InputError(
          fmt::format("--varlen skewed: needs a --batch and a --seqlen of at least 1, "
                      "not {} and {}",
                      p.batch, p.seqlen_q));
    if (p.batch > Problem::kMaxSequences)
      throw InputError(fmt::format("--batch {}: must be at most {} with --varlen", p.batch,
                                   Problem::kMaxSequences));
    p.varlen_q = skewed_lengths(p.batch, p.seqlen_q, p.seed);
  } else {
    not_given("--varlen", {"--batch", "--seqlen-q", "--seqlen-k", "--seqlen"});
    p.varlen_q = parse_lengths("--varlen", list);
  }
}

}  // namespace

std::optional<Options> parse_options(const Chapter& chapter, int argc, const char* const* argv) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Options o;
  o.problem.kv_heads = 0;  // set when --heads is known
  std::string steps = "all", operation, varlen, mask;
  std::set<std::string> given;  // options on the command line
  CLI::App app(chapter.summary, chapter.name);
  app.set_help_flag("-h,--help", "this text");

  const auto value = [&](const std::string& name, const std::string& meaning,
                         std::function<void(const std::string&)> store) {
    app.add_option_function<std::string>(
           name,
           [&given, name, store](const std::string& text) {
             if (text.empty()) throw InputError(name + ": the value is empty");
             given.insert(name);
             store(text);
           },
           meaning)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  const auto integer = [&](const std::string& name, const std::string& meaning, int64_t* field,
                           int64_t lowest = 1) {
    value(name, meaning, [=](const std::string& text) {
      *field = parse_number<int64_t>(name, text, lowest, kMost);
    });
  };
  int64_t rows = -1, cols = -1;  // not given
  Problem& p = o.problem;
  app.add_flag("--list", o.list,
               "print the steps (of --operation): name, idea, operation, what they support");
  app.add_flag("--takes", o.takes,
               "print the names of the steps that accept the problem; run nothing");
  value("--step", "all (default) or NAME[,NAME...]; the beginning of a name is enough: v7",
        [&](const std::string& t) { steps = t; });
  value("--operation",
        fmt::format("{} (default: the first)", fmt::join(operation_names(chapter), ", ")),
        [&](const std::string& t) { operation = t; });
  integer("--batch", "B, sequences (1)", &p.batch, 0);
  integer("--heads", "Hq, query heads (2)", &p.heads);
  integer("--kv-heads", "Hkv, key/value heads (as --heads)", &p.kv_heads);
  integer("--seqlen-q", "queries per sequence (128; operations for few queries: 1)", &p.seqlen_q,
          0);
  integer("--seqlen-k", "keys per sequence (128)", &p.seqlen_k, 0);
  const char* const both = "queries and keys per sequence, where not given one by one";
  value("--seqlen", both, [&](const std::string& t) {
    const int64_t n = parse_number<int64_t>("--seqlen", t, 0, kMost);
    if (!given.contains("--seqlen-q")) p.seqlen_q = n;
    if (!given.contains("--seqlen-k")) p.seqlen_k = n;
  });
  value("--varlen",
        "N,N,...: queries of each packed sequence; skewed: --batch lengths up to --seqlen",
        [&](const std::string& t) { varlen = t; });
  value("--varlen-k", "N,N,...: keys of each packed sequence (as --varlen)",
        [&](const std::string& t) { p.varlen_k = parse_lengths("--varlen-k", t); });
  integer("--head-dim", "d, elements per head (64)", &p.head_dim);
  value("--dtype", dtype_help(chapter),
        [&](const std::string& t) {
          p.dtype = parse_choice<DType>("--dtype", t,
                                        {{"fp32", DType::fp32},
                                         {"fp16", DType::fp16},
                                         {"bf16", DType::bf16},
                                         {"int8", DType::int8},
                                         {"e4m3", DType::e4m3},
                                         {"int4", DType::int4}});
        });
  const char* const window = "LEFT,RIGHT: visible keys on each side of the diagonal; -1: no limit";
  value("--window", window, [&](const std::string& t) {
    const auto parts = split(t, ',');
    if (parts.size() != 2)
      throw InputError(fmt::format("--window {}: must be LEFT,RIGHT, as 128,0 or -1,-1", t));
    p.window_left = parse_number<int64_t>("--window", parts[0], -1, kMost);
    p.window_right = parse_number<int64_t>("--window", parts[1], -1, kMost);
  });
  value("--mask",
        "blocks: random:DENSITY or block:FILE[,BLOCK_M,BLOCK_N]; columns: flashmask:KIND or "
        "flashmask:FOLDER; sliding tiles: sta:CANVAS,TILE,WINDOW[,WINDOW...]",
        [&](const std::string& t) { mask = t; });
  // With two masks it would be unclear that the last one replaces the first.
  app.get_option("--mask")->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  value("--scale", "softmax scale (1/sqrt(d))", [&](const std::string& t) {
    p.softmax_scale = parse_number<double>("--scale", t, -1e30, 1e30);
    if (p.softmax_scale == 0)
      throw InputError("--scale 0: must not be 0: every score would be equal");
  });
  const auto feature = [&](const Feature& f) {
    const std::string name = f.option();
    if (f.kind == Feature::Kind::flag) {
      app.add_flag_callback(
          name, [&given, &p, &f, name] { given.insert(name), f.give(p, {1}); }, f.help);
      return;
    }
    value(name, f.help, [&o, &p, &f, name](const std::string& t) {
      if (f.read) return o.typed[f.name] = t, f.give(p, f.read(t));
      std::vector<double> values;
      for (const std::string& part : f.kind == Feature::Kind::list ? split(t, ',') : std::vector{t})
        values.push_back(
            f.whole ? static_cast<double>(parse_number<int64_t>(
                          name, part, static_cast<int64_t>(f.least), static_cast<int64_t>(f.most)))
                    : parse_number<double>(name, part, f.least, f.most));
      f.give(p, values);
    });
  };
  for (const Feature& f : shared_features())
    if (!f.help.empty()) feature(f);
  // if two operations share one, the first gives the help text
  std::set<std::string> own_names;
  for (const Operation* op : operations_of(chapter))
    for (const Feature& f : op->own)
      if (own_names.insert(f.name).second) feature(f);
  integer("--rows", "rows of an operation on rows: B=1, Hq=1 and this many queries", &rows, 0);
  integer("--cols", "columns of an operation on rows: as --seqlen-k", &cols, 0);
  value("--seed", "random seed of the inputs (1)", [&](const std::string& t) {
    p.seed = parse_number<uint64_t>("--seed", t, 0, std::numeric_limits<uint64_t>::max());
  });
  value("--schedule", "N: seed of the order in which the emulator runs threads (as --seed)",
        [&](const std::string& t) {
          o.schedule =
              parse_number<uint64_t>("--schedule", t, 0, std::numeric_limits<uint64_t>::max());
        });
  const char* const inputs =
      "random (default), needle, peaked, outlier, or field:TxHxW[,TILE], a smooth field";
  value("--inputs", inputs, [&](const std::string& t) {
    if (t.starts_with("field:")) {
      p.own["field"] = read_field(t.substr(6));
      return;
    }
    p.inputs = parse_choice<InputKind>("--inputs", t,
                                       {{"random", InputKind::random},
                                        {"needle", InputKind::needle},
                                        {"peaked", InputKind::peaked},
                                        {"outlier", InputKind::outlier}},
                                       "field:TxHxW[,TILE]");
  });
  const char* const device = "auto (default), gpu, gpu:N (GPU number N, from 0) or emulated";
  value("--device", device, [&](const std::string& t) {
    if (t.starts_with("gpu:")) {
      o.device = DeviceChoice::gpu;
      o.gpu_number = static_cast<int>(parse_number<int64_t>("--device gpu:", t.substr(4), 0, 1023));
      return;
    }
    o.device = parse_choice<DeviceChoice>("--device", t,
                                          {{"auto", DeviceChoice::automatic},
                                           {"gpu", DeviceChoice::gpu},
                                           {"emulated", DeviceChoice::emulated}},
                                          "gpu:N");
  });
  value("--check", "full, sample or off (full below a size limit)", [&](const std::string& t) {
    o.check = parse_choice<CheckChoice>(
        "--check", t,
        {{"full", CheckChoice::full}, {"sample", CheckChoice::sample}, {"off", CheckChoice::off}});
  });
  app.add_flag("--races", o.races,
               "find data races and missing fences, too (emulator only; 2 to 8 times as slow)");
  app.add_flag("--time", o.time, "measure times and roofs (GPU only)");
  app.add_flag("--turns", o.turns,
               "for peers.py: read names of steps from standard input, time each, unchecked, and "
               "print a line of JSON");
  value("--warmup", "untimed launches before the timed ones (3)", [&](const std::string& t) {
    o.warmup = static_cast<int>(parse_number<int64_t>("--warmup", t, 0, 1000000));
  });
  value("--repeat", "timed launches (20)", [&](const std::string& t) {
    o.repeat = static_cast<int>(parse_number<int64_t>("--repeat", t, 1, 1000000));
  });
  value("--gpu", "predict with this GPU's datasheet: " + gpu_names(),
        [&](const std::string& t) { o.gpu = t; });
  value("--json", "write all results to FILE", [&](const std::string& t) { o.json = t; });
  value("--timeline",
        "write a timeline of one launch of one step to FILE: FILE.html is a page, FILE.json is for "
        "ui.perfetto.dev; a model in the emulator, measured on a GPU",
        [&](const std::string& t) { o.timeline = t; });
  value("--timeline-limit", "size of that file in MB (5)", [&](const std::string& t) {
    o.timeline_limit = parse_number<double>("--timeline-limit", t, 0.01, 4000);
  });
  value("--load", "read the inputs from DIR, one .npy file per tensor, as --save writes them",
        [&](const std::string& t) { o.load = t; });
  value("--save", "write inputs to DIR and outputs to DIR/STEP, one .npy file per tensor",
        [&](const std::string& t) { o.save = t; });
  value("--layout",
        "of q, k, v, o and their gradients in --load and --save: bhnd, [batch, heads, seqlen, "
        "head_dim] (default), or bnhd, as in FlashAttention",
        [&](const std::string& t) {
          p.files_bnhd = parse_choice<bool>("--layout", t, {{"bhnd", false}, {"bnhd", true}});
        });
  value("--profile", "launch one step once and nothing else, for ncu",
        [&](const std::string& t) { o.profile = t; });
  app.add_flag("--require-gpu", o.require_gpu, "exit with status 77 if there is no GPU");

  app.allow_extras();  // to report unknown options by name
  try {
    app.parse(argc, argv);
    if (const auto extras = app.remaining(); !extras.empty()) {
      for (const Command& command : chapter.commands)
        if (extras.front() == command.option)
          throw InputError(fmt::format("{}: must be the first argument", command.option));
      throw InputError(
          fmt::format("{}: unknown option (--help lists the options)", extras.front()));
    }
  } catch (const CLI::CallForHelp&) {
    group_options(chapter, app);  // for --help only: error messages do not list hidden options
    fmt::print("{}", app.help());
    for (const Command& command : chapter.commands)
      fmt::print("{}, as the first argument: {}\n", command.option, command.help);
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    throw InputError(fmt::format("{} (--help lists the options)", e.what()));
  }

  const std::vector<const Operation*> operations = operations_of(chapter);
  o.operation_given = !operation.empty();
  if (operation.empty() && !operations.empty()) operation = operations.front()->name;
  o.operation = find_operation(chapter, operation);
  if (o.operation == nullptr)
    throw InputError(fmt::format("--operation {}: must be one of {}", operation,
                                 fmt::join(operation_names(chapter), ", ")));
  // A step implies its operation, so `--step b1_global` needs no --operation. It also implies the
  // type to which it quantises.
  if (o.schedule && o.device == DeviceChoice::gpu)
    throw InputError(
        fmt::format("--schedule {}: for the emulator only, not with --device gpu", *o.schedule));
  if (o.races && o.device == DeviceChoice::gpu)
    throw InputError("--races: for the emulator only, not with --device gpu");
  if (o.races && o.check == CheckChoice::off && o.save.empty())
    throw InputError("--races: not with --check off, which runs nothing");
  if (!o.timeline.empty()) {
    for (const auto& [other, is_given] :
         {std::pair{"--time", o.time}, {"--list", o.list},
          {"--takes", o.takes}, {"--profile", !o.profile.empty()},
          {"--require-gpu", o.require_gpu}, {"--schedule", o.schedule.has_value()}})
      if (is_given)
        throw InputError(fmt::format("--timeline {}: not together with {}: it takes one --step of "
                                     "one problem",
                                     o.timeline, other));
    if (steps == "all" || steps.find(',') != steps.npos)
      throw InputError(fmt::format("--timeline {}: records one step: --step NAME", o.timeline));
    if (!o.timeline.ends_with(".json") && !is_timeline_page(o.timeline))
      throw InputError(fmt::format("--timeline {}: must end with .html, a page to look at, or "
                                   ".json, for ui.perfetto.dev",
                                   o.timeline));
    if (is_timeline_page(o.timeline) && o.timeline_limit < 0.1)
      throw InputError(fmt::format("--timeline-limit {}: must be at least 0.1 for a page",
                                   o.timeline_limit));
    if (o.timeline == o.json)
      throw InputError(fmt::format("--timeline {}: not the file of --json", o.timeline));
  } else if (given.contains("--timeline-limit")) {
    throw InputError("--timeline-limit: needs --timeline FILE");
  }
  if (o.turns && !o.time) throw InputError("--turns: needs --time");
  const char* option = o.profile.empty() ? "--step" : "--profile";
  if (!o.profile.empty()) {
    for (const char* other : {"--step", "--json", "--save"})
      if (given.contains(other))
        throw InputError(fmt::format(
            "--profile {} {}: profiling launches one step and records nothing", o.profile, other));
    o.steps = {o.profile};
  } else if (steps != "all") {
    o.steps = split(steps, ',');
  }
  if (!o.steps.empty()) {
    for (std::string& name : o.steps) {
      const Step& step = step_called(chapter, option, name);
      name = step.name;
      if (!given.contains("--operation") && &name == &o.steps.front()) o.operation = step.operation;
      if (!given.contains("--dtype") && &name == &o.steps.front()) p.dtype = quantises_to(step);
      if (step.operation != o.operation)
        throw InputError(fmt::format("{} {}: is a step of operation {}, not of {}", option, name,
                                     step.operation->name, o.operation->name));
    }
  }
  if (!o.profile.empty()) o.profile = o.steps.front();
  // If all steps of the operation quantise, the type of the first one is the default.
  if (!given.contains("--dtype") && o.steps.empty()) {
    const auto of_it = [&](const Step& s) { return s.operation == o.operation; };
    if (std::ranges::none_of(chapter.steps, [&](const Step& s) {
          return of_it(s) && quantises_to(s) == DType::bf16;
        }))
      if (const auto first = std::ranges::find_if(chapter.steps, of_it);
          first != chapter.steps.end())
        p.dtype = quantises_to(*first);
  }
  if (o.operation->few_queries > 0 && !given.contains("--seqlen-q"))
    p.seqlen_q = o.operation->few_queries;
  p.matrix = o.operation->matrix;
  if (p.matrix) {
    for (const Feature& f : shared_features())
      if (!f.on_matrix && given.contains(f.option()))
        throw InputError(fmt::format("{}: not an option of {}", f.option(), o.operation->name));
    for (const char* other : {"--head-dim", "--scale", "--varlen-k"})
      if (given.contains(other))
        throw InputError(fmt::format("{}: not an option of {}", other, o.operation->name));
    if (rows >= 0 || cols >= 0) {
      for (const char* other :
           {"--batch", "--heads", "--kv-heads", "--seqlen-q", "--seqlen-k", "--seqlen"})
        if (given.contains(other))
          throw InputError(fmt::format("{}: not together with --rows and --cols", other));
      p.batch = p.heads = p.kv_heads = 1;
      if (rows >= 0) p.seqlen_q = rows;
      if (cols >= 0) p.seqlen_k = cols;
    }
  } else if (rows >= 0 || cols >= 0) {
    throw InputError(fmt::format("{}: only for operations on rows, not for {}",
                                 rows >= 0 ? "--rows" : "--cols", o.operation->name));
  }
  const auto who_has = [&](const std::string& own_feature) {
    std::vector<std::string> names;
    for (const Operation* op : operations)
      if (std::ranges::find(op->own, own_feature, &Feature::name) != op->own.end())
        names.push_back(op->name);
    return fmt::format("{}", fmt::join(names, " and "));
  };
  for (const Operation* op : operations)
    for (const Feature& f : op->own) {
      const auto here = std::ranges::find(o.operation->own, f.name, &Feature::name);
      if (op != o.operation && here == o.operation->own.end() && given.contains(f.option()))
        throw InputError(fmt::format("{}{}: only for {}, not for {}", f.option(),
                                     f.kind == Feature::Kind::flag ? ""
                                     : o.typed.contains(f.name)
                                         ? " " + o.typed.at(f.name)
                                         : fmt::format(" {}", fmt::join(f.values(p), ",")),
                                     who_has(f.name), o.operation->name));
      if (op == o.operation && f.otherwise != 0 && !given.contains(f.option()))
        f.give(p, {f.otherwise});
    }
  if (p.kv_heads == 0) p.kv_heads = p.heads;
  take_varlen(varlen, given, p);
  if (!o.gpu.empty() && find_gpu(o.gpu) == nullptr)
    throw InputError(fmt::format("--gpu {}: must be one of {}", o.gpu, gpu_names()));
  if (given.contains("--layout")) {
    if (o.load.empty() && o.save.empty()) throw InputError("--layout: needs --load or --save");
    if (p.matrix)
      throw InputError(
          fmt::format("--layout: not for {}, whose tensors are rows of scores", o.operation->name));
  }
  if (!o.load.empty()) {
    o.warning = take_shapes_of_files(o.load, *o.operation, given, p);
    p.inputs = InputKind::files;
  }
  if (given.contains("--layout") && p.varlen())
    throw InputError("--layout: not with --varlen: packed sequences are [tokens, heads, head_dim]");
  if (o.operation->complete) o.operation->complete(p, given);
  if (!mask.empty()) {
    if (p.varlen()) throw InputError("--mask: not together with --varlen");
    if (o.operation->matrix)
      throw InputError(fmt::format("--mask: not for {}, which has no keys", o.operation->name));
    // An empty problem has nothing to mask.
    if (p.batch > 0 && p.seqlen_q > 0 && p.seqlen_k > 0) p.mask = read_mask(mask, p, o.load);
  }
  if (has_field(p)) check_field(p);
  p.finish();
  return o;
}

}  // namespace attn
