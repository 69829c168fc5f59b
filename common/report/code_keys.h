/// \file
/// Short names for the code that a measurement is true of. There are three, so that a table can say
/// what has changed since:
///
/// | key | of |
/// |---|---|
/// | kernel | the device code of a step, as nvcc gets it, and the flags in AttnChapter.cmake |
/// | launch | host functions that decide grid, plan, workspaces and attributes of its launch |
/// | method | how a part measures: timer, spin, L2 flush, warm-up; peers.py; the flags of ncu |
///
/// A step that launches its parent's attention kernel (ATTN_ATTENTION_OF) has that kernel and its
/// launch in its keys.
///
/// All are over tokens (tokens.h): comments, layout, messages and declared names do not count.
/// Options, printing and the writing of JSON are in none of them, and no key depends on a path: a
/// header is looked for in the chapter, its kernels/ and host/, common/ and common/kernels/.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "report/tokens.h"

namespace attn::report {

/// Grows when keys are made in another way: then those of one way are not compared with those of
/// another.
inline constexpr int kKeyVersion = 2;

/// A problem that gpu_problems.sh lists: of part "times" by its name, of "counters" by its step, of
/// "peers" by the name of its document.
struct ListedProblem {
  std::string part, name;
  std::string options;  ///< those of a program or of peers.py, without the steps
};

/// The keys of the sources below a folder. Each is computed when it is asked for.
class CodeKeys {
 public:
  explicit CodeKeys(std::filesystem::path root);

  const std::filesystem::path& root() const { return root_; }
  /// The chapters, and "common" with the kernels of its GPU tests.
  const std::vector<std::string>& chapters() const { return chapters_; }
  /// The step files of a chapter, without ".cu".
  const std::vector<std::string>& steps(const std::string& chapter);
  /// The key of `step`: that of its file, or of the file of its number where several steps share
  /// one (v1_half_m is in v1_scalar.cu). "-" where there is none.
  std::string kernel(const std::string& chapter, const std::string& step);
  /// Over the host functions in the step's file, its row in the chapter's table, and what both use
  /// of the chapter's host sources, of attn/ and of device/. Costs, refusals and texts of a row are
  /// left out.
  std::string launch(const std::string& chapter, const std::string& step);
  /// Of a part of verify_on_gpu.sh: times, peers, counters, sanitizer; "-" for the others.
  std::string method(const std::string& part);

  /// What gpu_problems.sh lists for a chapter, in its order; nothing where there is no such script.
  const std::vector<ListedProblem>& problems(const std::string& chapter);

  /// The names of the chunks that the launch key of a step is made of, for tests.
  std::set<std::string> launch_functions(const std::string& chapter, const std::string& step);

 private:
  // What the launches of a chapter's steps may use, and the rows of its table.
  struct ChapterSources {
    std::vector<Chunk> chunks;
    std::map<std::string, Tokens> rows;
  };
  std::filesystem::path folder(const std::string& chapter) const;
  std::filesystem::path resolve(const std::string& chapter, const std::string& header) const;
  std::string file_of(const std::string& chapter, const std::string& step);
  std::string attention_of(const std::string& chapter, const std::string& step);
  const Tokens& tokens(const std::filesystem::path&, std::vector<std::string>* included = nullptr);
  const ChapterSources& sources(const std::string& chapter);
  std::vector<Chunk> device_chunks(const std::string& chapter, const std::string& step);
  std::vector<Chunk> launch_chunks(const std::string& chapter, const std::string& step);

  std::filesystem::path root_;
  std::vector<std::string> chapters_;
  std::map<std::string, std::vector<std::string>> steps_;
  std::map<std::filesystem::path, std::pair<Tokens, std::vector<std::string>>> files_;
  std::map<std::string, ChapterSources> sources_;
  std::map<std::string, std::string> keys_;
  std::map<std::string, std::vector<ListedProblem>> problems_;
};

/// Options with one blank between two and without --step and --steps.
std::string problem_options(const std::string& options);

/// The kernel key of one text, for tests. `name` is what the step calls itself.
std::string key_of_text(const std::string& text, const std::string& name);

}  // namespace attn::report
