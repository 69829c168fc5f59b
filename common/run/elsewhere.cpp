#include "run/elsewhere.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <sstream>
#include <utility>

#include "check/operation.h"

namespace attn {
namespace {

// The arguments without those that name steps, output files or the operation.
std::vector<std::string> problem_of(const std::vector<std::string>& arguments) {
  static const std::vector<std::string> with_value{"--step", "--profile",   "--json",
                                                   "--save", "--operation", "--device"};
  static const std::vector<std::string> alone{"--turns", "--time", "--require-gpu", "--races"};
  std::vector<std::string> all;
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    const std::string option = arguments[n].substr(0, arguments[n].find('='));
    if (std::ranges::find(alone, option) != alone.end()) continue;
    if (std::ranges::find(with_value, option) == with_value.end()) {
      all.push_back(arguments[n]);
    } else if (option.size() == arguments[n].size()) {
      ++n;  // skips the option's value
    }
  }
  return all;
}

// Standard output of a program; empty if it fails.
std::string output_of(const std::string& program, std::vector<std::string> arguments) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "";
  const pid_t process = fork();
  if (process == 0) {
    const int nowhere = open("/dev/null", O_RDWR);
    dup2(nowhere, 0), dup2(ends[1], 1), dup2(nowhere, 2);
    std::vector<char*> words{const_cast<char*>(program.c_str())};
    for (std::string& a : arguments) words.push_back(a.data());
    words.push_back(nullptr);
    execv(program.c_str(), words.data());
    _exit(127);
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t n = 0; process > 0 && (n = read(ends[0], part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 1;
  if (process > 0) waitpid(process, &status, 0);
  return status == 0 ? text : "";
}

// Whether a name has the form of a chapter folder: 04_flash_v2.
bool is_chapter(const std::string& name) {
  return name.size() > 3 && name[0] == '0' && std::isdigit(static_cast<unsigned char>(name[1])) &&
         name[2] == '_';
}

using StepsOfChapter = std::pair<std::string, std::vector<std::string>>;

// Asks the other chapter programs in this program's folder.
std::vector<StepsOfChapter> steps_elsewhere(const std::string& chapter,
                                            const std::string& operation,
                                            const std::vector<std::string>& arguments) {
  std::vector<std::string> question = problem_of(arguments);
  for (const char* more : {"--operation", operation.c_str(), "--device", "emulated", "--takes"})
    question.emplace_back(more);
  std::vector<StepsOfChapter> all;
  std::error_code ignored;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", ignored);
  for (const auto& file : std::filesystem::directory_iterator(own.parent_path(), ignored)) {
    const std::string name = file.path().filename().string();
    if (!is_chapter(name) || name == chapter) continue;
    std::istringstream lines(output_of(file.path().string(), question));
    std::vector<std::string> steps;
    for (std::string step; std::getline(lines, step);) steps.push_back(step);
    if (!steps.empty()) all.emplace_back(name, std::move(steps));
  }
  std::ranges::sort(all);
  return all;
}

}  // namespace

std::vector<std::string> steps_that_take(const Chapter& chapter, const Operation& operation,
                                         const Problem& p) {
  std::vector<std::string> names;
  for (const Step& s : chapter.steps)
    if (s.operation == &operation && !refusal(s, p.empty() ? p.at_least_one() : p))
      names.push_back(s.name);
  return names;
}

void print_who_takes(const Chapter& chapter, const Options& o,
                     const std::vector<std::string>& arguments) {
  std::vector<StepsOfChapter> all = steps_elsewhere(chapter.name, o.operation->name, arguments);
  if (auto here = steps_that_take(chapter, *o.operation, o.problem); !here.empty())
    all.insert(all.begin(), {chapter.name, std::move(here)});
  std::vector<std::string> texts;
  for (const auto& [name, steps] : all)
    texts.push_back(fmt::format("{} {}", name, fmt::join(steps, " ")));
  fmt::print("steps that take it: {}\n",
             texts.empty() ? "none" : fmt::format("{}", fmt::join(texts, "; ")));
}

}  // namespace attn
