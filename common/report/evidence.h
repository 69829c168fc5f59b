/// \file
/// Which kernels a folder of measurements is true of: DIR/manifest.txt says for each file its
/// checksum, the part of verify_on_gpu.sh that wrote it, the method of timing and the keys
/// (kernel_key.h) of the steps in it; DIR/parts.txt says for each part and chapter whether it
/// passed, on which files, and how long it took. Files of the part "others" were not measured by
/// this repository's scripts: they have checksums and keys, and no line in parts.txt.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "report/kernel_key.h"

namespace attn::report {

/// A file of measurements.
struct EvidenceFile {
  std::string sha256, part, chapter;
  int timing_method = 0;              ///< 0: no time of ours is in it
  std::map<std::string, std::string> keys;  ///< step -> key when it was measured
};

struct Manifest {
  std::map<std::string, EvidenceFile> files;       ///< by name
  std::map<std::string, std::string>
      unverified;  ///< "chapter/step" -> why it was not measured again
};

/// Throws InputError, in one line, for a manifest that cannot be read.
Manifest read_manifest(const std::filesystem::path& folder);
void write_manifest(const std::filesystem::path& folder, const Manifest&);

/// Notes that `files` of `folder` were written by a part, on the kernels below `root` as they are.
/// The line in parts.txt says `verdict` and `seconds`. Entries of files that the part wrote before
/// and that are gone are taken out.
void record(const std::filesystem::path& folder, const std::filesystem::path& root,
            const std::string& part, const std::string& chapter, const std::string& verdict,
            int seconds, const std::vector<std::string>& files);

/// Everything that is wrong: a file that was changed, added or removed, a part whose digest does
/// not agree, a step that has changed since without a reason in the manifest, a reason for a step
/// that has not. Empty: all is well.
std::vector<std::string> check_evidence(const std::filesystem::path& folder,
                                        const std::filesystem::path& root);

/// The state of a folder in a few lines: what has changed since, what is of an older method.
std::string evidence_summary(const std::filesystem::path& folder,
                             const std::filesystem::path& root);

/// One sentence for the end of a table that is made of `files`; empty where the folder has no
/// manifest. `root` defaults to the project that the folder lies in. `table`: its text; if it names
/// steps, changed ones that it does not name are left out.
std::string state_of(const std::filesystem::path& folder, const std::vector<std::string>& files,
                     std::filesystem::path root = {}, const std::string& table = "");

/// A Markdown table of the same: a chapter and part, the steps that have changed since, the method
/// of timing.
std::string state_table(const std::filesystem::path& folder, std::filesystem::path root = {});

/// The files of a part that are as they were measured, on kernels as they are: what need not be
/// measured again. None where the chapter has a step that no file has.
std::vector<std::string> current_files(const std::filesystem::path& folder,
                                       const std::filesystem::path& root, const std::string& part,
                                       const std::string& chapter);

/// "PART CHAPTER" in the order in which they should be measured: never passed, changed since, older
/// method; those that are as they should be come last if `all`, else not at all. `units` are all
/// that there are.
std::vector<std::string> stalest_first(const std::filesystem::path& folder,
                                       const std::filesystem::path& root,
                                       const std::vector<std::string>& units, bool all);

}  // namespace attn::report
