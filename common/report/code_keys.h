/// \file
/// Hash keys of the code that a measurement depends on. There are three, so that a table can report
/// which part has changed since:
///
/// | key | covers |
/// |---|---|
/// | kernel | the device code of a step as nvcc compiles it, and the flags in AttnChapter.cmake |
/// | launch | host functions that set the grid, plan, workspaces and attributes of its launch |
/// | method | how a part measures: timer, spin, L2 flush, warm-up; peers.py; the flags of ncu |
///
/// The keys of a step that launches its parent's attention kernel (ATTN_ATTENTION_OF) include that
/// kernel and its launch.
///
/// All keys are computed from tokens (tokens.h): comments, layout, messages and declared names do
/// not affect them. Neither do options, printing and JSON output. No key depends on a path: headers
/// are looked up in the chapter, its kernels/ and host/, common/ and common/kernels/.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "report/tokens.h"

namespace attn::report {

/// Increased when the computation of keys changes. Keys of different versions are not compared.
inline constexpr int kKeyVersion = 2;

/// A problem listed by gpu_problems.sh: for "times" with its name, for "counters" with its step,
/// for "peers" with the name of its document.
struct ListedProblem {
  std::string part, name;
  std::string options;  ///< options of a program or of peers.py, without the steps
  std::vector<std::string> steps;  ///< the names after --steps
};
/// Whether peers_formats.py measures a document of the part peers. verify_on_gpu.sh has the same
/// list (common/tests/evidence/notices.sh).
bool by_peers_formats(const std::string& document);
/// The values of --steps.
std::vector<std::string> steps_option(const std::string& options);

/// The keys of the sources below a folder, computed on demand.
class CodeKeys {
 public:
  explicit CodeKeys(std::filesystem::path root);

  const std::filesystem::path& root() const { return root_; }
  /// The chapters, and "common" for the kernels of its GPU tests.
  const std::vector<std::string>& chapters() const { return chapters_; }
  /// The step files of a chapter, without ".cu".
  const std::vector<std::string>& steps(const std::string& chapter);
  /// The key of `step`: that of its file, or of the file with its number where several steps share
  /// one (v1_half_m is in v1_scalar.cu). "-" if there is none.
  std::string kernel(const std::string& chapter, const std::string& step);
  /// Covers the host functions in the step's file, its row in the chapter's table, and the parts of
  /// the chapter's host sources, attn/ and device/ that both use. Cost models, refusals and texts
  /// of a row are left out.
  std::string launch(const std::string& chapter, const std::string& step);
  /// For a part of verify_on_gpu.sh: times, peers, counters, sanitizer (with the problems of the
  /// chapter), calls; "-" for the others. `document`: a line's name; some peers have a script more.
  std::string method(const std::string& part, const std::string& chapter,
                     const std::string& document = {});

  /// The problems that gpu_problems.sh lists for a chapter, in order; empty if there is no such
  /// script.
  const std::vector<ListedProblem>& problems(const std::string& chapter);

  /// The names of the chunks in a step's launch key, for tests.
  std::set<std::string> launch_functions(const std::string& chapter, const std::string& step);

 private:
  // The code that launches of a chapter's steps may use, and the rows of its table.
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

/// Options separated by single blanks, without --step and --steps.
std::string problem_options(const std::string& options);

/// The kernel key of a text, for tests. `name` is the step's name in it.
std::string key_of_text(const std::string& text, const std::string& name);

}  // namespace attn::report
